"""The report's tables as text: Markdown, LaTeX with booktabs, or one tidy CSV; numbers as on the HTML page."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from protofed.evaluation.significance import Interval
from protofed.privacy.accountant import adjacency
from protofed.privacy.ledger import Release
from protofed.report.costs import COLUMNS as COSTS
from protofed.report.costs import cost_block, cost_of
from protofed.report.layout import MISSING, Cell, Column, Estimate, Line, Table, to_csv
from protofed.report.prices import Price, Terms, price_of, terms_of
from protofed.report.provenance import claim_of
from protofed.report.sections import Row
from protofed.report.tables import CONTINUAL, HEADLINE, Results, distances, headline, key_of

TIDY = (
    *("dataset", "method", "seeds", "table", "quantity", "candidates", "subset", "stream", "minus"),
    *("mean", "std", "low95", "high95", "text"),
)
Write = Callable[[Sequence[Results], Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Released:
    """A stream of releases of the seeds of a row that released the same, by what ε is computed from, and ε."""

    row: Row
    seeds: tuple[int, ...]
    stream: str
    words: Mapping[str, str]


def accuracy(results: Results) -> Table:
    """The page's first table with standard deviations alone: intervals beside them are too wide for paper."""
    table = headline(results)
    lines = [replace(line, cells=tuple(replace(c, interval="") for c in line.cells)) for line in table.lines]
    n = results.section.n_candidates - 1
    told = f"± standard deviation over seeds; sampled: 1 positive and {n} negatives; full: every item"
    return replace(table, caption=f"{table.caption}, {told}; lower AF is better", lines=tuple(lines), footer=())


def differences(results: Results) -> Table | None:
    """The page's distances to the best row, which each heading names."""
    table = distances(results)
    named = [replace(c, group=f"{c.group}, {c.label}", label=c.hint) for c in table.columns] if table else []
    return table and replace(table, caption=f"{results.section.title}: {table.caption}", columns=tuple(named))


def costs(results: Results, order: Sequence[Line]) -> Table | None:
    """Bytes, trainable numbers and seconds of every row; None where no run tells any."""
    columns, cells = cost_block(results.section)
    caption = (
        f"{results.section.title}: what a client sends and receives in a round, numbers that learn, and seconds of "
        "learning, which compare only on the same hardware; blank where a method does not tell"
    )
    lines = tuple(Line(line.label, cells[line.label]) for line in order)
    return Table(f"{results.section.slug}-costs", caption, tuple(columns), lines) if columns else None


def privacy(results: Results) -> Table | None:
    """What ε is computed from, and ε, a line for each stream of each private row; None where nothing was released."""
    found = released(results)
    if not found:
        return None
    lines = []
    for one in found:
        seeds = "" if one.seeds == one.row.seeds else f", seed {', '.join(map(str, one.seeds))}"  # others differ
        lines.append(Line(f"{one.row.label}{seeds}: {one.stream}", tuple(map(Cell, one.words.values()))))
    caption = (
        f"{results.section.title}: what was released, and ε per user of all streams of a row together, "
        f"against who sees what is released. {claim_of(results.section.runs)}"
    )
    return Table(f"{results.section.slug}-privacy", caption, tuple(map(Column, found[0].words)), tuple(lines))


def released(results: Results) -> tuple[Released, ...]:
    """What every row released, stream by stream; seeds with different ledgers apart."""
    prices = {(price.ledger, price.delta, price.trust): price for price in results.prices.values()}
    found: list[Released] = []
    for row in results.section.rows:
        groups: dict[Terms, list[int]] = {}
        for run in row.runs:
            if run.releases:
                groups.setdefault(terms_of(run), []).append(run.seed)
        for terms, seeds in groups.items():
            price = prices.get(terms) or price_of(*terms)
            found += [Released(row, tuple(seeds), release.stream, _words(price, release)) for release in price.ledger]
    return tuple(found)


def _words(price: Price, release: Release) -> dict[str, str]:
    return {
        "noise multiplier": f"{release.noise_multiplier:g}",
        "rate": f"{release.sampling_rate:g}",
        "rounds": str(release.count),
        "uploads": str(release.uploads),
        "δ": f"{price.delta:g}",
        "ε": MISSING if not price.known else "∞" if math.isinf(price.released) else f"{price.released:g}",
        "trust": price.trust,
        "adjacency": adjacency(price.trust),
    }


def tables(results: Results) -> tuple[Table, ...]:
    """Every table of a section that has something to show."""
    first = accuracy(results)
    found = (first, differences(results), costs(results, first.lines), privacy(results))
    return tuple(table for table in found if table)


def to_markdown(results: Sequence[Results], warned: Sequence[str]) -> str:
    """Tables in Markdown, one heading for each section; the best of a column in bold."""
    lines: list[str] = []
    for found in results:
        lines += [f"## {_md(found.section.title)}", ""]
        for table in tables(found):
            lines += [_md(table.caption), "", *_md_table(table), ""]
    if warned:
        lines += ["## Read with care", "", *(f"- {_md(line)}" for line in warned), ""]
    return "\n".join(lines)


def to_latex(results: Sequence[Results], warned: Sequence[str]) -> str:
    """Tables to \\input into a document that loads booktabs; the best of a column in bold."""
    lines = ["% needs \\usepackage{booktabs}"]
    for found in results:
        for table in tables(found):
            lines += ["", *_tex_table(table)]
    lines += ["", *(f"% {_one_line(line)}" for line in warned)] if warned else []
    return "\n".join(lines) + "\n"


