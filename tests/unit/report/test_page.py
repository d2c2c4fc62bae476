"""The page is one file, the same for the same runs, and safe whatever the runs are called."""

import errno
import json
import re
from pathlib import Path

import numpy as np
import pytest
from run_folders import config_text, embedded, write_run

from protofed import files
from protofed.errors import MissingExtra, ProtoFedError
from protofed.report import page

MATRIX = np.array([[0.50, 0.46, 0.40], [0.30, 0.60, 0.55], [0.20, 0.35, 0.70]])


def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return float(MATRIX[tested, trained] * (0.1 if candidates == "full" else 1) * (1.4 if metric == "hr@10" else 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(root / f"frozen-{seed}", value, seed=seed)
        write_run(
            root / f"sp-{seed}",
            value,
            method="protofed-sp",
            seed=seed,
            ledger=[{"noise_multiplier": 1.128, "sampling_rate": 0.05}] * 3,
        )
    (root / "waiting").mkdir()
    (root / "waiting" / "config.toml").write_text(config_text("toy", "ewc", 0))
    return root


@pytest.fixture(scope="module")
def built(runs: Path) -> str:
    return page.build(runs)[0]


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(runs: Path, built: str) -> None:
    assert page.build(runs)[0] == built


def test_the_page_names_nothing_outside_itself(built: str) -> None:
    markup = re.sub(r"<script.*?</script>", "", built, flags=re.DOTALL)  # what scripts ask for: the browser's tests
    links = re.findall(r'(?:src|href)="([^"]*)"', markup)
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "<script src" not in built
    assert "@import" not in markup
    assert "url(" not in markup


def test_ids_are_unique_and_every_reference_has_its_target(built: str) -> None:
    markup = re.sub(r"<script>.*?</script>", "", built, flags=re.DOTALL)
    ids = re.findall(r'\bid="([^"]*)"', markup)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', markup)) <= set(ids)
    told = embedded(built)
    assert set(re.findall(r'data-table="([^"]*)"', markup)) == set(told["tables"])
    assert set(re.findall(r'data-figure="([^"]*)"', markup)) == set(told["figures"])


def test_every_figure_and_row_has_what_it_is_drawn_from(built: str) -> None:
    told = embedded(built)
    kinds = [figure["kind"] for figure in told["figures"].values()]
    # over the slices: accuracy, forgetting, fairness; leading rows and gains by group; forgetting against accuracy
    assert sorted(kinds) == ["dots", "dots", "lines", "lines", "lines", "map", "points"]
    assert set(told["looks"]) == {"frozen", "protofed-sp (reference)"}
    assert set(told["first"]["toy"]) == {"frozen", "protofed-sp (reference)"}


def test_several_data_sets_share_the_first_page(tmp_path: Path) -> None:
    for dataset in ("one", "two"):
        write_run(tmp_path / dataset / "frozen", value, dataset=dataset)
        write_run(tmp_path / dataset / "ewc", value, dataset=dataset, method="ewc")
    text, _ = page.build(tmp_path)
    first = text[: text.index('id="every-row"')]
    assert re.findall(r'data-table="([^"]*)"', first) == ["one-digest", "two-digest"]
    assert first.count("<li>Wins: ewc with NDCG@10 0.650") == 2
    columns = embedded(text)["tables"]["overview"]["columns"]
    assert [(group, label) for label, group, *_ in columns] == [
        (dataset, measure) for dataset in ("one", "two") for measure in ("NDCG@10", "HR@10")
    ]


def test_the_first_line_counts_methods_and_says_where_they_have_more_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "frozen", value)
    assert "1 method on 1\ndata set" in page.build(tmp_path)[0]
    write_run(tmp_path / "memory", value, settings="[scoring]\npersonal_memory = 2.0")
    assert "1 method in 2 rows on 1\ndata set" in page.build(tmp_path)[0]


def test_what_the_runs_lack_is_one_collapsed_list_at_the_end_of_their_chapter(built: str) -> None:
    _, _, end = built.partition('<details class="part missing">')
    listed = re.findall("<li>(.*?)</li>", end[: end.index("</details>")])
    assert "Ablations: no two protofed-sp rows differ in protofed.ablate (or another single factor) alone." in listed
    assert "Ablations</h3>" not in built


def test_the_page_holds_the_data_of_its_figures(built: str) -> None:
    figure = embedded(built)["figures"]["toy-heat"]
    assert figure["header"] == ["method", "slice_tested", "after 0", "after 1", "after 2"]
    assert figure["columns"][0] == {"words": ["frozen", "protofed-sp (reference)"], "at": [0, 0, 0, 1, 1, 1]}
    assert [column[1] for column in figure["columns"][1:]] == [1, 0.3, 0.6, 0.55]


def test_a_hostile_name_is_text_and_nothing_else(tmp_path: Path) -> None:
    name = "<script>alert('x')</script>&\"\\1"
    write_run(tmp_path / "run", value, method=name, environment={"device": "<b>bold</b>", "command": "a <i>b</i>"})
    text, _ = page.build(tmp_path)
    assert "<script>alert" not in text
    assert "<b>bold" not in text
    assert "<i>b</i>" not in text
    assert any(name in line[0] for line in embedded(text)["tables"]["overview"]["lines"])


def test_releases_bring_the_claim_and_what_was_released(built: str, tmp_path: Path) -> None:
    assert "joint user-level differential privacy" in built
    (line,) = embedded(built)["tables"]["prices"]["lines"]
    assert line[-1].startswith("prototypes: noise 1.128, rate 0.05, ")
    write_run(tmp_path / "run", value)
    without, _ = page.build(tmp_path)
    assert "joint user-level differential privacy" not in without
    assert "No ledgered releases in these runs; non-private methods carry no privacy claim." in without


def test_unfinished_runs_are_listed_and_not_counted(built: str) -> None:
    assert re.search(r"4 finished runs,\s*1 unfinished", built)
    assert "<code>waiting</code> (toy, ewc, seed 0)" in built


@pytest.mark.slow
def test_the_first_lines_name_the_widths_of_the_backbones(built: str, tmp_path: Path) -> None:
    assert "data set, SASRec of width 64, seeds 0, 1:" in built
    for name, width in (("a", 256), ("b", 64), ("c", 64)):
        write_run(tmp_path / name, value, method=name, settings=f"[backbone]\nwidth = {width}\n")
    assert "on 1\ndata set, SASRec of width 64 or 256, seed 0:" in page.build(tmp_path)[0]


def test_settings_are_what_most_rows_have_and_what_a_row_has_otherwise(tmp_path: Path) -> None:
    for name, settings in (("a", ""), ("b", ""), ("c", "[training]\nnegatives = 5\n")):
        write_run(tmp_path / name, value, method={"a": "frozen"}.get(name, "ewc"), settings=settings)
    text, _ = page.build(tmp_path)
    rows = {line[0]: line[3] for line in embedded(text)["tables"]["settings"]["lines"]}
    assert sorted(rows) == ["toy: ewc", "toy: ewc, training.negatives=5", "toy: frozen"]
    assert "method = frozen" in rows["toy: frozen"]
    assert rows["toy: ewc, training.negatives=5"] == "training.negatives = 5"
    assert "method = ewc" in text[text.index("What most rows have") :]


def test_the_summary_holds_the_numbers_of_the_table(runs: Path) -> None:
    _, numbers = page.build(runs)
    (section,) = numbers["sections"]
    frozen, sp = section["rows"]
    assert (frozen["label"], frozen["trivial"], frozen["seeds"]) == ("frozen", True, [0, 1])
    assert (sp["label"], sp["trivial"]) == ("protofed-sp (reference)", False)
    assert frozen["ndcg@10/sampled/all"]["mean"] == pytest.approx(0.65)
    assert frozen["AF"] == {"mean": 0.075, "std": 0.0, "ci95": [None, None]}
    assert numbers["unfinished"] == ["waiting"]
    json.dumps(numbers, allow_nan=False)


def test_writing_replaces_the_page_and_leaves_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    page.write("new", out)
    assert out.read_text() == "new"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failed_write_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "replace", full_disk)
    with pytest.raises(ProtoFedError, match=r"report.html: No space left on device; make room"):
        page.write("new", out)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("name", "said"), [("runs", "must end in .html"), ("no/r.html", "no folder"), (".html", "")])
def test_a_place_where_no_page_belongs_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "x.html").mkdir()
    out = tmp_path / (name if said else "x.html")
    with pytest.raises(ProtoFedError, match=said or "is a folder"):
        page.write("new", out)


def test_a_missing_library_is_one_line_with_its_extra(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"jinja2 is not installed; run `pip install jinja2`, or"):
        page.build(runs)
