"""A page for each method: what its file says, its hyper-parameters, what the search found and what was measured.

    python scripts/method_pages.py            # writes docs/methods/NAME.md

Nothing is typed by hand: the catalogue, the files' own words, the search spaces and results/ (overall.csv is
`protofed report results/overall -o results/overall.csv`).
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from protofed.config import RunConfig, from_toml, hyper_values, override, values_of
from protofed.experiments.tuning import value_at
from protofed.methods.catalogue import METHODS, Entry
from protofed.methods.search_spaces import space_of

ROOT = Path(__file__).parents[1]
HEADINGS = ("What we implement:", "How it differs:", "Privacy:", "Under `--variant peft`")
SHOWN = (
    ("ndcg@10", "sampled", "all"),
    ("ndcg@10", "sampled", "novel"),
    ("ndcg@10", "full", "all"),
    ("hr@10", "sampled", "all"),
)
COSTS = ("bytes_up", "trainable_parameters", "trainable_parameters_per_user")
Found = Mapping[tuple[str, str], Mapping[tuple[str, str, str], dict[str, str]]]  # by data set and row, then by quantity
SEARCHES = {"tune/gowalla_1k": False, "tune/yelp": False, "tune/private/gowalla_1k": True}  # whether private


def words_of(entry: Entry) -> str:
    """The docstring of the file that the method lives in, its parts as paragraphs."""
    text = (sys.modules[type(entry.method).__module__].__doc__ or "").strip()
    for heading in HEADINGS:
        text = re.sub(rf"(?<!\n)\n(?={re.escape(heading)})", "\n\n", text)
        text = text.replace(heading, f"**{heading}**" if heading.endswith(":") else heading)
    return text


def own_settings(value: object, prefix: str = "hyper.") -> Iterator[tuple[str, object]]:
    """Every hyper-parameter of a method and its default, dotted."""
    for field in fields(value):  # type: ignore[arg-type]
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            yield from own_settings(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", inner


def best_in(folder: Path, name: str) -> dict[str, object]:
    """What a search ended with, by dotted key; nothing where it was not made."""
    path = folder / name / "best.toml"
    if not path.is_file():
        return {}
    config = from_toml(path.read_text(encoding="utf-8"))
    return values_of(path) | {f"hyper.{key}": value for key, value in hyper_values(config.hyper).items()}


def settings_table(name: str, entry: Entry, results: Path) -> list[str]:
    """Defaults, values searched, and what was found with and without noise."""
    config = override(RunConfig(method=name, variant=entry.variants[0]), entry.settings)
    spaces = [space_of(name, config.variant, private=private) for private in SEARCHES.values()]
    found = [best_in(results / folder, name) for folder in SEARCHES]
    if name == "protofed-sp":  # its own mode is the private one
        found[0] = {}
    defaults = {key: value_at(config, key) for key in spaces[-1]} | dict(own_settings(entry.method))
    lines = []
    for key, default in defaults.items():
        tried = ", ".join(map(shown, spaces[-1].get(key, ())))
        ended = [
            shown(best.get(key, default)) if best and key in space else ""
            for best, space in zip(found, spaces, strict=True)
        ]
        lines.append(f"| `{key}` | {shown(default)} | {tried} | " + " | ".join(ended) + " |")
    if not lines:
        return ["None."]
    return [
        "| setting | default | searched | found on gowalla_1k | found on yelp | found on gowalla_1k at ε = 3.4 |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def measured(path: Path) -> Found:
    """The exported table, by data set and row."""
    found: dict[tuple[str, str], dict[tuple[str, str, str], dict[str, str]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            key = line["quantity"], line["candidates"] or line["stream"], line["subset"]
            if line["table"] != "difference":
                found.setdefault((line["dataset"], line["method"]), {})[key] = line
    return found


def committed(results: Path) -> Found:
    """What the pages show: the overall tables, and of the flagship's its own rows."""
    ours = {row: cells for row, cells in measured(results / "flagship.csv").items() if row[1].startswith("protofed (")}
    return {**measured(results / "overall.csv"), **ours}


def rows_of(name: str, found: Found) -> list[tuple[str, str]]:
    """The rows that are this method: itself, or with something in brackets or settings behind it."""
    return [row for row in found if re.fullmatch(rf"{re.escape(name)}(?: \(.*\))?(?:, .*)?", row[1])]


def figure(cell: Mapping[str, str] | None) -> str:
    if not cell or not cell["mean"]:
        return "–"
    mean = f"{float(cell['mean']):.3f}"
    std = f" ± {float(cell['std']):.3f}" if cell["std"] else ""
    return mean + std + (f" [{float(cell['low95']):.3f}, {float(cell['high95']):.3f}]" if cell["low95"] else "")


def whole(cell: Mapping[str, str] | None) -> str:
    return f"{float(cell['mean']):,.0f}" if cell else "–"


def claims(row: Mapping[tuple[str, str, str], Mapping[str, str]]) -> Iterator[str]:
    """The price of each stream of releases, in full."""
    for _, stream, _ in (key for key in row if key[0] == "ε"):
        told = {key[0]: cell["text"] for key, cell in row.items() if key[1] == stream}
        yield (
            f"ε = {told['ε']}, δ = {told['δ']}, joint user-level, {told['adjacency']}, {told['trust']} trust, "
            f"multiplier {told['noise multiplier']}, rate {told['rate']}, {told['rounds']} rounds ({stream}); "
            "events of the base block are not covered, and nothing is promised against the server under central trust."
        )


def measured_table(name: str, found: Found) -> list[str]:
    rows = rows_of(name, found)
    if not rows:
        return ["Not measured yet."]
    lines = []
    for dataset, row in rows:
        cells = [figure(found[dataset, row].get(key)) for key in SHOWN]
        cells += [figure(found[dataset, row].get((key, "sampled", "all"))) for key in ("AF", "BWT")]
        cells += [whole(found[dataset, row].get((key, "", ""))) for key in COSTS]
        lines.append(f"| {dataset} | {row} | " + " | ".join(cells) + " |")
    return [
        "| log | row | NDCG@10, sampled | novel | full | HR@10, sampled | AF | BWT | bytes up | shared | per user |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *lines,
        "",
        *(f"- {dataset}, {row}: {claim}" for dataset, row in rows for claim in claims(found[dataset, row])),
        "",
        "Small preset, mean of A[t, t] over slices, ± over seeds, 95 % intervals over users. Bytes: of one client in",
        "one round; shared, per user: numbers that learn (a dash: not told). Differences between rows:",
        "[results](../results.md), [the report](../report.html); the claim: [privacy](../privacy.md).",
    ]


def page(name: str, found: Found, results: Path) -> str:
    entry = METHODS[name]
    parts = [
        f"# {name}",
        f"{entry.summary[0].upper()}{entry.summary[1:]}. Variants: {', '.join(entry.variants)}.",
        words_of(entry),
        "## Hyper-parameters",
        "\n".join(settings_table(name, entry, results)),
        "## Measured",
        "\n".join(measured_table(name, found)),
        f"```\nprotofed run --dataset gowalla_1k --root data --method {name} --preset small --out runs/{name}\n```",
        "Written by `scripts/method_pages.py`; what all methods share is in [methods](../methods.md).",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "methods")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    found = committed(asked.results)
    for name in METHODS:
        (asked.out / f"{name}.md").write_text(page(name, found, asked.results), encoding="utf-8")


if __name__ == "__main__":
    main()
