"""Pages of results: the tables of packed runs hold the packs' numbers, computed here from ranks alone."""

import csv
import io
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from protofed.config import from_toml
from protofed.experiments.evaluate import CANDIDATES
from protofed.experiments.store import Held, read_file, read_held, read_streams
from protofed.methods.labels import run_label
from protofed.privacy.accountant import epsilon
from protofed.privacy.ledger import Release

pytestmark = pytest.mark.slow  # reads every committed run
ROOT = Path(__file__).parents[2]
PAGE, MORE_LOGS, PAPER_SIZE = "results", "more_logs", "paper_size"
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in (PAGE, MORE_LOGS, PAPER_SIZE)}
WHOLE = sorted((ROOT / "results" / "tables").glob("*/*.csv"))
MOST_LINES, MOST_ROWS = 300, 10
COLUMNS = (("sampled", "all"), ("sampled", "novel"), ("sampled", "repeat"), ("full", "all"), ("full", "novel"))
COSTS = ("bytes_up", "bytes_down", "trainable_parameters", "trainable_parameters_per_user", "learn")
DATASETS = ("gowalla_1k", "yelp", "amazon_beauty", "taobao")
MORE = ("gowalla", "amazon_sports", "lastfm_30music", "retailrocket", "movielens", "hm")  # logs of the second page
WIDE = tuple(f"{dataset}, d = 256" for dataset in DATASETS)  # the logs of the third page
ROWS = ("default", "nodp", "private", "paper", "paper-nodp")  # cells of the overall tables; other variants have others


def shown_on(page: str, title: str) -> list[str]:
    """The rows below a table's head on its page."""
    return TEXTS[page].partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[2:]


def table_of(page: str, title: str) -> list[str]:
    """All rows of a table: those of its file, as a page would have them, where the page shows only some."""
    name = re.sub(r"[^a-z0-9_]+", "-", title.partition(" | ")[0].lower()).strip("-")
    file = ROOT / "results" / "tables" / page / f"{name}.csv"
    return [f"| {' | '.join(row)} |" for row in read_csv(file)[1:]] if file.is_file() else shown_on(page, title)


