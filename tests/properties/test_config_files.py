"""Whatever a config file holds, it is read or refused in one line that a user can act on."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import worlds

from protofed.cli.run import settle
from protofed.config import RunConfig, read_toml, to_toml
from protofed.errors import ConfigError, ProtoFedError
from protofed.experiments.grid import cells, read_grid
from protofed.methods.catalogue import configured, method_named
from protofed.methods.private import as_asked
from protofed.slices.stream import SliceStream

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))
PIECES = [
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b"'",
        b"=",
        b".",
        b"\n",
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\\u0000",
        b'"" = 1\n',
    ),
    *(b"1e999", b"nan", b"-inf", b"9" * 30, b"9" * 400, b"9" * 5_000, b"0x1F", b"1_0", b"+1", b"true", b"[]", b"{}"),
    *(b"1979-05-27", b"07:32:00", b"a.b.c", b'"a.b"', b"[" * 3_000, b"[[" * 50 + b"]]" * 50, b"''' '''", b"preset"),
    *(b"hyper", b"[hyper]\n", b"[[hyper]]\n", b"hyper = 3\n", b"dataset = [1]\n", b'method = ["x"]\n'),
]


def mutated(text: bytes, draws: random.Random) -> bytes:
    """The text with a few bytes, pieces or lines changed."""
    found = bytearray(text)
    for _ in range(draws.choice([1, 1, 2, 3, 6])):
        place, lines = draws.randrange(len(found) + 1), bytes(found).split(b"\n")
        line, piece, other = draws.randrange(len(lines)), draws.choice(PIECES), draws.choice(PIECES)
        kind = draws.randrange(6)
        if kind == 0:
            found[place : place + 1] = bytes([draws.randrange(256)])
        elif kind == 1:
            found[place:place] = piece
        elif kind == 2:
            del found[place : place + draws.randrange(1, 20)]
        else:
            changed = {3: lines[line - 1], 4: lines[line].split(b"=")[0] + b"= " + piece, 5: piece + b" = " + other}
            lines[line] = changed[kind]
            found = bytearray(b"\n".join(lines))
    return bytes(found)


def read_as_a_run(path: Path) -> None:
    config = settle({}, path)
    as_asked(configured(config, method_named(config.method)), config)
    SliceStream(worlds.tiny_log(), config.stream)


def read_as_a_grid(path: Path) -> None:
    cells(read_grid(path), settle)


def refusal(path: Path, read: Callable[[Path], object]) -> str:
    """What is said against the file; nothing where it is read."""
    try:
        read(path)
    except ProtoFedError as problem:
        return str(problem)
    return ""


def check(path: Path, seeds: range) -> None:
    run, grids = to_toml(RunConfig()).encode(), [file.read_bytes() for file in EXPERIMENTS]
    refused = 0
    for seed in seeds:
        draws = random.Random(seed)
        for text, read in ((run, read_as_a_run), (run, read_toml), (draws.choice(grids), read_as_a_grid)):
            path.write_bytes(mutated(text, draws))
            said = refusal(path, read)
            assert len(said.splitlines()) <= 1, (seed, said)
            refused += bool(said)
    assert refused > len(seeds)  # the mutations do hurt


def test_300_mutated_config_files_are_read_or_refused_in_one_line(tmp_path):
    check(tmp_path / "config.toml", range(100))


@pytest.mark.long
def test_6000_mutated_config_files_are_read_or_refused_in_one_line(tmp_path):
    check(tmp_path / "config.toml", range(100, 2_100))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"seed = \xff", "is not UTF-8 text"),
        (b"seed = ", "is not valid TOML: Invalid value"),
        (b"seed = " + b"9" * 5_000, "is not valid TOML: Exceeds the limit"),
        (b"seed = " + b"[" * 3_000, "is not valid TOML: it is nested too deeply"),
    ],
)
@pytest.mark.parametrize("read", [read_as_a_run, read_as_a_grid, read_toml])
def test_a_file_that_is_no_toml_is_named(tmp_path, text, said, read):
    path = tmp_path / "mine.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"^{path} {said}"):
        read(path)


def test_a_whole_number_that_no_float_can_hold_is_refused(tmp_path):
    (tmp_path / "mine.toml").write_text(f"[backbone]\ndropout = 1{'0' * 400}\n")
    with pytest.raises(ConfigError, match=r"backbone\.dropout must be of type float, got 1000"):
        read_toml(tmp_path / "mine.toml")
