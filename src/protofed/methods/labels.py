"""A method and a run as tables name them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from protofed.config import RunConfig
from protofed.methods.catalogue import METHODS, has_modes
from protofed.methods.names import FLAGSHIP


def method_label(
    method: str,
    mode: str,
    ablate: str,
    *,
    newcomers: str = "auto",
    private: bool = False,
    variant: str = "standard",
    head: bool | None = None,
    content: str = "",
) -> str:
    """A method with its marks: mode or share where it has them, else variant and privacy; then content and head.

    A head is said where the method does not bring it, and its absence where it does; None says nothing.
    """
    marks = [f"content: {content.replace(',', ', ')}"] if content else []
    if head is not None and head != brings_head(method):
        marks.append("head" if head else "no head")
    if has_modes(method):
        rows = [f"new items: {newcomers}"] if newcomers != "auto" else []
        named = f"share {mode}" if method == FLAGSHIP else mode
        marks = [named, *rows, *([f"without {ablate.replace(',', ', ')}"] if ablate else []), *marks]
    else:
        marks = [name for name, on in ((variant, variant != "standard"), ("private", private)) if on] + marks
    return f"{method} ({', '.join(marks)})" if marks else method


def brings_head(method: str) -> bool:
    """Whether a method has the head over the user's own past unless told otherwise."""
    return method in METHODS and bool(METHODS[method].settings.get("scoring.head", False))


def label_of(config: Mapping[str, Any]) -> str:
    """The name of a run with the values of its config.toml, which an earlier version may have written."""
    settings, private = config.get("protofed", {}), config.get("privacy", {}).get("wrap", False)
    if has_modes(config["method"]) and not settings:
        return str(config["method"])
    return method_label(
        config["method"],
        settings.get("mode", "reference"),
        settings.get("ablate", ""),
        newcomers=settings.get("newcomers", "auto"),
        private=bool(private),
        variant=config.get("variant") or "standard",
        head=config.get("scoring", {}).get("head"),
        content=config.get("content", {}).get("features", ""),
    )


def run_label(config: RunConfig) -> str:
    """A run as tables name it; hyper-parameters and other settings are told beside the table."""
    return label_of(asdict(config))
