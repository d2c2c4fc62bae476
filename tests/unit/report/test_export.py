"""Markdown, LaTeX and CSV of small fixed runs: exact texts, and LaTeX that a strict reader accepts."""

import csv
import io
import itertools
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from run_folders import write_run
from scipy.stats import norm

from protofed.errors import MissingExtra
from protofed.report import prices
from protofed.report.export import _md, _tex_table, accuracy, to_latex, to_markdown, to_tidy_csv
from protofed.report.layout import Cell, Column, Estimate, Line, Table, to_csv
from protofed.report.runs import find_runs
from protofed.report.sections import group
from protofed.report.tables import Results, compute

PRIVATE = [{"noise_multiplier": 1.0, "sampling_rate": 1.0, "count": 2}]


def flat(level: float):
    """The same NDCG@10 everywhere; HR@10 is 0.2 more, novel events are half as good."""

    def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
        return (level + 0.2 * (metric == "hr@10")) * (0.5 if subset == "novel" else 1.0)

    return value


def forgetful(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return 0.3 if trained == tested else 0.1


TOLD = {"bytes_up": 65.0, "bytes_down": 8192.0, "trainable_parameters": 512.0, "trainable_parameters_per_user": 64.0}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[Results]:
    """Three rows of a data set whose name needs escaping: one private, one forgetful, one of two seeds."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "a0", flat(0.4), method="ewc", dataset="a_b&c", seed=0)
    write_run(root / "a1", flat(0.42), method="ewc", dataset="a_b&c", seed=1)
    write_run(root / "f", forgetful, method="finetune-last", dataset="a_b&c")
    told = [{"slice": 1, "stage": "learn", **TOLD}]
    write_run(root / "p", flat(0.2), method="fedavg", dataset="a_b&c", ledger=PRIVATE, log=told)
    return [compute(section) for section in group(find_runs(root)[0])]


MARKDOWN = r"""## a\_b&c

a\_b&c: mean of A\[t, t\] over slices 1 to 2, ± standard deviation over seeds; sampled: 1 positive and 99 negatives; full: every item; lower AF is better

| method | NDCG@10 sampled all | NDCG@10 sampled novel | NDCG@10 full all | NDCG@10 full novel | HR@10 sampled all | HR@10 sampled novel | HR@10 full all | HR@10 full novel | continual AF | continual BWT | continual FWT | continual final |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| ewc | **0.410 ± .014** | 0.205 ± .007 | **0.410 ± .014** | 0.205 ± .007 | **0.610 ± .014** | **0.305 ± .007** | **0.610 ± .014** | **0.305 ± .007** | 0.000 ± .000 | 0.000 ± .000 | **0.365 ± .014** | **0.410 ± .014** |
| finetune-last | 0.300 | **0.300** | 0.300 | **0.300** | 0.300 | 0.300 | 0.300 | 0.300 | 0.200 | −0.200 | 0.055 | 0.167 |
| fedavg | 0.200 | 0.100 | 0.200 | 0.100 | 0.400 | 0.200 | 0.400 | 0.200 | 0.000 | 0.000 | 0.155 | 0.200 |

a\_b&c: NDCG@10 minus that of the best row, with 95 % paired bootstrap interval over users

| method | sampled, all minus ewc | sampled, novel minus finetune-last | full, all minus ewc | full, novel minus finetune-last |
|---|---:|---:|---:|---:|
| ewc | **best** | −0.095 \[−.095, −.095\] | **best** | −0.095 \[−.095, −.095\] |
| finetune-last | −0.110 \[−.110, −.110\] | **best** | −0.110 \[−.110, −.110\] | **best** |
| fedavg | −0.210 \[−.210, −.210\] | −0.200 \[−.200, −.200\] | −0.210 \[−.210, −.210\] | −0.200 \[−.200, −.200\] |
"""  # noqa: E501, RUF001


def test_the_markdown_of_fixed_runs_is_this(results):
    text = to_markdown(results, ["a | warning"])
    assert text.startswith(MARKDOWN)
    assert text.endswith("## Read with care\n\n- a \\| warning\n")


def test_epsilon_stands_beside_all_it_is_computed_from(results):
    line = next(line for line in to_markdown(results, []).splitlines() if line.startswith("| fedavg: "))
    shown = re.fullmatch(
        r"\| fedavg: prototypes \| 1 \| 1 \| 2 \| 2 \| 1e-05 \| (\S+) \| central \| add or remove one user \|", line
    )
    mu = 2**0.5  # two Gaussian releases of multiplier 1 without sampling are one of multiplier 1 / sqrt 2

    def delta(epsilon: float) -> float:
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)

    assert delta(float(shown[1])) <= 1e-5 < delta(float(shown[1]) - 1e-4)
    assert "joint user-level differential privacy" in to_markdown(results, [])


def test_without_the_library_that_prices_it_epsilon_is_a_dash_beside_its_inputs(results, monkeypatch):
    def missing(*_, **__):
        raise MissingExtra("dp-accounting")

    monkeypatch.setattr(prices, "epsilon", missing)
    unpriced = [compute(found.section) for found in results]
    assert "| fedavg: prototypes | 1 | 1 | 2 | 2 | 1e-05 | – | central |" in to_markdown(unpriced, [])


def test_seeds_that_released_different_things_have_a_line_each(tmp_path):
    write_run(tmp_path / "0", flat(0.2), method="fedavg", seed=0, ledger=PRIVATE)
    write_run(tmp_path / "1", flat(0.2), method="fedavg", seed=1, ledger=[PRIVATE[0] | {"count": 1}])
    text = to_markdown([compute(section) for section in group(find_runs(tmp_path)[0])], [])
    found = re.findall(r"^\| (fedavg, seed \d: prototypes) \| 1 \| 1 \| (\d)", text, re.MULTILINE)
    assert found == [("fedavg, seed 0: prototypes", "2"), ("fedavg, seed 1: prototypes", "1")]


def test_the_claim_is_made_with_the_delta_of_the_runs(tmp_path):
    write_run(tmp_path / "p", flat(0.2), method="fedavg", ledger=PRIVATE, settings="[privacy]\ndelta = 1e-6")
    text = to_markdown([compute(section) for section in group(find_runs(tmp_path)[0])], [])
    assert "| 1e-06 |" in text
    assert "δ = 1e-5" not in text
    assert "δ = 1e-6. Events in the base block are not protected (some later users have some)." in text


def test_the_claim_has_the_shares_of_all_logs_or_of_none(tmp_path):
    shares: dict[str, float | None] = {"a": 0.561, "b": 0.989}

    def text(folder: str) -> str:
        for seed, (name, share) in enumerate(shares.items()):
            known = {} if share is None else {"later_users_with_base_events": share}
            settings = {"method": "fedavg", "seed": seed, "ledger": PRIVATE, "environment": known}
            write_run(tmp_path / folder / name, flat(0.2), **settings)
        return to_markdown([compute(section) for section in group(find_runs(tmp_path / folder)[0])], [])

    assert "(56.1 to 98.9 % of later users have some)" in text("both")
    shares["b"] = None
    assert "(some later users have some)" in text("one")


def md_cells(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line)) - 1


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_heading(results):
    lines = to_markdown(results, []).splitlines()
    tables = [list(rows) for is_table, rows in itertools.groupby(lines, lambda line: line[:1] == "|") if is_table]
    assert [{md_cells(line) for line in table} for table in tables] == [{13}, {5}, {6}, {9}]


@example("a|b")
@given(st.text("ab|*_`[]<>#\\", max_size=12))
def test_escaped_markdown_reads_back_as_it_was(text):
    escaped = _md(text)
    assert re.sub(r"\\([\\`*_\[\]<>#|])", r"\1", escaped) == text
    assert md_cells(f"| {escaped} |") == 1


LATEX = r"""\begin{table*}[t]
\centering\scriptsize\setlength{\tabcolsep}{3pt}
\caption{50 \% of a\_b}
\label{tab:small}
\begin{tabular}{lrrr}
\toprule
 & \multicolumn{2}{c}{NDCG@10} & \multicolumn{1}{c}{} \\
\cmidrule(lr){2-3}
method & all & novel & $\varepsilon$ \\
\midrule
a\&b & \textbf{0.410} $\pm$.014 & $-$0.110 [$-$.120, .100] & $\infty$ \\
{[x]} & -- & 0.100 & 3.4 \\
\bottomrule
\end{tabular}
\end{table*}"""


def test_the_latex_of_a_fixed_table_is_this():
    rows = (
        Line(
            "a&b",
            (
                Cell("0.410", "±.014", best=True),
                Cell("\N{MINUS SIGN}0.110", "", "[\N{MINUS SIGN}.120, .100]"),
                Cell("∞"),
            ),
        ),
        Line("[x]", (Cell("–"), Cell("0.100"), Cell("3.4"))),
    )
    columns = (Column("all", "NDCG@10"), Column("novel", "NDCG@10"), Column("ε"))
    assert "\n".join(_tex_table(Table("small", "50 % of a_b", columns, rows))) == LATEX


def braces_balance(text: str) -> bool:
    """Whether groups nest, escaped braces aside."""
    depth = 0
    for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def columns_of(row: str) -> int:
    """How many columns a row fills, spans counted."""
    spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", row)]
    return len(re.findall(r"(?<!\\)&", row)) + 1 + sum(span - 1 for span in spans)


def check_latex(text: str) -> int:
    """How many tables a strict reader finds; it accepts nothing that LaTeX would not set as meant."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert braces_balance(code)
    assert not re.search(r"(?<!\\)[%#~^]", code)
    assert len(re.findall(r"(?<!\\)\$", code)) % 2 == 0
    assert not re.search(r"(?<!\\)_", re.sub(r"\\label\{[^}]*\}", "", code))
    opened, environments = [], re.findall(r"\\(begin|end)\{([a-z]+\*?)\}", code)
    for kind, name in environments:
        opened.append(name) if kind == "begin" else None
        assert kind == "begin" or opened.pop() == name
    assert not opened
    tables = re.findall(r"\\begin\{tabular\}\{(lr*)\}\n(.*?)\\end\{tabular\}", code, re.DOTALL)
    for kinds, body in tables:
        lines = [
            line for line in body.splitlines() if not re.fullmatch(r"\\(top|mid|bottom)rule|(\\cmidrule\S+)+", line)
        ]
        assert all(line.endswith(r" \\") for line in lines)
        assert {columns_of(line) for line in lines} == {len(kinds)}
        assert not any(line.lstrip().startswith(("[", "*")) for line in lines)
        assert [body.count(f"\\{rule}rule") for rule in ("top", "bottom")] == [1, 1]
    return len(tables)


def test_a_strict_reader_accepts_the_latex_of_fixed_runs(results):
    text = to_latex(results, ["50 % & more\nof_it"])
    assert check_latex(text) == 4
    assert text.splitlines()[0] == r"% needs \usepackage{booktabs}"
    assert text.endswith("% 50 % & more of_it\n")
    assert r"a\_b\&c: mean of A[t, t]" in text
    row = r"ewc & \textbf{0.410} $\pm$.014 & 0.205 $\pm$.007 & \textbf{0.410} $\pm$.014 & 0.205 $\pm$.007 &"
    assert row in text
    assert all(ord(character) < 128 for character in text)


@example("50 %", "[a] \\ {b} & 50 % _ ~ ^ $ # <|>")
@example("", "\n* a")
@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_whatever_a_table_says_a_strict_reader_accepts_it(caption, label):
    rows = (Line(label, (Cell(caption), Cell("1", best=True))),) * 2
    assert check_latex("\n".join(_tex_table(Table("x", caption, (Column(label, caption), Column("b")), rows)))) == 1


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed; apt-get install texlive")
def test_pdflatex_sets_the_tables(results, tmp_path):
    document = (
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + to_latex(results, []) + "\\end{document}"
    )
    (tmp_path / "t.tex").write_text(document, encoding="utf-8")
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, capture_output=True, timeout=60)


