"""Every setting, as frozen dataclasses with the project's defaults, read strictly from TOML and written back."""

import contextlib
import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from protofed.errors import ConfigError

T = TypeVar("T")
Value = bool | int | float | str
Number = int | float


def number(default: Number, least: Number, most: Number) -> Any:
    """A setting's default and what it may be, ends included; a small log is done at either end."""
    return field(default=default, metadata={"range": (least, most)})


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How time is cut."""

    n_slices: int = number(8, 1, 10_000)  # T: wall-clock slices after the base block
    base_fraction: float = 0.5  # share of the events in the base block D_0
    edges: Literal["count", "duration"] = "count"  # slices equally full, or equally long
    base: Literal["block", "slice-1"] = "block"  # base block, or the first of T equal slices
    row_order_history: bool = False  # let earlier rows of the same timestamp into a history
    n_negatives: int = number(99, 1, 10_000)  # sampled candidates beside the positive


@dataclass(frozen=True, slots=True)
class BackboneConfig:
    """The sequential recommender f_theta (SASRec)."""

    width: int = number(64, 1, 1_024)  # d: length of item vectors and hidden states
    layers: int = number(2, 1, 100)  # transformer blocks
    heads: int = number(4, 1, 1_000)  # of attention; the width is a multiple of them
    ffn_width: int = number(1, 1, 100)  # inner width of a block's feed-forward part, in multiples of d
    history_length: int = number(50, 1, 100_000)  # L: how many recent tokens it reads
    dropout: float = number(0.5, 0, 0.99)  # chosen on the base block's validation part; 0.2 over-fits (docs/results.md)
    prompt_length: int = number(8, 1, 256)  # L_p: soft-prompt tokens of the prompt-aware warm-up


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Gradient training, the same for every method."""

    loss: Literal["softmax", "bce", "bpr"] = "softmax"  # sampled softmax, pointwise or pairwise
    negatives: int = number(64, 1, 10**6)  # uniform negatives per window
    learning_rate: float = number(1e-3, 1e-12, 100)  # in the base block
    slice_learning_rate: float = number(1e-3, 1e-12, 100)  # after the base block
    weight_decay: float = number(1e-4, 0, 100)  # of AdamW
    max_grad_norm: float = number(1.0, 1e-12, 1e12)  # longer gradients are clipped to it
    batch_size: int = number(64, 1, 10**6)  # windows per step
    stride: int = number(25, 1, 100_000)  # most targets in a window: they read L - stride earlier tokens or more
    base_epochs: int = number(100, 0, 10**6)  # cap in the base block
    slice_epochs: int = number(30, 0, 10**6)  # cap in a slice
    patience: int = number(3, 1, 10**6)  # epochs without a better validation part before stopping
    patience_steps: int = number(0, 0, 10**9)  # and at least so many steps without one; 0: epochs alone count
    selection: Literal["sampled", "full"] = "sampled"  # which validation NDCG@10 stops the training
    prompt_rate: float = number(0.5, 0, 1)  # share of warm-up batches that carry a random prompt


@dataclass(frozen=True, slots=True)
class ScoringConfig:
    """Switches that any method may be given; off unless a table says otherwise."""

    popularity_prior: float = number(0.0, 0, 1e6)  # w of w * log(1 + train count of the slice); 0.5 where on
    personal_memory: float = number(0.0, 0, 1e6)  # w of w * log(1 + 10 * sum of 0.5^(age / half-life)); 2 where on
    memory_half_life_days: float = number(30.0, 1e-6, 1e6)  # an event this old counts half
    head: bool = False  # a small head over the user's own past, fitted on half of the base block's validation part


@dataclass(frozen=True, slots=True)
class ContentConfig:
    """What is publicly known of items: it ranks those that nobody has met yet, and costs no ε."""

    features: str = ""  # of the item table, comma-separated (FEATURES); none: items without a row share the mean row
    kind: Literal["nearest", "tower"] = "nearest"  # rows of the nearest known items, or a map learned in the warm-up
    neighbours: int = number(10, 1, 1_000)  # known items that a row of the nearest kind is the mean of
    text_model: str = "wordllama"  # encoder of titles and texts: a packaged one, or a Hugging Face folder
    image_model: str = "efficientnet-lite0"  # encoder of pictures: a packaged one, or a Hugging Face folder
    images: str = ""  # folder of the pictures
    vectors: str = ""  # file of the feature `vectors`, .npy or .parquet
    id_dropout: float = number(0.3, 0, 0.99)  # share of a tower's items read by content alone in a warm-up step
    missing: float = number(0.0, 0, 1)  # share of items that lose a feature, each feature on its own: what gaps cost


