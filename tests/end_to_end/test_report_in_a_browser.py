"""The report in a real Chromium: it loads quietly, sorts, fits a phone and follows the reader's colours."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from protofed.report.page import build, write


def load(path: Path) -> ModuleType:
    """A helper module by its path; test folders are no packages."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
browser = load(HERE / "chromium.py")
run_folders = load(HERE.parent / "unit" / "report" / "run_folders.py")
every_section = load(HERE.parent / "unit" / "report" / "every_section.py")
BINARY = browser.find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="no Chromium is installed; `apt-get install chromium` brings one"),
]

N_SLICES = 8
LEVELS = {"popularity": 0.24, "frozen": 0.55, "personal-memory": 0.71, "finetune-last": 0.63, "full-retrain": 0.70}
HEADLINE = "document.querySelector('#toy-headline')"
LABELS = f"Array.from({HEADLINE}.tBodies[0].rows, row => row.cells[0].firstChild.textContent)"
DRAW_ALL = "protofed.showAll()"  # what printing does: a page draws what comes near a reader's eyes
FIRST_PAINT = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def run_of(level: float, seed: int):  # type: ignore[no-untyped-def]
    def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
        missed = 0.03 * max(tested - trained, 0) + 0.004 * max(trained - tested, 0)
        kept = (level - 0.5 * missed + 0.003 * seed) * (0.2 if candidates == "full" else 1.0)
        return kept * (0.7 if subset == "novel" else 1.0) * (1.3 if metric == "hr@10" else 1.0)

    return value


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    users = {f"user {n}": tuple(1 + (n + s) % 3 for s in range(N_SLICES + 1)) for n in range(12)}
    for method, level in LEVELS.items():
        for seed in (0, 1):
            folder = root / "runs" / f"{method}-{seed}"
            run_folders.write_run(folder, run_of(level, seed), method=method, seed=seed, users=users)
    text, _ = build(root / "runs")
    write(text, root / "report.html")
    return root / "report.html"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report in which every section appears."""
    root = tmp_path_factory.mktemp("full")
    text, _ = build(every_section.write_every_section(root / "runs"))
    write(text, root / "report.html")
    return root / "report.html"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of twelve rows: more than a table or a figure shows at once."""
    root = tmp_path_factory.mktemp("long")
    methods = (
        "ewc",
        "si",
        "mas",
        "lwf",
        "ditto",
        "fedavg",
        "fedprox",
        "fedrap",
        "infer",
        "ccd",
        "frozen",
        "popularity",
    )
    for place, method in enumerate(methods):
        run_folders.write_run(root / "runs" / method, run_of(0.7 - place / 30, 0), method=method)
    text, _ = build(root / "runs")
    write(text, root / "report.html")
    return root / "report.html"