def read_csv(file: Path) -> list[list[str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.reader(opened))


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_has_at_most_300_lines_and_no_table_of_more_than_ten_rows(page):
    assert len(TEXTS[page].splitlines()) <= MOST_LINES
    tables = re.findall(r"(?:^\|.*\n)+", TEXTS[page], flags=re.MULTILINE)
    assert len(tables) > 10
    assert max(len(table.splitlines()) - 2 for table in tables) <= MOST_ROWS


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_page_shows_the_best_row_of_a_longer_table_and_others_in_its_order(file):
    page, (head, *rows) = file.parent.name, read_csv(file)
    everything = [f"| {' | '.join(row)} |" for row in rows]
    shown = [line.replace("**", "") for line in shown_on(page, head[0])]
    assert len(shown) < len(rows)
    assert shown == [line for line in everything if line in shown]
    assert shown[:1] in ([], everything[:1])
    if shown:
        assert f"| {' | '.join(head)} |" in TEXTS[page]
        labels, all_labels = ([line.split(" | ")[0] for line in lines] for lines in (shown, everything))
        assert set(labels) >= {
            ours for ours in ("| protofed-sp (nodp)", "| protofed-sp (reference)") if ours in all_labels
        }


def place_of(dataset: str) -> tuple[str, str, str]:
    """The page that has the log's tables, its pack and its export."""
    if dataset in WIDE:
        return PAPER_SIZE, "paper_size", "paper_size.csv"
    return (MORE_LOGS, "more", "more.csv") if dataset in MORE else (PAGE, "overall", "overall.csv")


def name_of(dataset: str) -> str:
    """The log's name in its tables and its pack."""
    return dataset.partition(",")[0]


@cache
def headlines(dataset: str) -> dict[str, list[tuple[float, ...]]]:
    """By row of the overall table: what `values_of_runs` gives for each seed."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for (variant, label), seeds in values_of_runs(name_of(dataset), place_of(dataset)[1]).items():
        if variant in ROWS:
            found.setdefault(label, []).extend(seeds)
    return found


@cache
def stored(dataset: str, pack: str) -> tuple[list[Held], dict[str, pa.Table]]:
    """The runs of a data set in a part of the store, and the queries of their streams."""
    path = ROOT / "results" / f"{dataset}.runs.parquet"
    runs = read_held(path, f"{pack}/")
    return runs, read_streams(path, [run.queries for run in runs])


@cache
def values_of_runs(dataset: str, pack: str = "overall") -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """By variant and row: for each seed the mean over slices 1, 2 .. of NDCG@10 in every column, HR@10 of the first."""
    runs, streams = stored(dataset, pack)
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for run in runs:
        config, queries = from_toml(run.texts["config"]), streams[run.queries]
        columns = {name: queries[name].to_numpy() for name in queries.column_names if name not in ("user", "drift")}
        ranks = dict(zip(CANDIDATES, run.ranks, strict=True))
        values = [mean_over_slices(ndcg(ranks[kind]), columns, subset) for kind, subset in COLUMNS]
        hits = mean_over_slices(ranks["sampled"] <= 10, columns, "all")
        found.setdefault((run.folder.split("/")[-2], run_label(config)), []).append((*values, hits))
    return found


def ndcg(ranks: np.ndarray) -> np.ndarray:
    return np.where(ranks <= 10, 1 / np.log2(ranks + 1.0), 0.0)


def mean_over_slices(values: np.ndarray, columns: dict[str, np.ndarray], subset: str) -> float:
    chosen = columns[subset].astype(bool)
    if not chosen.any():
        return float("nan")
    last = columns["slice"].max()
    return float(np.mean([values[chosen & (columns["slice"] == t)].mean() for t in range(1, last + 1)]))


def shown(values: list[float]) -> str:
    if np.isnan(values).any():
        return "–"
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else f"{values[0]:.3f} (one seed)"


def lines(dataset: str) -> list[str]:
    """The table as the page must have it, best first."""
    rows = sorted(headlines(dataset).items(), key=lambda row: -np.mean([seed[0] for seed in row[1]]))
    return [
        f"| {name} | " + " | ".join(shown(list(c)) for c in zip(*seeds, strict=True)) + " |" for name, seeds in rows
    ]


def ablation_lines(dataset: str, pack: str) -> list[str]:
    """ProtoFed-SP with one part left out at a time, in the experiment file's order."""
    asked = tomllib.loads((ROOT / "experiments" / "ablations.toml").read_text(encoding="utf-8"))["variant"]
    found = {
        variant: seeds for (variant, label), seeds in values_of_runs(dataset, pack).items() if "protofed-sp" in label
    }
    names = ["default", *(entry["name"] for entry in asked)]
    return [
        f"| {name} | {len(found[name])} | " + " | ".join(shown(list(c)) for c in zip(*found[name], strict=True)) + " |"
        for name in names
    ]


@pytest.mark.parametrize(
    ("dataset", "pack"), [("gowalla_1k", "overall"), ("taobao", "overall"), ("movielens", "ablations")]
)
def test_the_table_of_ablations_is_that_of_the_packed_runs(dataset, pack):
    table = table_of(place_of(dataset)[0], f"{dataset}, left out | seeds")
    assert table == ablation_lines(dataset, pack)


def arrows(before: list[tuple[float, ...]], after: list[tuple[float, ...]]) -> list[str]:
    """Means over seeds of every column before and after."""
    both = (np.mean(seeds, axis=0) for seeds in (before, after))
    return [f"{was:.3f} → {now:.3f}" for was, now in zip(*both, strict=True)]


def changes(page: str, title: str) -> dict[str, list[str]]:
    rows = [row.strip("| ").split(" | ") for row in table_of(page, title)]
    return {row[0]: row[1:] for row in rows}


def test_the_table_of_shared_prompts_has_every_packed_peft_row_beside_the_standard_one():
    runs = values_of_runs("gowalla_1k")
    standard = {label.removesuffix(" (peft)") for variant, label in runs if variant == "peft"}
    rows = changes(PAGE, "all weights → a shared prompt")
    assert set(rows) == standard
    assert rows == {name: arrows(runs["default", name], runs["peft", f"{name} (peft)"]) for name in rows}


def test_the_table_of_module_sizes_has_every_packed_module_of_the_librarys_size():
    expected = {}
    for dataset in ("gowalla_1k", "yelp"):
        runs = values_of_runs(dataset)
        for variant, label in runs:
            if variant.startswith("library-size"):
                name = f"{dataset}, {label.removesuffix(' (peft)')}"
                expected[name] = arrows(runs["default", label], runs[variant, label])
    assert len(expected) == 8
    assert changes(PAGE, "usual size → the library's") == expected


@pytest.mark.parametrize(("dataset", "introducing"), [("gowalla_1k", ()), ("movielens", ("0.2", "0.4"))])
def test_the_table_of_noise_is_that_of_the_packed_runs_at_the_price_of_their_ledgers(dataset, introducing):
    page, pack, _ = place_of(dataset)
    rows = [row.strip("| ").split(" | ") for row in table_of(page, f"{dataset}, noise multiplier")]
    assert [row[0] for row in rows] == ["0.2", "0.4", "0.8", "1.1282", "1.6", "3.2"]
    runs = {
        variant: seeds for (variant, label), seeds in values_of_runs(dataset, pack).items() if "protofed-sp" in label
    }
    for noise, price, sampled, full, _ in rows:
        seeds = runs["default" if noise == "1.1282" else f"noise,privacy.noise_multiplier={noise}"]
        assert [sampled, full] == [shown([seed[place] for seed in seeds]) for place in (0, 3)]
        rounds = Release(float(noise), 0.05, 160)
        introductions = (Release(2 * float(noise), 1.0, 8),) if noise in introducing else ()
        assert float(price) == pytest.approx(epsilon((rounds, *introductions), delta=1e-5), rel=1e-3)


def test_the_table_of_settings_is_that_of_the_packed_runs():
    table = table_of(PAGE, "gowalla_1k, setting")
    runs = {
        variant.partition(",")[2]: seeds for (variant, _), seeds in values_of_runs("gowalla_1k", "sensitivity").items()
    }
    rows = {row.strip("| ").split(" | ")[0].replace(" = ", "="): row.strip("| ").split(" | ")[1:] for row in table}
    assert set(rows) == {changed or "as tuned" for changed in runs}
    for changed, seeds in runs.items():
        found = [f"{np.mean(c):.4f} ± {np.std(c, ddof=1):.4f}" for c in zip(*seeds, strict=True)]
        assert rows[changed or "as tuned"] == [str(len(seeds)), *found]
    assert next(iter(rows)) == "as tuned"


def told(cell: dict[str, str] | None, form: str = ",.0f") -> str:
    return f"{float(cell['mean']):{form}}" if cell and cell["mean"] else "–"


def within(cell: dict[str, str]) -> str:
    return f"[{float(cell['low95']):.3f}, {float(cell['high95']):.3f}]"


def cost_lines(dataset: str) -> list[str]:
    """Intervals, forgetting and costs of each row as results/overall.csv has them, in the other table's order."""
    found: dict[str, dict[tuple[str, ...], dict[str, str]]] = {}
    with (ROOT / "results" / place_of(dataset)[2]).open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["dataset"] == name_of(dataset) and line["table"] in ("accuracy", "continual", "cost"):
                key = (line["quantity"], line["candidates"], line["subset"])
                found.setdefault(line["method"], {})[key] = line
    order = [line.split(" | ")[0].removeprefix("| ") for line in lines(dataset)]
    made = []
    for name in order:
        row = found[name]
        cells = [within(row[metric, "sampled", "all"]) for metric in ("ndcg@10", "hr@10")]
        cells += [told(row.get((quantity, "sampled", "all")), ".3f") for quantity in ("AF", "BWT")]
        cells += [told(row.get((quantity, "", ""))) for quantity in COSTS]
        made.append(f"| {name} | " + " | ".join(cells) + " |")
    return made


@pytest.mark.parametrize("dataset", DATASETS + MORE + WIDE)
def test_the_table_of_costs_and_forgetting_is_that_of_the_exported_runs(dataset):
    assert table_of(place_of(dataset)[0], f"{name_of(dataset)}, forgetting and costs") == cost_lines(dataset)


@pytest.mark.parametrize("dataset", DATASETS + MORE + WIDE)
def test_the_table_of_every_method_is_that_of_the_packed_runs(dataset):
    table = table_of(place_of(dataset)[0], f"{name_of(dataset)}, every method")
    assert [line.replace("**", "") for line in table] == lines(dataset)


def test_the_page_of_more_logs_counts_the_packed_runs():
    rows = [row.strip("| ").split(" | ") for row in table_of(MORE_LOGS, "log | stands for")]
    counted = {dataset.partition(",")[0]: runs for dataset, _, runs, _ in rows}
    held = {dataset: sum(run.folder.split("/")[-2] in ROWS for run in stored(dataset, "more")[0]) for dataset in MORE}
    assert counted == {dataset: f"{runs} of 90" for dataset, runs in held.items()}


def test_the_table_at_a_glance_has_every_row_of_every_log_by_mean_place():
    table = [row.strip("| ").replace("*", "").split(" | ") for row in table_of(MORE_LOGS, "six logs")]
    logs = [{name: np.mean([seed[0] for seed in seeds]) for name, seeds in headlines(d).items()} for d in MORE]
    assert TEXTS[MORE_LOGS].partition("| six logs | ")[2].splitlines()[0] == f"{' | '.join(MORE)} | place |"
    places = {name: np.mean([sorted(log.values())[::-1].index(log[name]) + 1 for log in logs]) for name in logs[0]}
    assert {row[0] for row in table} == set(places)
    for name, *cells, place in table:
        assert cells == [f"{log[name]:.3f}" for log in logs]
        assert place == f"{places[name]:.1f}"
    assert [places[row[0]] for row in table] == sorted(places.values())
    assert [row[0] for row in table].index("protofed-sp (nodp)") + 1 == 10
    assert len(table) == 30
    assert all(
        "tenth of thirty rows" in page for page in (TEXTS[MORE_LOGS], (ROOT / "README.md").read_text(encoding="utf-8"))
    )


def exported_means() -> dict[tuple[str, str, str], tuple[str, str]]:
    """By log, row and kind of candidates: NDCG@10 over all events and its spread, as the exports have them."""
    found = {}
    for name in ("more", "overall", "flagship"):
        for line in csv.DictReader(io.StringIO((ROOT / "results" / f"{name}.csv").read_text(encoding="utf-8"))):
            if (line["table"], line["quantity"], line["subset"]) == ("accuracy", "ndcg@10", "all"):
                found[line["dataset"], line["method"], line["candidates"]] = line["mean"], line["std"]
    return found


def head_rows(title: str) -> list[list[str]]:
    """The cells of a table of docs/head.md."""
    page = (ROOT / "docs" / "head.md").read_text(encoding="utf-8").partition(f"| {title} |")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in page.splitlines()[2:]]


