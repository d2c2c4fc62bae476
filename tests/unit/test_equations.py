"""docs/equations.md and docs/paper_notes.md against the code: what they name exists, and what names them is there."""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import protofed
from protofed.config import ABLATIONS, RunConfig, in_range, override, parse_override
from protofed.methods.catalogue import METHODS

ROOT = Path(__file__).parents[2]
SOURCE = Path(protofed.__file__).parent
PAGE = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
NOTES = (ROOT / "docs" / "paper_notes.md").read_text(encoding="utf-8")
THEORY = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")

MAIN_TEXT = {  # the paper's labels with the numbers of the lines they cover; (8) has none
    "eq:compose": [1],
    "eq:short_update": [2],
    "eq:long_update": [3],
    "eq:router": [4],
    "eq:align": [5],
    "eq:wasserstein": [6, 7],
    "eq:fedkmeans": [9],
    "eq:geom_median": [10],
    "eq:separation": [11],
    "eq:pointwise": [12],
    "eq:bpr": [13],
    "eq:global_obj": [14],
    "eq:adaptive_lambda": [15, 16],
    "eq:forget_metrics": [17, 18, 19],
}
ALGORITHMS = {"alg:client": [1], "alg:server": [2], "alg:inference": [3]}
LAST = 45  # of the appendix
IN_NO_DOCSTRING = {14, 17, 18, 19}  # no function of its own; defined in docs/metrics.md, where slices count from 0
MENTION = re.compile(r"(?<!after )Eqs?\. \((\d+)\)(?:[-–]\((\d+)\))?(?:, (eq:\w+))?")
ALGORITHM = re.compile(r"Algorithm (\d), (alg:\w+)")


@dataclass(frozen=True)
class Row:
    """One row of a table: the numbers and labels it is about, the functions and the tests it names."""

    numbers: tuple[int, ...]
    labels: tuple[str, ...]
    functions: tuple[str, ...]
    tests: tuple[tuple[str, str], ...]  # file, and a name or ""


def quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def numbers_in(cell: str) -> tuple[int, ...]:
    ends = [int(n) for n in re.findall(r"\d+", cell)]
    return tuple(range(ends[0], ends[-1] + 1)) if ends else ()


def named_tests(cell: str) -> Iterator[tuple[str, str]]:
    file = ""
    for text in quoted(cell):
        named, _, name = text.partition("::")
        file = named or file
        yield file, name


def rows(heading: str) -> list[Row]:
    """The rows of the table under a heading; where the first column is words, there are no numbers and no labels."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [
        Row(numbers_in(c[0]), quoted(c[1]), quoted(c[3]), tuple(named_tests(c[4])))
        if len(c) == 5
        else Row((), (), quoted(c[2]), tuple(named_tests(c[3])))
        for c in cells
    ]


EQUATIONS, ALGORITHM_ROWS, UNNUMBERED, APPENDIX = map(
    rows, ("Main text", "Algorithms", "Displays without a number", "Appendix")
)
ROWS = [*EQUATIONS, *ALGORITHM_ROWS, *UNNUMBERED, *APPENDIX]


def labelled(table: list[Row]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in table:
        for label in row.labels:
            found.setdefault(label, []).extend(row.numbers)
    return found


def resolved(path: str) -> object:
    """The object at a dotted path below `protofed`."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        if SOURCE.joinpath(*parts[:n]).with_suffix(".py").is_file():
            found: object = importlib.import_module("protofed." + ".".join(parts[:n]))
            for name in parts[n:]:
                found = getattr(found, name)
            return found
    raise AssertionError(f"no module of protofed is the beginning of {path}")


