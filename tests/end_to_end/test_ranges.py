"""Settings at either end of their range: a run on a small log ends, or is refused in one line, within half a minute."""

import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import worlds
from test_command_line import protofed

from protofed.cli import main
from protofed.config import RunConfig, in_range, override, ranges
from protofed.errors import ConfigError, ProtoFedError
from protofed.experiments.run import Experiment
from protofed.features.build import content_of

SECONDS = 30
PEFT = {"method": "prompt-tuning", "variant": "peft"}
METHOD = {"protofed": {"method": "protofed-sp"}, "privacy": {"method": "protofed-sp"}, "peft": PEFT}
FEATURES = "place,category"
FLAGSHIP = {"method": "protofed", "protofed.mode": "private", "scoring.head": True, "content.features": FEATURES}
OF_FLAGSHIP = ("protofed", "privacy", "scoring", "content")  # sections whose settings it reads


def too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"still running after {SECONDS} s")


def refusal(settings: dict[str, object], out: Path) -> str:
    """Why the settings are refused; nothing where the run ends."""
    before = signal.signal(signal.SIGPROF, too_long)  # of this process's own time: a busy machine is nobody's fault
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        config = in_range(override(worlds.tiny_config(training__base_epochs=1, training__slice_epochs=1), settings))
        content = content_of(config.content, worlds.tiny_log(), worlds.tiny_items(), out)
        Experiment(config, worlds.tiny_log(), out / "cache", content=content).run(out / "run")
    except ProtoFedError as problem:
        return str(problem)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return ""


ENDS = [(key, end) for key in ranges() for end in ("least", "most")]
OF_ALL = [pytest.param(*one, marks=() if place % 7 == 2 else pytest.mark.long) for place, one in enumerate(ENDS)]
FLAGSHIP_ENDS = [(key, end) for key, end in ENDS if key.split(".")[0] in OF_FLAGSHIP]
OF_IT = [
    pytest.param(*one, marks=() if place % 25 == 5 else pytest.mark.long) for place, one in enumerate(FLAGSHIP_ENDS)
]


def at_its_end(key: str, end: str) -> dict[str, object]:
    """The setting at the least or the most of its range, as a value of its own type."""
    old: Any = RunConfig()
    for name in key.split("."):
        old = getattr(old, name)
    return {key: type(old)(ranges()[key][end == "most"])}


@pytest.mark.slow
@pytest.mark.parametrize(("key", "end"), OF_ALL)
def test_a_setting_at_the_end_of_its_range_ends_or_is_refused(tmp_path, key, end):
    method = METHOD.get(key.split(".")[0], {"method": "finetune-last"})
    assert len(refusal({**method, **at_its_end(key, end)}, tmp_path).splitlines()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("key", "end"), OF_IT)
def test_so_does_one_of_the_flagship_with_its_head_its_releases_and_content(tmp_path, key, end):
    assert len(refusal({**FLAGSHIP, **at_its_end(key, end)}, tmp_path).splitlines()) <= 1


def test_prompts_cannot_read_more_tokens_than_the_backbone():
    with pytest.raises(ConfigError, match=r"prompt_history must be at most backbone.history_length, got 51 and 50"):
        in_range(override(RunConfig(), {"protofed.prompt_history": 51}))


@pytest.mark.parametrize(
    "problem", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_a_machine_without_memory_is_one_line(tmp_path, monkeypatch, problem):
    def full() -> NoReturn:
        raise problem

    monkeypatch.setattr(main, "app", full)
    done = protofed("run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: out of memory; use smaller settings or a smaller --clients. What is finished is kept\n"
    )