def first_number(cell: str) -> float:
    """The first number of a cell, whose minus is typographical."""
    return float(cell.split(" ")[0].replace("\N{MINUS SIGN}", "-"))


@pytest.mark.parametrize(("title", "kind"), [("sampled, ε = 0", "sampled"), ("full ranking, ε = 0", "full")])
def test_the_dials_tables_hold_committed_means_and_their_differences(title, kind):
    means = exported_means()
    for name, value, *gaps in head_rows(title):
        log, _, content = name.partition(", with ")
        mean, _ = means[log, f"protofed (share nothing{content and f', content: {content}'})", kind]
        assert first_number(value) == round(float(mean), 3)
        rivals = ["protofed-sp (reference)", *(gap.rpartition(": ")[0] for gap in gaps[1:])]
        for rival, gap in zip(rivals, gaps, strict=True):
            expected = float(mean) - float(means[log, rival, kind][0])
            assert first_number(gap.rpartition(": ")[2]) == pytest.approx(expected, abs=6e-4)  # of rounded digits
        private = {row: m for (where, row, of), (m, _) in means.items() if (where, of) == (log, kind)}
        rest = {row: float(m) for row, m in private.items() if not row.startswith("protofed (") and "head" not in row}
        told = {row: m for row, m in rest.items() if row.endswith("private)") or row == "frozen-no-new-rows"}
        assert told[rivals[1]] == max(told.values())
        plain = {row: m for row, m in rest.items() if row not in told and "=" not in row and "without" not in row}
        assert rest[rivals[2]] == max(m for row, m in plain.items() if row != "protofed-sp (reference)")
    assert len(head_rows(title)) == 10 + 4