def documented(body: list[ast.stmt], path: str) -> Iterator[tuple[str, str]]:
    """Dotted path and docstring of every function and class, nested ones too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield f"{path}.{node.name}", ast.get_docstring(node) or ""
            yield from documented(node.body, f"{path}.{node.name}")


@cache
def docstrings() -> dict[str, str]:
    """Of everything in the package but the baselines, whose equations are those of other papers."""
    found: dict[str, str] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(SOURCE).with_suffix("").parts
        if place[:2] != ("methods", "baselines"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found |= {".".join(place): ast.get_docstring(tree) or "", **dict(documented(tree.body, ".".join(place)))}
    return found


def mentions() -> list[tuple[str, int, str]]:
    """(who, number, label or "") of every equation that a docstring names."""
    return [
        (who, number, label)
        for who, text in docstrings().items()
        for first, last, label in MENTION.findall(" ".join(text.split()))
        for number in range(int(first), int(last or first) + 1)
    ]


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_main_text_has_a_row_for_every_label_with_its_numbers():
    assert labelled(EQUATIONS) == MAIN_TEXT
    assert labelled(ALGORITHM_ROWS) == ALGORITHMS


def test_every_number_has_exactly_one_row():
    assert [n for row in [*EQUATIONS, *APPENDIX] for n in row.numbers] == list(range(1, LAST + 1))


def test_every_row_names_a_function_and_a_test():
    assert all(row.functions for row in [*EQUATIONS, *ALGORITHM_ROWS, *UNNUMBERED])
    assert all(row.tests for row in ROWS)


@pytest.mark.parametrize("path", sorted({path for row in ROWS for path in row.functions}))
def test_every_function_that_is_named_exists(path):
    found = resolved(path)
    assert callable(found) or isinstance(found, property)


@pytest.mark.parametrize("file", sorted({file for row in ROWS for file, _ in row.tests}))
def test_every_test_that_is_named_exists(file):
    assert (ROOT / "tests" / file).is_file()
    named = {name for row in ROWS for f, name in row.tests if f == file and name}
    assert sorted(named - functions_of(file)) == []


def test_an_equation_that_a_docstring_names_has_a_row_with_that_label():
    label_of = {n: label for label, numbers in MAIN_TEXT.items() for n in numbers}
    wrong = [m for m in mentions() if m[1] > LAST or (m[2] and label_of.get(m[1]) != m[2])]
    assert wrong == []
    assert len({who for who, _, _ in mentions()}) > 15  # the pattern still finds them


def test_a_function_that_names_an_equation_is_in_its_row():
    listed = {(path, n) for row in EQUATIONS for path in row.functions for n in row.numbers}
    modules = {".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in SOURCE.rglob("*.py")}
    assert sorted({(who, n) for who, n, _ in mentions() if who not in modules} - listed) == []


def test_an_equation_that_has_a_row_is_named_by_one_of_its_functions():
    named = {(who, n) for who, n, _ in mentions()}
    silent = {n for row in EQUATIONS for n in row.numbers if not any((path, n) in named for path in row.functions)}
    assert silent <= IN_NO_DOCSTRING


def test_each_algorithm_is_named_by_a_function_of_its_row():
    found = {who: ALGORITHM.findall(" ".join(text.split())) for who, text in docstrings().items()}
    named = {(who, label, int(number)) for who, pairs in found.items() for number, label in pairs}
    listed = {(path, row.labels[0], row.numbers[0]) for row in ALGORITHM_ROWS for path in row.functions}
    assert sorted(named - listed) == []
    assert {label for _, label, _ in named} == set(ALGORITHMS)


def test_every_label_of_the_theory_page_is_in_the_appendix_table():
    labels = set(re.findall(r"\b(?:eq|lem|thm|prop):\w+", THEORY))
    assert labels
    assert sorted(labels - set(labelled(APPENDIX))) == []


def test_links_to_sections_of_the_theory_page_lead_to_a_heading():
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^## ([\w -]+)$", THEORY, re.MULTILINE)}
    targets = set(re.findall(r"\(theory\.md#([^)]+)\)", PAGE + NOTES))
    assert targets
    assert sorted(targets - headings) == []


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`([\w/]+\.py)(?:::\w+)?`", NOTES))))
def test_every_file_that_the_notes_name_exists(file):
    assert (SOURCE / file).is_file() or (ROOT / file).is_file()


def test_every_function_that_the_notes_name_exists():
    named = re.findall(r"`([\w/]+)\.py::(\w+)`", NOTES)
    assert len(named) > 20
    assert [f"{m}.{f}" for m, f in named if not hasattr(importlib.import_module(_module(m)), f)] == []


def _module(path: str) -> str:
    return "protofed." + path.replace("/", ".")


def test_every_setting_and_switch_that_the_notes_name_exists():
    settings = re.findall(r"--set ([\w.]+=[\w.-]+)", NOTES)
    assert settings
    in_range(override(RunConfig(), dict(map(parse_override, settings))))
    assert set(re.findall(r"--ablate ([\w-]+)", NOTES)) <= set(ABLATIONS)
    assert set(re.findall(r"--method ([\w-]+)", NOTES)) <= set(METHODS)
    keys = re.findall(r"`((?:stream|backbone|training|privacy|protofed)\.\w+)`", NOTES)
    for key in keys:
        group, name = key.split(".")
        assert hasattr(getattr(RunConfig(), group), name), key