def wait_for(tab, condition: str) -> None:  # type: ignore[no-untyped-def]
    """Until an expression is true."""
    deadline = time.monotonic() + 10
    while not tab.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with browser.chromium(BINARY, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(tab, report: Path):  # type: ignore[no-untyped-def]
    tab.resize(1280)
    tab.open(report.as_uri())
    tab.evaluate(DRAW_ALL)
    return tab


def test_the_page_loads_without_a_complaint_and_without_the_network(opened, report: Path) -> None:  # type: ignore[no-untyped-def]
    assert opened.complaints() == []
    assert [url for url in opened.requests() if not url.startswith("data:")] == [report.as_uri()]
    assert opened.evaluate("document.title") == "ProtoFed report"


def test_the_table_starts_with_the_best_row_and_a_click_turns_it_round(opened) -> None:  # type: ignore[no-untyped-def]
    best_first = sorted(LEVELS, key=lambda method: -LEVELS[method])
    assert opened.evaluate(LABELS) == best_first
    heading = f"{HEADLINE}.querySelector('th[data-column=\"1\"]')"
    assert opened.evaluate(f"{heading}.getAttribute('aria-sort')") == "descending"
    opened.evaluate(f"{heading}.querySelector('button').click()")
    assert opened.evaluate(LABELS) == best_first[::-1]
    assert opened.evaluate(f"{heading}.getAttribute('aria-sort')") == "ascending"


def test_a_heading_sorts_from_the_keyboard_and_only_one_says_so(opened) -> None:  # type: ignore[no-untyped-def]
    opened.evaluate(f"{HEADLINE}.querySelector('th[data-column=\"0\"] button').focus()")
    opened.press("Enter", 13, "\r")
    assert opened.evaluate(LABELS) == sorted(LEVELS)
    opened.press("Enter", 13, "\r")
    assert opened.evaluate(LABELS) == sorted(LEVELS, reverse=True)
    sorted_by = f"Array.from({HEADLINE}.querySelectorAll('[aria-sort]'), th => [th.dataset.column, th.ariaSort])"
    assert opened.evaluate(sorted_by) == [["0", "descending"]]


def test_unknown_numbers_stay_last_whichever_way_a_column_is_sorted(tab, full: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(full.as_uri())
    tab.evaluate(DRAW_ALL)
    column = f"Array.from({HEADLINE}.querySelectorAll('th[data-column]')).find(th => th.textContent === 'up')"
    values = f"Array.from({HEADLINE}.tBodies[0].rows, row => row.cells[{column}.dataset.column].textContent)"
    for _ in range(2):
        tab.evaluate(f"{column}.querySelector('button').click()")
        found = tab.evaluate(values)
        assert "–" not in found[: found.index("–")]
        assert set(found[found.index("–") :]) == {"–"}


def test_a_long_table_shows_ten_rows_until_a_reader_asks_for_all(tab, long: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(long.as_uri())
    tab.evaluate("document.querySelector('#overview-place').scrollIntoView()")
    n_rows = "document.querySelector('#overview').tBodies[0].rows.length"
    wait_for(tab, "document.querySelector('#overview')")
    assert tab.evaluate(n_rows) == 10
    tab.evaluate("document.querySelector('#overview-place .below button').click()")
    assert tab.evaluate(n_rows) == 12
    tab.evaluate("document.querySelector('#overview-place .below button').click()")
    assert tab.evaluate(n_rows) == 10


def test_a_figure_draws_eight_rows_until_a_reader_chooses_others(tab, long: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(long.as_uri())
    tab.evaluate(DRAW_ALL)
    key = "Array.from(document.querySelectorAll('#toy-accuracy .legend li'), li => li.textContent)"
    colour = "document.querySelector('#toy-accuracy .legend li path').getAttribute('stroke')"
    first = tab.evaluate(key)
    assert len(first) == 8
    tab.evaluate("document.querySelector('#toy-accuracy .below button').click()")
    boxes = "Array.from(document.querySelectorAll('dialog input'))"
    assert tab.evaluate(f"{boxes}.filter(box => box.disabled).length") == 4  # nobody gets a ninth
    tab.evaluate(f"{boxes}.filter(box => box.checked).slice(1).forEach(box => box.click())")
    kept = tab.evaluate(colour)
    tab.evaluate("document.querySelector('dialog button').click()")
    wait_for(tab, "!document.querySelector('dialog')")
    assert tab.evaluate(key) == []  # a single line needs no key
    points = "new Set(Array.from(document.querySelectorAll('#toy-accuracy circle'), dot => dot.getAttribute('fill')))"
    assert tab.evaluate(f"[...{points}]") == [kept]
    assert "1 of 12 rows" in tab.evaluate("document.querySelector('#toy-forgetting .below').textContent")


def test_a_method_has_one_colour_in_every_figure(tab, long: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(long.as_uri())
    tab.evaluate(DRAW_ALL)
    keys = """Array.from(document.querySelectorAll('.legend li'),
        li => [li.textContent, li.querySelector('path').getAttribute('stroke')])"""
    pairs = {tuple(pair) for pair in tab.evaluate(keys)}
    assert len(pairs) == len({label for label, _ in pairs}) == 8


def test_a_table_and_a_figure_hand_out_their_numbers(tab, full: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(full.as_uri())
    tab.evaluate(DRAW_ALL)
    csv = tab.evaluate("document.querySelector('#toy-efficiency-table').closest('.table').querySelector('a.csv').csv()")
    rows = {row["method"]: row for row in run_folders.table(csv)}
    assert (rows["fedavg"]["bytes, per client and round up"], rows["fedavg"]["trainable shared"]) == ("4000", "640")
    csv = tab.evaluate("document.querySelector('#toy-frontier a.csv').csv()")
    assert {row["method"] for row in run_folders.table(csv)} >= {"fedavg", "protofed-sp (nodp)"}


def test_the_page_opens_fast_and_small(tab, long: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(long.as_uri())
    assert tab.evaluate(FIRST_PAINT) < 1500
    assert tab.evaluate("document.querySelectorAll('*').length") < 2000


@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_the_page_never_scrolls_sideways(opened, width: int) -> None:  # type: ignore[no-untyped-def]
    opened.resize(width)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.evaluate("innerWidth") == width


def test_a_wide_table_scrolls_in_its_own_box_on_a_phone(opened) -> None:  # type: ignore[no-untyped-def]
    opened.resize(400)
    box = f"{HEADLINE}.closest('.scroll')"
    assert opened.evaluate(f"{box}.scrollWidth > {box}.clientWidth")
    assert opened.evaluate(f"{box}.scrollLeft = 200, {box}.scrollLeft") == 200
    assert opened.evaluate(f"{HEADLINE}.tBodies[0].rows[0].cells[0].getBoundingClientRect().left >= 0")


def test_dark_readers_get_light_ink_in_text_and_in_figures(opened) -> None:  # type: ignore[no-untyped-def]
    for scheme, paper_is_light in (("light", True), ("dark", False)):
        opened.prefer(scheme)
        shade = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        drawn = opened.evaluate("getComputedStyle(document.querySelector('svg.plot text')).fill")
        paper, text = (sum(int(part) for part in rgb[4:-1].split(", ")) / 3 for rgb in (shade, drawn))
        assert (paper > 200, text < 100) == (paper_is_light, paper_is_light)


PARTS = (
    "In a minute",
    "At equal ε",
    "At equal bytes",
    "Ablations",
    "Sensitivity",
    "Steps to 95 %",
    "Forgetting against accuracy",
    "Privacy against utility",
    "Who benefits",
    "Fairness over time",
    "Exposure of popular and rare items",
    "Efficiency",
    "On-device memory",
    "Coverage",
)


def test_the_full_page_has_every_section_and_no_complaint(tab, full: Path) -> None:  # type: ignore[no-untyped-def]
    tab.resize(1280)
    tab.open(full.as_uri())
    tab.evaluate(DRAW_ALL)
    assert tab.complaints() == []
    titles = tab.evaluate("Array.from(document.querySelectorAll('h2, h3'), h => h.textContent)")
    assert [part for part in PARTS if not any(title.startswith(part) for title in titles)] == []
    ids = tab.evaluate("Array.from(document.querySelectorAll('[id]'), element => element.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_full_page_never_scrolls_sideways(tab, full: Path, width: int, scheme: str) -> None:  # type: ignore[no-untyped-def]
    tab.resize(width)
    tab.prefer(scheme)
    tab.open(full.as_uri())
    tab.evaluate(DRAW_ALL)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_every_table_of_the_full_page_sorts_by_every_heading(tab, full: Path) -> None:  # type: ignore[no-untyped-def]
    tab.resize(1280)
    tab.open(full.as_uri())
    tab.evaluate(DRAW_ALL)
    wrong = """
    (() => {
      const wrong = [];
      for (const {id} of document.querySelectorAll('table.sortable')) {
        const table = () => document.getElementById(id);
        const heading = column => table().querySelector(`th[data-column="${column}"]`);
        for (let column = 0; heading(column); column++) {
          heading(column).querySelector('button').click();
          const sign = heading(column).ariaSort === 'ascending' ? 1 : -1;
          const values = Array.from(table().tBodies[0].rows, row => row.cells[column].dataset.value)
            .filter(value => value !== undefined).map(Number);
          if (values.some(isNaN) || values.some((v, i) => i && sign * (v - values[i - 1]) < 0))
            wrong.push([id, column]);
        }
      }
      return wrong;
    })()
    """
    assert tab.evaluate(wrong) == []
    assert tab.complaints() == []


def test_every_figure_of_the_full_page_is_drawn_and_has_its_data_beside_it(tab, full: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(full.as_uri())
    tab.evaluate(DRAW_ALL)
    figures = "Array.from(document.querySelectorAll('figure')"
    lines = tab.evaluate(f"{figures}, f => f.querySelector('a.csv').csv().trim().split('\\n').length)")
    marks = tab.evaluate(f"{figures}, f => f.querySelectorAll('svg.plot circle, svg.plot rect').length)")
    assert len(lines) == len(marks) > 15
    assert min(lines) > 1
    assert min(marks) > 0


def test_the_full_page_prints_its_wide_tables_whole(tab, full: Path) -> None:  # type: ignore[no-untyped-def]
    tab.open(full.as_uri())
    tab.evaluate(DRAW_ALL)
    tab.call("Emulation.setEmulatedMedia", media="print")
    hidden = "getComputedStyle(document.querySelector('nav')).display"
    box = "getComputedStyle(document.querySelector('.scroll')).overflowX"
    assert (tab.evaluate(hidden), tab.evaluate(box)) == ("none", "visible")
    tab.call("Emulation.setEmulatedMedia", media="")