def standing(gap: str) -> str:
    """Whether a difference with its interval is ahead, behind or level."""
    low, high = (float(end.replace("\N{MINUS SIGN}", "-")) for end in gap.partition("[")[2].rstrip("]").split(", "))
    return "ahead" if low > 0 else "behind" if high < 0 else "level"


def test_the_readme_counts_the_logs_of_the_dials_tables():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    open_ = {
        kind: {name: standing(gaps[-1]) for name, _, *gaps in head_rows(title)}
        for kind, title in (("sampled", "sampled, ε = 0"), ("full", "full ranking, ε = 0"))
    }
    plain = [place for name, place in open_["full"].items() if "with" not in name]
    assert [plain.count(each) for each in ("ahead", "level", "behind")] == [6, 2, 2]
    assert "ahead of every method without privacy on six, level on two, behind on two" in text
    logs = {name.partition(",")[0] for name, place in open_["sampled"].items() if place != "behind"}
    assert len(logs) == 4
    assert "among 99 sampled items ahead or level on four" in text
    for title in ("sampled, ε = 0", "full ranking, ε = 0"):
        rows = [gaps for name, _, *gaps in head_rows(title) if "with" not in name and name != "amazon_beauty"]
        assert {standing(gap) for gaps in rows for gap in gaps[:2]} == {"ahead"}
        assert len(rows) == 9


