"""What a hyper-parameter may be, and which values a search tries: two tables to read.

A space maps dotted settings to the values tried, `hyper.NAME` for the method's own. None of them acts before the first
slice, so all trials of all methods share one warm-up. Sizes of prompts and modules are not searched: they are matched.
"""

from collections.abc import Mapping

from protofed.config import Value
from protofed.errors import ConfigError

Space = Mapping[str, tuple[Value, ...]]

NUMBERS = (0.0, 1e9)  # any hyper-parameter that is not named below
HYPER_RANGES: Mapping[str, tuple[float, float]] = {  # by the last part of the name, ends included
    "alpha": (0, 1),
    "batch": (1, 1e6),
    "bits": (1, 20),
    "candidates": (2, 1e6),
    "clusters": (1, 1e5),
    "damping": (1e-12, 1e6),
    "decay": (0, 1),
    "epochs": (0, 1e6),
    "examples": (1, 1e9),
    "keep_plastic": (0, 1),
    "keep_stable": (0, 1),
    "learning_rate": (1e-12, 100),
    "local_steps": (0, 200),
    "length": (1, 1e5),
    "local_rate": (1e-12, 100),
    "lora_rate": (1e-12, 100),
    "negatives": (1, 1e6),
    "per_user": (1, 1e9),
    "pool": (1, 1e9),
    "rank": (1, 1e5),
    "rate": (1e-12, 1e6),
    "share": (0, 1),
    "temperature": (1e-6, 1e6),
}

