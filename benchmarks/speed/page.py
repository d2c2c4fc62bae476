"""The tables and the picture of docs/speed.md, from what `protofed speed --json` printed.

python benchmarks/speed/page.py results/speed/compared.json results/speed/growth.json   # needs matplotlib
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from protofed.cli.speed import NAMES

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "speed.md", ROOT / "docs" / "speed.svg"
MARK = "<!-- measured -->"


def on_machine(found: Mapping[str, Any]) -> str:
    """Where the figures come from, in words."""
    on = found["machine"]
    load = ", ".join(f"{each:g}" for each in on["load"])
    return f"{on['cpu']}, {on['cores']} cores, {on['memory_gib']} GiB, PyTorch {on['torch']}; load when it began {load}"


def comparison(one: Mapping[str, Any]) -> Iterator[str]:
    """One width as a table."""
    yield "| | s a round (least to most) | CPU s a round | clients/s | peak MB | times ours | by CPU | aim |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in one["systems"]:
        against = one["ratios"].get(row["system"])
        beside = "| | | |"
        if against:
            aim = f"{against['target']:g}" if against["target"] else ""
            beside = f"| {against['seconds']:.1f} | {against['cpu_seconds']:.1f} | {aim} |"
        spread = f"{row['seconds']:.3f} ({row['least']:.3f} to {row['most']:.3f})"
        numbers = f"{spread} | {row['cpu_seconds']:.3f} | {row['updates_per_second']:.0f} | {row['memory'] / 1e6:.0f}"
        yield f"| {NAMES[row['system']]} | {numbers} {beside}"


def growth(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A growth as a table."""
    yield "| clients | in a round | s a round | CPU s | clients/s | peak MB |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        numbers = f"{row['seconds']:.2f} | {row['cpu_seconds']:.2f} | {row['updates_per_second']:.0f}"
        yield f"| {row['clients']:,} | {row['cohort']:,} | {numbers} | {row['memory'] / 1e6:.0f} |"


def text(compared: Sequence[Mapping[str, Any]], grown: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """All that is measured, as the page has it."""
    yield "## Side by side\n"
    for source, one in ((each, one) for each in compared for one in each["widths"]):
        yield f"### Width {one['width']}\n"
        yield f"Made on {on_machine(source)}.\n"
        yield from comparison(one)
        yield (
            f"\nThe systems differed by {one['largest_difference']:.1e} before. A round of ours is "
            f"{one['gflop_per_round']:.1f} GFLOP of matrix products, padding included.\n"
        )
    for found in grown:
        yield f"## Growth\n\nOurs alone, width {found['by_round'][0]['width']}. Made on {on_machine(found)}.\n"
        yield "![Clients a CPU second and peak memory against clients in a round and in all](speed.svg)\n"
        yield from growth(found["by_round"])
        yield ""
        yield from growth(found["by_clients"])


def picture(grown: Mapping[str, Any]) -> None:
    """Clients a second and memory, against the size of a round and of the whole."""
    mpl.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "protofed", "font.size": 9, "svg.fonttype": "none"})
    plot, panels = plt.subplots(1, 2, figsize=(7.2, 2.6))
    for axes, name, column, label in zip(
        panels, ("by_round", "by_clients"), ("cohort", "clients"), ("clients in a round", "clients in all"), strict=True
    ):
        rows = grown[name]
        x = [row[column] for row in rows]
        axes.plot(x, [row["cohort"] / row["cpu_seconds"] for row in rows], marker="o", label="clients a CPU second")
        axes.plot(x, [row["memory"] / 1e6 for row in rows], marker="s", label="peak MB")
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    plot.tight_layout()
    plot.savefig(PICTURE, facecolor="white", metadata={"Date": None})


def main() -> None:
    """Write both."""
    found = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    compared, grown = ([one for one in found if key in one] for key in ("widths", "by_round"))
    compared.sort(key=lambda one: int(one["widths"][0]["width"]))
    before = PAGE.read_text(encoding="utf-8").split(MARK)[0].rstrip()
    PAGE.write_text("\n".join([before, "", MARK, *text(compared, grown), ""]), encoding="utf-8")
    for one in grown:
        picture(one)


if __name__ == "__main__":
    main()
