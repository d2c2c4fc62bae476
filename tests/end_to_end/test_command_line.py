"""The `protofed` command as its user meets it: results, and one clear line for every mistake."""

import contextlib
import gzip
import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import protofed as package
from protofed.cli.main import main
from protofed.cli.run import settle
from protofed.config import RunConfig

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
FAST = [
    *("--set", "stream.n_slices=2", "--set", "backbone.width=16", "--set", "backbone.layers=1"),
    *("--set", "backbone.history_length=10", "--set", "training.base_epochs=1", "--set", "training.slice_epochs=1"),
]
POPULARITY = ["--dataset", "synthetic", "--method", "popularity"]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def protofed(*arguments: object, cwd: Path) -> Done:
    """The command line in this process, which saves importing PyTorch anew for every call."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["protofed", *map(str, arguments)]
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        sys.argv = argv
    return Done(code, out.getvalue(), err.getvalue())


def refused(*arguments: object, cwd: Path) -> str:
    """The one line a mistake gives; nothing on stdout, exit code 2, no trace."""
    done = protofed(*arguments, cwd=cwd)
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def write_log(root: Path, name: str, times: list[int], n_items: int = 30) -> None:
    (root / name).mkdir(parents=True)
    rows = range(len(times))
    table = pa.table({"user": [n % 12 for n in rows], "item": [n % n_items for n in rows], "timestamp": times})
    pq.write_table(table, root / name / "interactions.parquet")


def test_a_run_prints_its_numbers_as_json_and_a_second_call_only_shows_them(tmp_path):
    arguments = ["run", *POPULARITY, "--out", "run", "--cache", "cache", "--json", *FAST]
    first = protofed(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    assert (summary["dataset"], summary["method"], summary["seed"]) == ("synthetic", "popularity", 0)
    rows = {(row["candidates"], row["subset"]): row for row in summary["headline"]}
    assert (
        rows["sampled", "all"]["queries"] == rows["sampled", "novel"]["queries"] + rows["sampled", "repeat"]["queries"]
    )
    written = (tmp_path / "run" / "metrics.parquet").stat().st_mtime_ns
    again = protofed(*arguments, cwd=tmp_path)
    assert json.loads(again.stdout) == summary
    assert (tmp_path / "run" / "metrics.parquet").stat().st_mtime_ns == written
    report = protofed("report", "run", "-o", "report.html", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "popularity" in (tmp_path / "report.html").read_text(encoding="utf-8")


PRIVATE = [
    *("run", "--dataset", "synthetic", "--method", "protofed-sp", "--out", "run", "--cache", "cache", *FAST),
    *("--set", "protofed.base_steps=1", "--set", "protofed.local_steps=1", "--set", "privacy.rounds_per_slice=3"),
]


def test_a_private_run_prints_what_it_promises_and_keeps_the_ledger(tmp_path):
    told = json.loads(protofed(*PRIVATE, "--target-epsilon", "2", "--json", cwd=tmp_path).stdout)["privacy"]
    (release,) = told["releases"]
    assert (release["sampling_rate"], release["count"], release["stream"]) == (0.05, 6, "prototypes")
    assert (told["trust"], told["adjacency"], told["unit"], told["delta"]) == (
        *("central", "add or remove one user", "user", 1e-5),
    )
    assert 1.99 < told["epsilon_release"] <= 2.0
    assert told["epsilon_server"] is None
    priced = json.loads(protofed("privacy", "--ledger", "run/ledger.json", "--json", cwd=tmp_path).stdout)
    assert priced["guarantees"][0]["epsilon"]["pld"] == told["epsilon_release"]
    shown = protofed(*PRIVATE, "--target-epsilon", "2", cwd=tmp_path).stdout
    assert "privacy: ε = 2 against who sees what is released, nothing is promised against the server" in shown
    assert "; add or remove one user, per user, central trust" in shown
    assert "add / remove all of them, δ = 1e-5. Events" in shown
    assert f"({100 * told['later_users_with_base_events']:.3g} % of later users have some)" in shown
    assert "rate 0.05, 6 rounds" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-epsilon", "0.1", "--noise-multiplier", "0.3"], "spends more than ε = 0.1 in its first round"),
        (["--set", "protofed.aggregator=geometric-median"], "the geometric-median aggregator has no noise of bounded"),
        (["--set", "protofed.prototypes=5000"], "5000 prototypes are more than the"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused_in_one_line(tmp_path, arguments, message):
    done = protofed(*PRIVATE, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.strip().splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "run" / "metrics.parquet").exists()


HEAVY = {"torch", "numpy", "scipy", "polars", "pyarrow", "matplotlib", "dp_accounting", "safetensors", "jaxtyping"}
COMMANDS = ("run", "bench", "report", "pack", "demo", "privacy", "tune", "data")


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("data", "import", "--help"), *((command, "--help") for command in COMMANDS)]
)
def test_help_is_answered_without_loading_what_only_work_needs(tmp_path, words):
    code = f"import sys; sys.argv = {['protofed', *words]}; from protofed.cli.main import main; main()"
    listing = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
    done = subprocess.run([sys.executable, "-c", listing], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    loaded = set(done.stderr.split())
    assert "protofed.cli.main" in loaded
    assert loaded & HEAVY == set()


def test_the_version_is_one_line(tmp_path):
    assert protofed("--version", cwd=tmp_path) == Done(0, f"protofed {package.__version__}\n", "")


def test_no_arguments_are_answered_with_help(tmp_path):
    assert "Usage" in "".join(protofed(cwd=tmp_path)[1:])


def test_the_installed_command_lists_the_methods(tmp_path):
    command = [sys.executable, "-m", "protofed.cli.main", "run", "--list-methods", "--json"]
    listed = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout)
    assert {"popularity", "frozen", "personal-memory", "finetune-last", "full-retrain"} <= set(listed)


def test_a_config_file_is_read_and_flags_go_before_it(tmp_path):
    (tmp_path / "run.toml").write_text(
        'dataset = "synthetic"\nmethod = "popularity"\nseed = 3\n[stream]\nn_slices = 2\n'
    )
    done = protofed(
        "run", "--config", "run.toml", "--seed", 4, "--out", "r", "--cache", "c", "--json", *FAST, cwd=tmp_path
    )
    assert json.loads(done.stdout)["seed"] == 4, done.stderr
    assert json.loads(done.stdout)["method"] == "popularity"


@pytest.mark.parametrize("way", ["flag", "file", "set"])
def test_what_a_preset_and_a_method_bring_along_comes_whichever_way_they_are_named(tmp_path, way):
    chosen = settled(tmp_path, {way: {"preset": "paper", "method": "personal-memory"}})
    assert (chosen.preset, chosen.backbone.width, chosen.scoring.personal_memory) == ("paper", 256, 2.0)
    assert settled(tmp_path, {way: {"method": "prompt-tuning"}}).variant == "peft"


def test_a_preset_gives_way_to_the_file_the_file_to_flags_and_flags_to_set(tmp_path):
    every = {way: {"preset": name} for way, name in (("file", "paper"), ("flag", "small"), ("set", "paper"))}
    for ways, width in ((("file",), 256), (("file", "flag"), 64), (("file", "flag", "set"), 256)):
        assert settled(tmp_path, {way: every[way] for way in ways}).backbone.width == width
    own = {"file": {"backbone.width": 32}, "set": {"preset": "paper"}}
    assert settled(tmp_path, own).backbone.width == 32
    own["set"]["backbone.width"] = 128
    assert settled(tmp_path, own).backbone.width == 128


def settled(tmp_path: Path, ways: dict[str, dict[str, object]]) -> RunConfig:
    """The config of settings given as flags, in a file and with --set."""
    (tmp_path / "run.toml").write_text("\n".join(f"{key} = {json.dumps(v)}" for key, v in ways.get("file", {}).items()))
    return settle(ways.get("flag", {}), tmp_path / "run.toml", [f"{key}={v}" for key, v in ways.get("set", {}).items()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "frosen"], "unknown method 'frosen'; did you mean 'frozen'?"),
        (["--dataset", "gowala"], "gowala"),
        (["--preset", "huge"], "preset must be one of small, paper, got 'huge'"),
        (["--set", "preset=huge"], "preset must be one of small, paper, got 'huge'"),
        (["--set", "method=frosen"], "unknown method 'frosen'; did you mean 'frozen'?"),
        (["--set", "trainning.negatives=3"], "unknown config key 'trainning.negatives'; did you mean 'training'?"),
        (
            ["--set", "training.negative=3"],
            "unknown config key 'training.negative'; did you mean 'training.negatives'?",
        ),
        (["--set", "training.negatives=many"], "training.negatives must be of type int, got 'many'"),
        (["--set", "training.negatives=0"], "training.negatives must lie between 1 and"),
        (["--set", "negatives"], "--set takes key=value, got 'negatives'"),
        (["--set", "stream.edges=weekly"], "stream.edges must be one of count, duration, got 'weekly'"),
        (["--seed", "-1"], "seed must lie between 0 and"),
        (["--device", "tpu9"], "--device must be cpu, cuda or auto, got 'tpu9'"),
        (["--config", "missing.toml"], "no config file at missing.toml"),
        (["--ablate", "shorts"], "unknown ablation 'shorts'; did you mean 'short'?"),
        (["--mode", "fast"], "protofed.mode must be one of reference, literal, nodp, nothing, private, got 'fast'"),
        (["--trust", "nobody"], "privacy.trust must be one of central, secure-aggregation, local, got 'nobody'"),
        (["--target-epsilon", "-1"], "privacy.target_epsilon must lie between 0 and"),
    ],
)
def test_a_mistake_in_the_call_is_one_line_and_writes_nothing(tmp_path, arguments, message):
    assert message in refused(
        "run", "--out", "run", "--dataset", "synthetic", "--method", "frozen", *arguments, cwd=tmp_path
    )
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_folder_says_how_to_name_one(tmp_path):
    assert "--out is missing" in refused("run", cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--dataset is missing: name a prepared log under --root, or --dataset synthetic"),
        (["--method", "frozen"], "--dataset is missing"),
        (["--dataset", "synthetic"], "--method is missing: name one of --list-methods"),
        (["--dataset", "synthetic", "--set", "hyper.strength=1"], "--method is missing"),
        (["--config", "run.toml"], "--method is missing"),
    ],
)
def test_a_run_whose_log_or_method_nobody_named_is_refused(tmp_path, arguments, message):
    (tmp_path / "run.toml").write_text('dataset = "synthetic"\n')
    assert message in refused("run", "--out", "run", *arguments, cwd=tmp_path)
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_folder_is_left_alone(tmp_path):
    arguments = ["run", *POPULARITY, "--cache", "cache", *FAST]
    assert protofed(*arguments, "--out", "run", cwd=tmp_path).returncode == 0
    before = (tmp_path / "run" / "metrics.parquet").read_bytes()
    assert "holds another run" in refused(*arguments, "--seed", 1, "--out", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "metrics.parquet").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "protofed-sp", "--target-epsilon", "0"], "--target-epsilon must be above 0, got 0"),
        (["--method", "ewc", "--target-epsilon", "0"], "--target-epsilon must be above 0, got 0"),
        (["--method", "protofed-sp", "--set", "privacy.target_epsilon=0"], "a private run needs --target-epsilon or"),
        (["--method", "ewc", "--set", "privacy.wrap=true", "--set", "privacy.target_epsilon=0"], "a private run needs"),
    ],
)
def test_a_budget_of_nothing_is_refused_before_any_work(tmp_path, arguments, message):
    assert message in refused("run", "--dataset", "synthetic", *arguments, "--out", "run", *FAST, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("--method", "protofed-sp"), ("--method", "ewc", "--target-epsilon", "3.4")])
def test_a_budget_that_nothing_here_can_price_is_refused_before_any_work(tmp_path, monkeypatch, words):
    monkeypatch.setattr("protofed.errors.find_spec", lambda module: None if module == "dp_accounting" else object())
    line = refused("run", "--dataset", "synthetic", *words, "--out", "run", *FAST, cwd=tmp_path)
    assert line == "error: dp-accounting is not installed; run `pip install dp-accounting`"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("demo",), ("report", "."), ("report", ".", "-o", "x.html", "--json")])
def test_without_what_writes_the_report_nothing_is_begun(tmp_path, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    line = refused(*words, cwd=tmp_path)
    assert line.startswith("error: jinja2 is not installed; run `pip install jinja2`, or")
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_another_ending_is_told_which_there_are(tmp_path):
    line = refused("report", ".", "-o", "x.pdf", cwd=tmp_path)
    assert line == "error: --out must end in one of .html, .htm, .md, .tex, .csv, got x.pdf; or name a --format"


@pytest.mark.parametrize(
    ("words", "near"),
    [(("repot",), "report"), (("data", "prepar"), "prepare"), (("run", "--datset", "x"), "--dataset")],
)
def test_a_misspelt_word_is_mended_once(tmp_path, words, near):
    done = protofed(*words, cwd=tmp_path)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2
    assert said.lower().count("did you mean") == 1
    assert f"'{near}'" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("recommend", "x", "--user", "a", "-n", "many"), "'many' is not a valid integer"),
        (("recommend",), "Missing argument 'MODEL'"),
        (("data", "import"), "Missing argument 'FILE'"),
        (("run", "--preset"), "'--preset' requires an argument"),
    ],
)
def test_a_call_that_cannot_be_parsed_is_one_line(tmp_path, words, told):
    line = refused(*words, cwd=tmp_path)
    assert told in line
    assert line.endswith("--help`")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nnegtives = 3", "unknown config key 'training.negtives'; did you mean 'training.negatives'?"),
        ("[training]\nnegatives = -4", "training.negatives must lie between 1 and 1e+06, got -4"),
        ("[training]\nnegatives = 'x'", "training.negatives must be of type int, got 'x'"),
        ("preset = 'smal'", "preset must be one of small, paper, got 'smal'"),
        ("[hyper]\nstrenth = 1.0", "unknown config key 'hyper.strenth'; did you mean 'hyper.strength'?"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_name(tmp_path, text, message):
    (tmp_path / "a.toml").write_text(f'dataset = "synthetic"\nmethod = "ewc"\n{text}\n')
    assert refused("run", "--config", "a.toml", "--out", "run", cwd=tmp_path) == f"error: a.toml: {message}"


def test_what_is_wrong_with_a_flag_beside_a_file_is_not_blamed_on_the_file(tmp_path):
    (tmp_path / "a.toml").write_text('dataset = "synthetic"\nmethod = "ewc"\n')
    line = refused("run", "--config", "a.toml", "--out", "run", "--set", "seeed=1", cwd=tmp_path)
    assert line == "error: unknown config key 'seeed'; did you mean 'seed'?"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc here")
@pytest.mark.parametrize(
    "words", [("run", *POPULARITY), ("demo",), ("bench", "--datasets", "synthetic", "--methods", "ewc")]
)
def test_a_place_that_takes_no_folder_is_told_in_one_line(tmp_path, words):
    done = protofed(*words, "--out", "/proc/x", cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("error: /proc/x")


def test_a_log_with_too_few_instants_is_refused_and_the_advice_works(tmp_path):
    write_log(tmp_path, "week", [day * 86_400 for day in range(7) for _ in range(60)])
    line = refused("run", "--dataset", "week", "--root", ".", "--out", "run", "--method", "popularity", cwd=tmp_path)
    assert "7 distinct timestamps, too few for a base block and 8 slices" in line
    assert not (tmp_path / "run").exists()
    advice = next(word for word in line.split() if word.startswith("stream.n_slices="))
    settings = [part for part in FAST if part not in ("--set", "stream.n_slices=2")]
    flags = [flag for part in [*settings, advice] for flag in ("--set", part)]
    arguments = ["--dataset", "week", "--root", ".", "--method", "popularity", "--cache", "cache"]
    done = protofed("run", *arguments, "--out", "run", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_log_that_five_core_empties_is_refused(tmp_path):
    (tmp_path / "thin").mkdir()
    table = pa.table({"user": range(20), "item": range(20), "timestamp": range(20)})
    pq.write_table(table, tmp_path / "thin" / "interactions.parquet")
    line = refused("run", "--dataset", "thin", "--root", ".", "--method", "frozen", "--out", "run", cwd=tmp_path)
    assert "5" in line
    assert not (tmp_path / "run").exists()


def test_a_truncated_gzip_is_refused_and_nothing_is_prepared(tmp_path):
    rows = "".join(f"{n}\t2010-10-12T00:21:{n % 60:02d}Z\t1.0\t2.0\t{n % 9}\n" for n in range(5_000))
    packed = gzip.compress(rows.encode())
    (tmp_path / "loc-gowalla_totalCheckins.txt.gz").write_bytes(packed[: len(packed) // 2])
    source = tmp_path / "loc-gowalla_totalCheckins.txt.gz"
    line = refused("data", "prepare", "gowalla", "--source", source, "--root", "data", cwd=tmp_path)
    assert "loc-gowalla_totalCheckins.txt.gz" in line
    assert not (tmp_path / "data").exists()


STOPPED = "stopped; the same command goes on from the last finished slice, or epoch of the warm-up"


@pytest.mark.slow
def test_ctrl_c_stops_a_run_in_one_line_leaves_whole_files_and_the_same_command_goes_on(tmp_path):
    arguments = ["run", "--method", "finetune-last", "--out", "run", "--cache", "cache", "--json", *FAST]
    arguments += ["--dataset", "synthetic"]
    command = [sys.executable, "-m", "protofed.cli.main", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stderr is not None
        lines = ["warm-up (at most 1 epoch)", "preparing the method", "base block: evaluating"]
        assert [child.stderr.readline() for _ in range(4)] == [
            f"{line}\n" for line in (*lines, "base block done (1 of 3)")
        ]
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=60)
    assert (child.returncode, stdout) == (130, "")
    assert stderr.removeprefix("slice 1 of 2: learning\n") == f"{STOPPED}\n"
    assert not list(tmp_path.rglob("*.unfinished"))
    assert not (tmp_path / "run" / "metrics.parquet").exists()
    rest = protofed(*arguments, cwd=tmp_path)
    assert rest.returncode == 0
    assert rest.stderr.splitlines() == [
        "preparing the method",
        *("slice 1 of 2: learning", "slice 1 of 2: evaluating", "slice 1 done (2 of 3)"),
        *("slice 2 of 2: learning", "slice 2 of 2: evaluating", "slice 2 done (3 of 3)"),
    ]
    whole = ["whole" if word == "run" else word for word in arguments[1:]]
    assert protofed("run", *whole, cwd=tmp_path).returncode == 0
    for name in ("metrics.parquet", "per_user.parquet"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_ctrl_c_in_the_warm_up_says_how_to_go_on_and_the_same_command_does(tmp_path):
    arguments = ["run", *POPULARITY, "--out", "run", "--cache", "cache", "--json", *FAST]
    arguments += ["--set", "training.base_epochs=8", "--set", "training.patience=8"]
    command = [sys.executable, "-m", "protofed.cli.main", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        while child.stderr.readline() != "warm-up (at most 8 epochs)\n":
            pass
        until = time.monotonic() + 60
        while not list((tmp_path / "cache").glob("*.training.safetensors")) and time.monotonic() < until:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)
    assert (child.returncode, stderr) == (130, f"{STOPPED}\n")
    rest = protofed(*arguments, cwd=tmp_path)
    assert re.search(r"^warm-up \(epoch \d+ of at most 8, validation NDCG@10 0\.\d+\)$", rest.stderr, re.MULTILINE)


@pytest.mark.parametrize(("command", "line"), [(["demo"], STOPPED), (["data", "list"], "stopped")])
def test_only_who_can_continue_is_told_so(tmp_path, monkeypatch, command, line):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("protofed.data.prepared.prepared_names", interrupted)
    monkeypatch.setattr(sys.modules["protofed.cli.demo"], "load", interrupted)
    assert protofed(*command, cwd=tmp_path) == Done(130, "", f"{line}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_nothing_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    assert "runs" in refused("report", "runs", cwd=tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real logs are not at {SHARED}")
def test_a_real_log_runs_end_to_end(tmp_path):
    arguments = ["--dataset", "gowalla_1k", "--root", SHARED, "--method", "popularity", "--clients", 200]
    done = protofed("run", *arguments, "--out", "run", "--cache", "cache", "--json", *FAST, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    row = next(r for r in json.loads(done.stdout)["headline"] if (r["candidates"], r["subset"]) == ("sampled", "all"))
    assert 0.1 < row["ndcg@10"] < 0.5