def test_the_goals_reached_are_ratios_of_committed_means():
    means = {key: float(mean) for key, (mean, _) in exported_means().items()}
    told = {kind: {} for kind in ("sampled", "full")}
    for (log, row, kind), mean in means.items():
        if row == "protofed (share private)":
            rest = {name: m for (where, name, of), m in means.items() if (where, of) == (log, kind)}
            rivals = {name: m for name, m in rest.items() if not name.startswith("protofed (")}
            private = [m for name, m in rivals.items() if name.endswith("private)") or name == "frozen-no-new-rows"]
            told[kind][log] = mean / max(private), mean / rest["protofed-sp (reference)"]
    page = (ROOT / "docs" / "head.md").read_text(encoding="utf-8")
    four = ("gowalla_1k", "yelp", "amazon_beauty", "taobao")
    for kind, best, paper, least in (("sampled", "+25 %", "+23 %", "+2 %"), ("full", "+37 %", "+91 %", "+12 %")):
        assert f"{100 * (np.mean([told[kind][log][0] for log in four]) - 1):+.0f} %" == best
        against = [ratio for _, ratio in told[kind].values()]
        assert (f"{100 * (np.mean(against) - 1):+.0f} %", f"{100 * (min(against) - 1):+.0f} %") == (paper, least)
        assert len(against) == 8
        assert all(number in page for number in (best, paper, least))