def test_the_csv_holds_every_number_once_and_agrees_with_the_estimates(results):
    rows = list(csv.DictReader(io.StringIO(to_tidy_csv(results))))
    keys = ("dataset", "method", "table", "quantity", "candidates", "subset", "stream")
    found = {tuple(row[key] for key in keys): row for row in rows}
    assert len(found) == len(rows) == 3 * (8 + 4 + 4 + 1) + 4 + 8
    accuracy = found["a_b&c", "ewc", "accuracy", "hr@10", "sampled", "novel", ""]
    assert [float(accuracy[name]) for name in ("mean", "std", "low95", "high95")] == pytest.approx(
        [0.305, 0.01 / 2**0.5, 0.305, 0.305], rel=1e-5
    )
    assert accuracy["seeds"] == "0 1"
    difference = found["a_b&c", "fedavg", "difference", "ndcg@10", "full", "all", ""]
    assert (difference["minus"], float(difference["mean"])) == ("ewc", pytest.approx(-0.21))
    assert difference["std"] == ""
    assert float(found["a_b&c", "finetune-last", "continual", "BWT", "sampled", "all", ""]["mean"]) == pytest.approx(
        -0.2
    )
    assert found["a_b&c", "fedavg", "privacy", "rounds", "", "", "prototypes"]["text"] == "2"
    told = {row["quantity"]: (float(row["mean"]), row["text"]) for row in rows if row["table"] == "cost"}
    assert told == {"learn": (2.0, "cpu")} | {name: (value, "") for name, value in TOLD.items()}