FEATURES: Mapping[str, str] = {
    "place": "latitude and longitude",
    "category": "categories or genres",
    "text": "title, category and text by the text encoder",
    "image": "the picture by the image encoder",
    "vectors": "vectors that were made elsewhere",
}


@dataclass(frozen=True, slots=True)
class PrivacyConfig:
    """What is promised, and with how much noise."""

    target_epsilon: float = number(3.4, 0, 1_000)  # of the whole stream; 0: no budget, the noise multiplier is given
    noise_multiplier: float = number(0.0, 0, 1e6)  # of every round; 0: solved. With both, uploads stop at the budget
    delta: float = number(1e-5, 1e-300, 0.999999)  # δ of the claim
    trust: Literal["central", "secure-aggregation", "local"] = "central"  # whom the clients trust with what
    sampling_rate: float = number(0.05, 1e-9, 1)  # q: a client's chance to take part in a round; 1: everybody
    rounds_per_slice: int = number(20, 0, 1_000)  # releases in each slice; fixed ahead
    clip_radius: float = number(1.0, 1e-6, 1e6)  # longest contribution of one user in a round
    count_weight: float = number(0.25, 1e-6, 1e6)  # c: what a contribution adds to its prototype's count
    newcomer_share: float = number(0.85, 0, 1)  # of ε, for the release of new items' rows; the rounds get what is left
    newcomer_noise: float = number(0.0, 0, 1e6)  # of that release; 0: solved (without a budget: twice the rounds')
    wrap: bool = False  # a method is private: by its own mechanism, else by private steps


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The `peft` variant: one prompt of backbone.prompt_length tokens, shared by all, in a frozen backbone."""

    learning_rate: float = number(0.1, 1e-12, 100)  # of the prompt; new item rows learn at training.slice_learning_rate


@dataclass(frozen=True, slots=True)
class ProtoFedConfig:
    """ProtoFed-SP: prompts, own rows, prototypes. Defaults of the reference mode (docs/paper_notes.md)."""

    # protofed-sp: private, as printed in the paper, or without noise
    mode: Literal["reference", "literal", "nodp", "nothing", "private"] = "reference"  # protofed: what --share says
    ablate: str = ""  # parts left out, comma-separated (ABLATIONS)
    prototypes: int = number(0, 0, 65_536)  # K; 0: as many as the cohort can feed
    seedings: int = number(1, 1, 10_000)  # starts of the k-means of the first prototypes; the tightest is taken
    top_m: int = number(4, 1, 65_536)  # M: prototypes a query is routed to
    temperature: float = number(0.07, 1e-6, 1e6)  # tau of the router
    embedding: int = number(64, 1, 65_536)  # d_z: width of what is uploaded
    codec: Literal["auto", "linear", "mlp"] = "auto"  # auto: linear below 2,000 base users
    aggregator: Literal["fedkmeans", "geometric-median", "barycenter"] = "fedkmeans"  # how uploads move prototypes
    momentum: float = number(0.1, 0, 1)  # beta of the prototypes
    margin: float = number(0.5, 0, 2)  # rho: least distance between prototypes
    local_steps: int = number(20, 0, 200)  # of each client in a slice, spread over its rounds
    base_steps: int = number(20, 0, 200)  # of each base user's simulated device in the base block
    prompt_history: int = number(0, 0, 100_000)  # tokens prompts learn beside, less own rows; 0: all, with them
    base_history: int = number(0, 0, 100_000)  # tokens those steps read: few leave more to prompts; 0: the backbone's
    base_windows: int = number(4, 1, 10**6)  # newest windows of each base user that those steps read
    long_rate: float = number(5e-3, 0, 100)  # eta_l: learning rate of the long prompt
    short_rate: float = number(0.1, 0, 1e6)  # eta_s: learning rate of the short prompt
    row_rate: float = number(5e-3, 0, 100)  # learning rate of a client's own item rows; 0 leaves them where they start
    met_boost: float = number(3.0, 0, 1e3)  # an item just met starts with this much of base users' rows' mean gain
    at_once: bool = False  # items in a question's past count as just met before the device has learned a row for them
    sparsity: float = number(1.0, 0, 1e6)  # lambda_p in multiples of a client's median gradient entry
    group_sparsity: bool = False  # drop whole tokens of the short prompt
    lambda_max: float = number(1.0, 0, 1e6)  # the strongest pull to the prototypes
    gamma: float = number(0.5, 0, 1e6)  # weight of InfoNCE in the alignment
    alignment_temperature: float = number(0.1, 1e-6, 1e6)  # tau_a: temperature of InfoNCE
    alignment: Literal["euclidean", "entropy", "wasserstein"] = "euclidean"  # how prompts are pulled to prototypes
    inner_prox_steps: int = number(0, 0, 500)  # 0: Algorithm 1's explicit long step; more: Eq. (3)
    acceptance_prior: float = number(5.0, 0, 1e9)  # base users' verdict on prompts and rows counts as so many events
    carry: float = number(0.5, 0, 1)  # what of the short prompt survives the start of a session
    session_gap_hours: float = number(8.0, 0, 1e6)  # a longer pause starts a session
    newcomers: Literal["auto", "mean-row", "noised"] = "auto"  # rows of new items; auto: as a rehearsal says
    chunk: int = number(512, 1, 10**7)  # clients computed at once; changes memory and speed, not results
    bf16: bool = False  # backbone passes in bfloat16, on a GPU
    table: Literal["device", "host"] = "device"  # where the prompts of all users are kept


ABLATIONS: Mapping[str, str] = {
    "alignment": "long prompts are not pulled to prototypes",
    "short": "no short-term prompt",
    "long": "no long-term prompt, so nothing to upload",
    "prototypes": "no routed prototypes in the composed prompt",
    "static-prototypes": "prototypes stay as the base block left them",
    "own-rows": "no item rows of the client's own",
    "acceptance": "every client uses its prompt and rows, whatever its validation events say",
    "prompts": "no prompt at all: own rows only",
    "personal": "nothing personal: routed prototypes only",
    "own-past": "the head adds nothing for the user's own past",
    "query-time": "the head does not read when a question is asked: ages, half-lives, time of day and hour of the week",
    "item-counts": "the head adds nothing for counts of items",
    "popularity": "popularity is not released",
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One method on one log: everything that decides its numbers."""

    dataset: str = "synthetic"  # a prepared log, or the embedded synthetic world
    method: str = "frozen"  # a name of `protofed run --list-methods`, or package.module:Name
    variant: Literal["standard", "peft"] = "standard"  # what slices change: the weights, or a prompt and new rows only
    preset: Literal["small", "paper"] = "small"  # width 64 or 256
    seed: int = number(0, 0, 2**62)  # of weights, order and training negatives; never of the candidates
    clients: int = number(0, 0, 2**62)  # keep so many users, drawn by a hash of their ids; 0 keeps all
    stream: StreamConfig = field(default_factory=StreamConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    content: ContentConfig = field(default_factory=ContentConfig)  # what is publicly known of items
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    protofed: ProtoFedConfig = field(default_factory=ProtoFedConfig)
    hyper: str = ""  # the method's own, e.g. "strength = 0.1"; a table [hyper] in files, --set hyper.NAME=value


PRESETS: Mapping[str, Mapping[str, object]] = {
    "small": {"backbone.width": 64},  # two CPU cores
    "paper": {"backbone.width": 256},
}


@cache
def ranges(kind: type = RunConfig, within: str = "") -> Mapping[str, tuple[Number, Number]]:
    """What every number may be, by dotted name: a table's own first, then those of the tables in it."""
    found = {f"{within}{f.name}": f.metadata["range"] for f in dataclasses.fields(kind) if "range" in f.metadata}
    for name, hint in typing.get_type_hints(kind).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= ranges(hint, f"{within}{name}.")
    return found


def in_range(config: RunConfig) -> RunConfig:
    """The config itself, once every number lies where it may."""
    for key, (least, most) in ranges().items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if not least <= value <= most:
            raise ConfigError(f"{key} must lie between {least:g} and {most:g}, got {value}")
    if config.backbone.width % config.backbone.heads:
        width, heads = config.backbone.width, config.backbone.heads
        raise ConfigError(f"backbone.width must be a multiple of backbone.heads, got {width} and {heads}")
    if config.protofed.prompt_history > config.backbone.history_length:
        prompts, whole = config.protofed.prompt_history, config.backbone.history_length
        raise ConfigError(f"protofed.prompt_history must be at most backbone.history_length, got {prompts} and {whole}")
    ablations_of(config.protofed)
    features_of(config.content)
    return config


def ablations_of(config: ProtoFedConfig) -> frozenset[str]:
    """The parts that are left out; an unknown name is an error that suggests the nearest."""
    return frozenset(_names(config.ablate, ABLATIONS, "ablation"))


def features_of(config: ContentConfig) -> tuple[str, ...]:
    """The features that are asked for, in the order of FEATURES; an unknown name is an error."""
    asked = _names(config.features, FEATURES, "feature")
    return tuple(name for name in FEATURES if name in asked)


def _names(text: str, known: Mapping[str, str], thing: str) -> list[str]:
    """The comma-separated names, all of them known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown {thing} {name!r}; {hint}")
    return names


def preset(name: object) -> RunConfig:
    """The defaults of one preset."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return override(replace(RunConfig(), preset=typing.cast(Any, name)), PRESETS[name])


def override(config: T, values: Mapping[str, object]) -> T:
    """The config with dotted keys replaced, e.g. {"training.negatives": 32}."""
    for key, value in values.items():
        config = _set(config, key.split("."), value, key)
    return config


def override_at_once(config: T, values: Mapping[str, object], within: str) -> T:
    """`override` in one step: rules between several fields see only the end. Messages name keys with `within` first."""
    changes: dict[str, Any] = {}
    parts: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        _check_known(config, key.split("."), f"{within}{key}")
        if rest:
            parts.setdefault(name, {})[rest] = value
        else:
            changes[name] = _checked(f"{within}{key}", value, typing.get_type_hints(type(config))[name])
    for name, inside in parts.items():
        changes[name] = override_at_once(getattr(config, name), inside, f"{within}{name}.")
    return replace(typing.cast(Any, config), **changes)  # type: ignore[no-any-return]


def parse_override(text: str) -> tuple[str, object]:
    """`key=value` as given to --set; the value is read as TOML, or as a bare string."""
    key, found, raw = text.partition("=")
    if not found or not key:
        raise ConfigError(f"--set takes key=value, got {text!r}; for example --set training.negatives=32")
    try:
        return key.strip(), _toml_values(f"value = {raw}")["value"]
    except ValueError:
        return key.strip(), raw


def from_toml(text: str) -> RunConfig:
    """A run's config, strictly: an unknown key or a value of the wrong type is an error."""
    return from_values(parsed(text))


def read_toml(path: Path) -> RunConfig:
    """The config in a file."""
    return from_values(values_of(path))


def from_values(values: Mapping[str, object]) -> RunConfig:
    """Dotted keys on top of their preset."""
    return in_range(override(preset(values.get("preset", "small")), values))


def values_of(path: Path) -> dict[str, object]:
    """The dotted keys a file sets; whatever is wrong with its text is an error that names the file."""
    if not path.is_file():
        raise ConfigError(f"no config file at {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is not UTF-8 text ({problem}); save it as UTF-8") from problem
    return parsed(text, str(path))


def parsed(text: str, name: str = "the config") -> dict[str, object]:
    """The dotted keys a TOML text sets; errors call it `name`."""
    try:
        return flatten(_toml_values(text))
    except ValueError as problem:
        raise ConfigError(f"{name} is not valid TOML: {problem}") from problem


def _toml_values(text: str) -> dict[str, Any]:
    """What a TOML text says; a ValueError, tomllib's or Python's own, where it cannot be read."""
    try:
        return tomllib.loads(text)
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


def as_today(text: str) -> str:
    """A config as it would be written today, settings that came later at their defaults; other texts as they are."""
    try:
        return to_toml(from_toml(text))
    except ConfigError:
        return text


def to_toml(config: RunConfig) -> str:
    """The whole config, every field written out."""
    values = dataclasses.asdict(config)
    with contextlib.suppress(ConfigError):
        table = hyper_values(config.hyper)
        values["hyper"] = table if _hyper_text(table) == config.hyper else config.hyper  # another spelling stays a text
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):  # JSON's surrogate pairs are no TOML, and TOML alone forbids a bare DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool | int) else repr(value)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """The values of nested tables by dotted keys; an empty table stays a value, so that an unknown one is noticed."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        inside = isinstance(value, Mapping) and bool(value)
        flat |= flatten(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return flat


def _set(config: T, path: list[str], value: object, key: str) -> T:
    _check_known(config, path, key)
    old = getattr(config, path[0])
    if isinstance(config, RunConfig) and path[0] == "hyper" and (len(path) > 1 or value == {}):
        return replace(config, hyper=_entered(config.hyper, path[1:], value, key))
    if len(path) > 1:
        return replace(typing.cast(Any, config), **{path[0]: _set(old, path[1:], value, key)})  # type: ignore[no-any-return]
    if value == {} and dataclasses.is_dataclass(old):
        return config
    hint_type = typing.get_type_hints(type(config))[path[0]]
    return replace(typing.cast(Any, config), **{path[0]: _checked(key, value, hint_type)})  # type: ignore[no-any-return]


def _check_known(config: object, path: list[str], key: str) -> None:
    """Refuse a name that is no field of this table, and a part of what is a single value."""
    names = [f.name for f in dataclasses.fields(typing.cast(Any, config))]
    if path[0] not in names:
        near = difflib.get_close_matches(path[0], names, n=1)
        hint = (
            f"did you mean {'.'.join([*key.split('.')[: -len(path)], near[0]])!r}?"
            if near
            else f"known: {', '.join(names)}"
        )
        raise ConfigError(f"unknown config key {key!r}; {hint}")
    old = getattr(config, path[0])
    single = not dataclasses.is_dataclass(old) and not (isinstance(config, RunConfig) and path[0] == "hyper")
    if len(path) > 1 and single:
        raise ConfigError(f"config key {key!r}: {path[0]!r} is a single value, it has no part {path[1]!r}")


def _entered(text: str, path: list[str], value: object, key: str) -> str:
    """The hyper-parameters with one more among them."""
    if not path:
        return text
    if not all(re.fullmatch(r"\w+", part, re.ASCII) for part in path):
        raise ConfigError(f"unknown config key {key!r}; hyper-parameters are named like hyper.strength")
    if not isinstance(value, Value):
        raise ConfigError(f"{key} must be a single value, got {value!r}")
    return _hyper_text({**hyper_values(text), ".".join(path): value})


def hyper_values(text: str) -> dict[str, Value]:
    """The hyper-parameters of a config by their names; a part of a part is named `capacity.share`."""
    try:
        found = flatten(_toml_values(f"hyper = {{{text}}}"))
    except ValueError as problem:
        raise ConfigError(f'hyper must look like "strength = 0.1, examples = 500", got {text!r}') from problem
    values = {key.removeprefix("hyper."): value for key, value in found.items() if key != "hyper"}
    for key, value in values.items():
        if not isinstance(value, Value):
            raise ConfigError(f"hyper.{key} must be a single value, got {value!r}")
    return typing.cast(dict[str, Value], values)


def _hyper_text(values: Mapping[str, Value]) -> str:
    """The inside of an inline table, sorted, so that equal hyper-parameters are equal texts."""
    return ", ".join(f"{key} = {_toml(value)}" for key, value in sorted(values.items()))


def _checked(key: str, value: object, hint: Any) -> object:
    if dataclasses.is_dataclass(hint):
        raise ConfigError(
            f"config key {key!r} is a table, got {value!r}; set its keys, e.g. {key}.{dataclasses.fields(hint)[0].name}"
        )
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{key} must be one of {', '.join(map(str, typing.get_args(hint)))}, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # no float is so large: it stays what it is, and is refused below
            value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{key} must be of type {getattr(hint, '__name__', hint)}, got {value!r}")
    return value