def to_tidy_csv(results: Sequence[Results], warned: Sequence[str] = ()) -> str:
    """One long table of every number; what does not apply is empty."""
    records = [record for found in results for record in _records(found)]
    return to_csv(TIDY, [[record.get(column, "") for column in TIDY] for record in records])


FORMATS: dict[str, Write] = {"md": to_markdown, "latex": to_latex, "csv": to_tidy_csv}
SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".tex": "latex", ".csv": "csv"}


def _records(results: Results) -> Iterator[dict[str, object]]:
    dataset = results.section.title
    for row in results.section.rows:
        about = {"dataset": dataset, "method": row.label, "seeds": _list(row.seeds)}
        estimates = results.estimates[row.label]
        for candidates, subset, metric in HEADLINE:
            where = {"table": "accuracy", "quantity": metric, "candidates": candidates, "subset": subset}
            yield about | where | _spread(estimates[key_of((candidates, subset, metric))])
        for name in CONTINUAL:
            where = {"table": "continual", "quantity": name, "candidates": "sampled", "subset": "all"}
            yield about | where | _spread(estimates[name])
        for (candidates, subset), intervals in results.intervals.items():
            gap = intervals.behind.get(row.label)
            if gap:
                where = {"table": "difference", "quantity": "ndcg@10", "candidates": candidates, "subset": subset}
                yield about | where | {"minus": intervals.best} | _spread(gap)
        cost = cost_of(row)
        for name, value in zip(COSTS, cost.of([*COSTS]), strict=True):
            if math.isfinite(value):
                text = cost.hardware if name == "learn" else ""
                yield about | {"table": "cost", "quantity": name, "mean": value, "text": text}
    for one in released(results):
        about = {"dataset": dataset, "method": one.row.label, "seeds": _list(one.seeds), "stream": one.stream}
        for name, text in one.words.items():
            yield {**about, "table": "privacy", "quantity": name, "text": text}


def _list(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _spread(found: Estimate | Interval) -> dict[str, object]:
    std = found.std if isinstance(found, Estimate) else math.nan
    return {"mean": found.mean, "std": std, "low95": found.low, "high95": found.high}


def _told(cell: Cell) -> str:
    return " ".join(part for part in (cell.text, cell.spread.replace("±", "± "), cell.interval) if part)


def _md_table(table: Table) -> list[str]:
    heads = [_md(" ".join(part for part in (column.group, column.label) if part)) for column in table.columns]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for line in table.lines:
        shown = [f"**{_told(cell)}**" if cell.best else _told(cell) for cell in line.cells]
        lines.append(f"| {_md(line.label)} | {' | '.join(map(_md_bar, shown))} |")
    return lines


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = _one_line(text)
    for character in "\\`*_[]<>#|":
        text = text.replace(character, f"\\{character}")
    return text


def _md_bar(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[").replace("]", "\\]")


def _tex_table(table: Table) -> list[str]:
    body = [
        f"{_tex_label(line.label)} & {' & '.join(_tex_bold(cell) for cell in line.cells)} \\\\" for line in table.lines
    ]
    return [
        "\\begin{table*}[t]",
        "\\centering\\scriptsize\\setlength{\\tabcolsep}{3pt}",
        f"\\caption{{{_tex(table.caption)}}}",
        f"\\label{{tab:{table.name}}}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "\\toprule",
        *_tex_groups(table.columns),
        f"method & {' & '.join(_tex(column.label) for column in table.columns)} \\\\",
        "\\midrule",
        *body,
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table*}",
    ]


def _tex_label(label: str) -> str:
    """A row's first cell; after the line break before it, a bare bracket or star would be read as its option."""
    text = _tex(label)
    return f"{{{text}}}" if text.lstrip()[:1] in ("[", "*") else text


def _tex_groups(columns: Sequence[Column]) -> list[str]:
    """The upper headings with a rule below each; none where columns have none."""
    spans: list[tuple[str, int, int]] = []  # heading, first and last column
    for place, column in enumerate(columns, start=2):
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1], place)
        else:
            spans.append((column.group, place, place))
    if not any(group for group, _, _ in spans):
        return []
    heads = [f"\\multicolumn{{{last - first + 1}}}{{c}}{{{_tex(group)}}}" for group, first, last in spans]
    rules = [f"\\cmidrule(lr){{{first}-{last}}}" for group, first, last in spans if group]
    return [f" & {' & '.join(heads)} \\\\", "".join(rules)]


def _tex_bold(cell: Cell) -> str:
    number_ = f"\\textbf{{{_tex(cell.text)}}}" if cell.best else _tex(cell.text)
    return " ".join(part for part in (number_, _tex(cell.spread), _tex(cell.interval)) if part)


ESCAPES = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": "$\\pm$",
    "\N{MINUS SIGN}": "$-$",
    "–": "--",
    "ε": "$\\varepsilon$",
    "δ": "$\\delta$",
    "∞": "$\\infty$",
    "×": "$\\times$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
}


def _tex(text: str) -> str:
    """Text that LaTeX sets as it is; letters beyond ASCII stay, for engines and encodings that know them."""
    return "".join(ESCAPES.get(character, character) for character in _one_line(text))


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