def test_the_best_are_those_that_look_best_and_low_forgetting_is_good(results):
    estimates = {
        row: {**own, "AF": Estimate(own["AF"].mean + 0.1), "BWT": Estimate(own["BWT"].mean - 0.1)}
        for row, own in results[0].estimates.items()
    }
    table = accuracy(replace(results[0], estimates=estimates))
    best = {
        column.label: [line.label for line in table.lines if line.cells[place].best]
        for place, column in enumerate(table.columns)
        if column.label in ("AF", "BWT")
    }
    assert best == {"AF": ["ewc", "fedavg"], "BWT": ["ewc", "fedavg"]}


def test_runs_without_users_have_no_differences_and_public_runs_no_privacy_table(tmp_path):
    write_run(tmp_path / "a", flat(0.4), method="ewc", per_user=False)
    results = [compute(section) for section in group(find_runs(tmp_path)[0])]
    assert check_latex(to_latex(results, [])) == 2  # accuracy and costs


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\tx"]


def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers(tmp_path):
    rows = [[text, -0.5, "-0.5", "+3", "–", math.nan] for text in FORMULAS]
    header, *cells = csv.reader(io.StringIO(to_csv(["=head", "a", "b", "c", "d", "e"], rows), newline=""))
    assert header[0] == "'=head"
    assert [row[0] for row in cells] == [f"'{text}" for text in FORMULAS]
    assert all(row[1:] == ["-0.5", "-0.5", "+3", "–", ""] for row in cells)
    assert to_csv([], [["\r=1"], ["a\r=1"]]) == "\n' =1\na =1\n"
    write_run(tmp_path / "run", flat(0.4), dataset="=HYPERLINK(1)")
    found = to_tidy_csv([compute(section) for section in group(find_runs(tmp_path)[0])])
    assert {row["dataset"] for row in csv.DictReader(io.StringIO(found))} == {"'=HYPERLINK(1)"}
