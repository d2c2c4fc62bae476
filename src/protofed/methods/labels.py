"""A method and a run as tables name them."""

from protofed.config import RunConfig
from protofed.methods.catalogue import has_modes


def method_label(
    method: str,
    mode: str,
    ablate: str,
    *,
    newcomers: str = "auto",
    private: bool = False,
    variant: str = "standard",
) -> str:
    """A method with its marks: mode and what differs from it where it has modes, else variant and privacy."""
    if has_modes(method):
        rows = [f"new items: {newcomers}"] if newcomers != "auto" else []
        marks = [mode, *rows, *([f"without {ablate.replace(',', ', ')}"] if ablate else [])]
    else:
        marks = [name for name, on in ((variant, variant != "standard"), ("private", private)) if on]
    return f"{method} ({', '.join(marks)})" if marks else method


def run_label(config: RunConfig) -> str:
    """A run as tables name it; hyper-parameters and other settings are told beside the table."""
    settings = config.protofed
    return method_label(
        config.method,
        settings.mode,
        settings.ablate,
        newcomers=settings.newcomers,
        private=config.privacy.wrap,
        variant=config.variant,
    )