SLICE_RATES: Space = {"training.slice_learning_rate": (1e-4, 3e-4, 1e-3)}
WEAK: tuple[Value, ...] = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0)  # where a first search ended at its lowest strength
LOCAL_RATES: tuple[Value, ...] = (1e-4, 3e-4, 1e-3, 3e-3)  # of a client's own steps
PROMPTS: tuple[Value, ...] = (1e-3, 1e-2, 5e-2, 0.1)  # rates of a prompt
MODULES: tuple[Value, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # rates of adapters, prefixes, low-rank updates
BUFFERS: Space = {"hyper.beta": (0.3, 1.0, 3.0), "hyper.capacity.share": (0.01, 0.05, 0.1)}
DEVICES: Space = {  # how prompts and own rows learn
    "protofed.long_rate": (1e-3, 5e-3, 2e-2),
    "protofed.short_rate": (0.03, 0.1, 0.3),
    "protofed.row_rate": (2e-3, 5e-3, 1e-2),
    "protofed.met_boost": (1.0, 3.0, 5.0),
    "protofed.sparsity": (0.3, 1.0, 3.0),
    "protofed.lambda_max": (0.3, 1.0, 3.0),
    "protofed.temperature": (0.03, 0.07, 0.2),
    "protofed.local_steps": (10, 20, 40),
}

FINE_TUNING = (
    *("finetune-last", "full-retrain", "ewc", "si", "mas", "lwf", "sail-piw"),
    *("er-random", "er-freq", "reloop", "reloop2", "infer", "ccd"),
)

SPACES: Mapping[str, Space] = {
    "popularity": {},  # counts
    "frozen": {},  # only new rows learn, by the rule that is the same for all
    "frozen-no-new-rows": {},
    "personal-memory": {},  # its weight and half-life belong to its definition
    "full-retrain": {},  # trains as the warm-up does, whose settings are everybody's
    "finetune-last": SLICE_RATES,
    "protofed-sp": DEVICES,
    "protofed": DEVICES,  # its head is fitted, not searched
    "ewc": {"hyper.strength": WEAK, "hyper.decay": (0.9, 1.0), **SLICE_RATES},
    "si": {"hyper.strength": (0.001, 0.01, 0.1, 1.0, 10.0), "hyper.damping": (1e-3, 0.1), **SLICE_RATES},
    "mas": {"hyper.strength": WEAK, "hyper.accumulate": ("sum", "average"), **SLICE_RATES},
    "lwf": {"hyper.strength": (0.1, 0.3, 1.0, 3.0), "hyper.temperature": (1.0, 2.0, 5.0), **SLICE_RATES},
    "sail-piw": {"hyper.strength": (0.1, 1.0, 3.0, 10.0), "hyper.temperature": (1.0, 2.0, 5.0), **SLICE_RATES},
    "er-random": {**BUFFERS, **SLICE_RATES},
    "er-freq": {**BUFFERS, "hyper.mode": ("inv_degree", "freq", "sqrt_inv"), **SLICE_RATES},
    "reloop": {"hyper.alpha": (0.1, 0.3, 0.5, 0.7, 0.9), **SLICE_RATES},
    "reloop2": {"hyper.weight": (0.1, 0.3, 0.5, 1.0), "hyper.decay": (0.5, 0.9), **SLICE_RATES},
    "infer": {**BUFFERS, "hyper.cosine": (False, True), **SLICE_RATES},
    "ccd": {
        "hyper.weight": (0.1, 0.5, 1.0),
        "hyper.keep_stable": (0.9, 0.95, 1.0),
        "hyper.distillation": (0.01, 0.1),
        **SLICE_RATES,
    },
    "prompt-tuning": {"peft.learning_rate": PROMPTS, **SLICE_RATES},
    "prefix-tuning": {"hyper.learning_rate": MODULES, **SLICE_RATES},
    "adapters": {"hyper.learning_rate": MODULES, **SLICE_RATES},
    "adapter-cl": {"hyper.learning_rate": MODULES, "hyper.history": (3, 5, 10), **SLICE_RATES},
    "dual-lora": {"hyper.learning_rate": MODULES, "hyper.long_rate": (0.03, 0.1, 0.3), **SLICE_RATES},
    "recicl": {"hyper.count": (2, 4, 8), "hyper.epochs": (3, 5, 10), **SLICE_RATES},
    "pcl": {"hyper.head": (True, False), "training.slice_learning_rate": (3e-4, 1e-3, 1e-2, 5e-2)},
    "fedavg": {"hyper.rate": LOCAL_RATES, "hyper.ft_steps": (5, 20, 40), "hyper.ft_rate": LOCAL_RATES},
    "fedprox": {"hyper.mu": (0.001, 0.01, 0.1, 0.5, 1.0), "hyper.rate": LOCAL_RATES, "hyper.epochs": (1, 3, 5)},
    "ditto": {"hyper.strength": (0.1, 1.0, 2.0), "hyper.rate": LOCAL_RATES, "hyper.personal_rate": LOCAL_RATES},
    "fedrap": {
        "hyper.separation": (0.0, 0.01, 0.1),
        "hyper.sparsity": (0.001, 0.01, 0.1),
        "hyper.rate": LOCAL_RATES,
        "hyper.own_rate": (3e-4, 1e-3, 5e-3),
    },
}

PEFT_SPACES: Mapping[str, Space] = {  # where the `peft` variant has other settings than the standard one
    **{name: {**SPACES[name], "peft.learning_rate": PROMPTS} for name in FINE_TUNING},
    "ccd": {**SPACES["ccd"], "peft.learning_rate": PROMPTS, "hyper.lora_rate": MODULES},
    "fedavg": {"hyper.peft_rate": PROMPTS, "hyper.ft_steps": (5, 20, 40), "hyper.peft_ft_rate": PROMPTS},
    "fedprox": {"hyper.peft_mu": (0.001, 0.01, 0.1, 0.5, 1.0), "hyper.peft_rate": PROMPTS, "hyper.epochs": (1, 3, 5)},
    "ditto": {"hyper.strength": (0.1, 1.0, 2.0), "hyper.peft_rate": PROMPTS, "hyper.peft_personal_rate": PROMPTS},
}


# What noise asks for besides: an upload's length, to which its noise is in proportion, must fit what clients learn.
# AdamW undoes the scale of a private gradient, so where the steps are the server's there is nothing to gain by it.
CLIP_RADII: Space = {"privacy.clip_radius": (0.01, 0.03, 0.1, 0.3, 1.0)}
PRIVATE_SPACES: Mapping[str, Space] = dict.fromkeys(("fedavg", "fedprox", "ditto", "fedrap"), CLIP_RADII)


def space_of(method: str, variant: str = "standard", *, private: bool = False) -> Space:
    """What a search tries for this method; empty where there is nothing to tune."""
    if method not in SPACES:
        raise ConfigError(f"{method} has no search space; add it to methods/search_spaces.py (empty: nothing to tune)")
    space = PEFT_SPACES.get(method, SPACES[method]) if variant == "peft" else SPACES[method]
    return {**space, **PRIVATE_SPACES.get(method, {})} if private else space


def check_hyper(key: str, value: object) -> None:
    """Refuse a number that no method could mean."""
    least, most = HYPER_RANGES.get(key.rpartition(".")[2], NUMBERS)
    if isinstance(value, int | float) and not isinstance(value, bool) and not least <= value <= most:
        raise ConfigError(f"hyper.{key} must lie between {least:g} and {most:g}, got {value}")