def test_the_tables_of_private_releases_and_of_rivals_under_the_head_hold_committed_means():
    means = exported_means()
    for log, released, sampled, _, full, *_ in head_rows("ε = 3.4"):
        for kind, cell in (("sampled", sampled), ("full", full)):
            assert first_number(cell) == round(float(means[log, "protofed (share private)", kind][0]), 3)
        assert released
    for name, sampled, more, full, _ in head_rows("under the head"):
        log, rival = name.split(", ")
        for kind, cell in (("sampled", sampled), ("full", full)):
            assert first_number(cell) == round(float(means[log, f"{rival} (head)", kind][0]), 3)
        assert first_number(more) > 0 or (log, rival) == ("amazon_beauty", "frozen-no-new-rows")


def test_the_first_table_of_the_readme_holds_committed_means():
    lines = [
        line
        for name in ("overall", "flagship")
        for line in csv.DictReader(io.StringIO((ROOT / "results" / f"{name}.csv").read_text(encoding="utf-8")))
    ]
    means = {
        (line["method"], line["candidates"], line["subset"]): float(line["mean"])
        for line in lines
        if (line["dataset"], line["table"], line["quantity"]) == ("gowalla_1k", "accuracy", "ndcg@10")
    }
    lines = (ROOT / "README.md").read_text(encoding="utf-8").partition("| gowalla_1k |")[2].splitlines()[2:7]
    columns = (("sampled", "all"), ("full", "all"), ("full", "novel"))
    for name, _, *cells in (line.strip("| ").split(" | ") for line in lines):
        assert cells == [f"{means[name, *column]:.3f}".lstrip("0") for column in columns]


def test_the_table_of_widths_pairs_the_rows_of_both_and_their_mean_places_among_themselves():
    table = [row.strip("| ").split(" | ") for row in table_of(PAPER_SIZE, "d = 64 → 256")]
    both = [
        [{name: np.mean([seed[0] for seed in seeds]) for name, seeds in headlines(key).items()} for key in keys]
        for keys in (map(name_of, WIDE), WIDE)
    ]
    names = {row[0] for row in table}
    assert all(names == set(log) for log in both[1])
    among = [[{name: log[name] for name in names} for log in logs] for logs in both]
    places = [
        {name: np.mean([sorted(log.values())[::-1].index(log[name]) + 1 for log in logs]) for name in names}
        for logs in among
    ]
    for name, *cells, place in table:
        assert cells == [f"{old[name]:.3f} → {new[name]:.3f}" for old, new in zip(*among, strict=True)]
        assert place == f"{places[0][name]:.1f} → {places[1][name]:.1f}"
    assert [places[1][row[0]] for row in table] == sorted(places[1].values())


def test_the_table_of_warm_ups_is_that_of_the_packed_logs():
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in table_of(PAPER_SIZE, "warm-up, d = 64 → 256")}
    assert tuple(rows) == DATASETS
    for dataset, row in rows.items():
        told = []
        for pack, variant in (("overall", "default"), ("paper_size", "paper")):
            name = f"{pack}/{dataset}/frozen-no-new-rows/{variant}/"
            logs = [run.texts["log"] for run in stored(dataset, pack)[0] if run.folder.startswith(name)]
            traces = [json.loads(log.splitlines()[0])["validation_ndcg10"] for log in logs]
            assert len(traces) == 3
            told.append((np.mean([max(t) for t in traces]), np.mean([np.argmax(t) + 1 for t in traces])))
        (before, when), (after, then) = told
        assert row == f"| {dataset} | {before:.3f} → {after:.3f} | {when:.0f} → {then:.0f} |"


def test_the_table_of_row_rates_is_that_of_the_committed_trials():
    rows = [row.strip("| ").split(" | ") for row in table_of(PAPER_SIZE, "`protofed.row_rate`")]
    assert [row[0] for row in rows] == ["d = 64", "d = 256"]
    for (_, *cells), file in zip(rows, ("small", "paper"), strict=True):
        with (ROOT / "results/tune/width/gowalla_1k" / f"{file}.csv").open(encoding="utf-8", newline="") as opened:
            tried = {line["settings"] or "as found": float(line["ndcg@10"]) for line in csv.DictReader(opened)}
        lower, higher = ("protofed.row_rate=0.001", "protofed.row_rate=0.002"), ("protofed.row_rate=0.01",)
        values = [tried.get(settings) for settings in (*lower, "as found", *higher)]
        best = max(value for value in values if value)
        expected = [f"{value:.3f}" if value else "–" for value in values]
        assert [cell.replace("**", "") for cell in cells] == expected
        assert ["**" in cell for cell in cells] == [value == best for value in values]


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/*.runs.parquet")), ids=lambda path: str(path.name))
def test_commands_of_packed_runs_name_no_place_of_the_machine_that_ran_them(path):
    commands = [json.loads(text)["command"] for text in read_file(path)["environment"].to_pylist()]
    assert commands
    assert not [command for command in commands if re.search(r"[ =\"']/", command)]


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


def users_ndcg(dataset: str, label: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sampled NDCG@10 of every query of slices 1..8, seeds averaged; its user and its slice."""
    runs, streams = stored(dataset, "overall")
    found = []
    for run in runs:
        if run.folder.split("/")[-2] in ROWS and run_label(from_toml(run.texts["config"])) == label:
            queries = streams[run.queries]
            found.append(ndcg(run.ranks[CANDIDATES.index("sampled")]))
    asked = queries["slice"].to_numpy() > 0
    return np.mean(found, axis=0)[asked], queries["user"].to_numpy()[asked], queries["slice"].to_numpy()[asked]


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_table_at_equal_epsilon_has_every_private_row_and_the_gaps_of_the_packed_runs(dataset):
    rivals = {name for name in headlines(dataset) if name.endswith("private)")}
    assert_gaps(dataset, "protofed-sp (reference)", rivals)


@pytest.mark.parametrize("dataset", MORE + WIDE)
def test_the_table_without_noise_has_every_row_without_a_claim_and_the_gaps_of_the_packed_runs(dataset):
    rivals = set(headlines(dataset)) - {"protofed-sp (reference)", "protofed-sp (nodp)"}
    assert_gaps(dataset, "protofed-sp (nodp)", rivals)


def assert_gaps(dataset: str, row: str, rivals: set[str]) -> None:
    table = table_of(place_of(dataset)[0], f"{name_of(dataset)}, {row} minus")
    rows = {row.split(" | ")[0].removeprefix("| "): row.strip("| ").split(" | ")[1:] for row in table}
    values = {name: [np.mean(c) for c in zip(*seeds, strict=True)] for name, seeds in headlines(dataset).items()}
    assert set(rows) == rivals
    ours = values[row]
    for name, cells in rows.items():
        gaps = [ours[place] - values[name][place] for place in (0, 1, 3, 4)]
        assert [number(cell.split()[0]) for cell in cells] == pytest.approx(gaps, abs=5.01e-4)
    order = [ours[0] - values[name][0] for name in rows]
    assert order == sorted(order)


def test_an_interval_of_that_table_is_that_of_a_slow_bootstrap_over_users():
    dataset, other = "gowalla_1k", "fedrap (private)"
    row = TEXTS[PAGE].partition(f"| {dataset}, protofed-sp (reference) minus |")[2].partition(f"| {other} | ")[2]
    low, high = (number(end) for end in row.partition("[")[2].partition("]")[0].split(", "))
    (ours, users, slices), (theirs, _, _) = (users_ndcg(dataset, name) for name in ("protofed-sp (reference)", other))
    rng, names = np.random.default_rng(0), np.unique(users)
    of = {name: np.flatnonzero(users == name) for name in names}
    gaps = []
    for _ in range(500):
        drawn = np.concatenate([of[name] for name in rng.choice(names, len(names))])
        gaps.append(np.mean([(ours - theirs)[drawn[slices[drawn] == t]].mean() for t in range(1, 9)]))
    # 500 draws find the ends of an interval of width .014 to about .0007
    assert np.percentile(gaps, [2.5, 97.5]) == pytest.approx([low, high], abs=2.5e-3)
