"""RecICL with a real language model: candidates re-ranked by how much rather it says Yes than No.

Bao et al., Customizing in-context learning for dynamic interest adaption in LLM-based recommendation, Findings of ACL
2025.
What we implement: any causal language model in a local Hugging Face folder reads m demonstrations (titles liked before
an event of the user, the title met then and Yes, a title not met and No; the newest event last), then the liked titles
and one candidate. The score is logit(Yes) - logit(No). All candidates share their first tokens, whose keys and values
are computed once.
How it differs: the model is used as it is; the original tunes it on prompts of this form first. Ranking every item
would take a forward pass each, so this is no method of the benchmark: it ranks the candidates it is given. It needs
item titles, and RetailRocket, Gowalla and Taobao have none.
Privacy: inference only. Where the model does not run on the user's device, titles of the history leave it.
"""

import copy
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from jaxtyping import Float
from torch import Tensor

from protofed.errors import ConfigError, DataError, MissingExtra
from protofed.seeds import numpy_stream

CAUSAL = ("ForCausalLM", "LMHeadModel")  # how Hugging Face names such architectures
ANSWERS = (" Yes", " No")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model and its tokenizer."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any
    folder: Path

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Asked:
    """One candidate's question as tokens, cut where the two answers part, and the two tokens that part them."""

    context: list[int]
    yes: int
    no: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How a question is put."""

    demonstrations: int = 4  # m
    span: int = 10  # liked titles named in each
    seed: int = 0  # of the titles that stand as not met


def rank_candidates(
    model_folder: Path | LanguageModel,
    titles: Mapping[str, str],
    history: Sequence[str],
    candidates: Sequence[str],
    *,
    shape: Shape | None = None,
    batch: int = 32,
) -> list[tuple[str, float]]:
    """The candidates with their scores, best first; equal scores keep the given order. `history` is oldest first."""
    texts = questions(titles, history, candidates, shape or Shape())
    language = model_folder if isinstance(model_folder, LanguageModel) else load_language_model(model_folder)
    scores = answer_scores(language, texts, batch=batch).tolist()
    return sorted(zip(candidates, scores, strict=True), key=lambda pair: -pair[1])


def questions(titles: Mapping[str, str], history: Sequence[str], candidates: Sequence[str], shape: Shape) -> list[str]:
    """One prompt per candidate: the same demonstrations and liked titles, then the candidate's own title."""
    check_titles(titles, [*history, *candidates])
    shown = "".join(demonstration_texts(titles, history, candidates, shape))
    liked = _liked(titles, history, shape.span)
    return [f"{shown}{liked}{_question(titles[item])}" for item in candidates]


def demonstration_texts(
    titles: Mapping[str, str], history: Sequence[str], candidates: Sequence[str], shape: Shape
) -> list[str]:
    """For each of the m newest events one example that was met and one that was not, the newest event last.

    What was not met comes from the titled items outside history and candidates; where there is none, it is left out.
    """
    others = sorted(set(titles) - set(history) - set(candidates))
    first = max(0, len(history) - shape.demonstrations)
    texts = []
    for place in range(first, len(history)):
        liked = _liked(titles, history[:place], shape.span)
        texts.append(f"{liked}{_question(titles[history[place]])}{ANSWERS[0]}\n\n")
        if others:
            rng = numpy_stream(shape.seed, "recicl-llm", place, *history[: place + 1])
            texts.append(f"{liked}{_question(titles[others[int(rng.integers(len(others)))]])}{ANSWERS[1]}\n\n")
    return texts


def _liked(titles: Mapping[str, str], items: Sequence[str], span: int) -> str:
    named = "; ".join(titles[item] for item in items[max(0, len(items) - span) :])
    return f"Liked before: {named or 'nothing yet'}\n"


def _question(title: str) -> str:
    return f"Will they like this next: {title}\nAnswer:"


def check_titles(titles: Mapping[str, str], items: Sequence[str]) -> None:
    """Every item has a title."""
    if not titles:
        raise DataError("there are no item titles, and a language model reads nothing else; use the method `recicl`")
    for item in items:
        if not titles.get(item):
            raise DataError(f"item {item!r} has no title; add it to the titles or leave the item out")


def read_titles(path: Path) -> dict[str, str]:
    """Item id -> title, from a CSV or parquet file with the columns item and title; items without one are left out."""
    if not path.is_file():
        raise DataError(f"no titles at {path}; a CSV or parquet file with the columns item and title is needed")
    table = _table(path)
    missing = [name for name in ("item", "title") if name not in table.column_names]
    if missing:
        raise DataError(f"{path} has no column {missing[0]!r}, only {', '.join(table.column_names)}; see `read_titles`")
    columns = (table[name].cast("string").to_pylist() for name in ("item", "title"))
    return {item: title for item, title in zip(*columns, strict=True) if item is not None and title}


def _table(path: Path) -> Any:
    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        as_text = pyarrow.csv.ConvertOptions(column_types={"item": pa.string(), "title": pa.string()})
        return pyarrow.csv.read_csv(path, convert_options=as_text)
    except pa.ArrowInvalid as problem:
        reason = str(problem).splitlines()[0]
        raise DataError(f"{path} cannot be read ({reason}); a CSV or parquet file is needed") from problem


def load_language_model(folder: Path, device: torch.device | str = "cpu") -> LanguageModel:
    """The causal language model in a local folder, ready to score; nothing is ever fetched."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as problem:
        raise MissingExtra("transformers", "llm") from problem
    _check_architecture(folder)
    if not any((folder / name).is_file() for name in VOCABULARIES):  # transformers makes up an empty one
        raise ConfigError(f"{folder} holds no tokenizer ({', '.join(VOCABULARIES)}); save it there with the model")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as problem:
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read ({_reason(problem)}); save it there again"
        ) from problem
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as problem:
        raise ConfigError(
            f"the model in {folder} cannot be read ({_reason(problem)}); save it there again"
        ) from problem
    return LanguageModel(model.requires_grad_(False).eval().to(device), tokenizer, folder)


def _check_architecture(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json; give a local Hugging Face folder")
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("architectures") or ["none"]
    except (ValueError, AttributeError) as problem:
        raise ConfigError(f"{path} is not the JSON of a model ({_reason(problem)}); save the model again") from problem
    if not any(str(name).endswith(CAUSAL) for name in named):
        raise ConfigError(
            f"{folder} must hold a causal language model, got the architecture {named[0]}; "
            "take one whose name ends in ForCausalLM"
        )


def _reason(problem: Exception) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]


@torch.no_grad()
def answer_scores(language: LanguageModel, texts: Sequence[str], *, batch: int = 32) -> Float[Tensor, " n"]:
    """logit(Yes) - logit(No) after each text; what all texts begin with is read once."""
    asked = [tokens_of(language, text) for text in texts]
    if not asked:
        return torch.zeros(0)
    _check_length(language, max(len(one.context) for one in asked))
    shared = min(common_length([one.context for one in asked]), min(len(one.context) for one in asked) - 1)
    cache = _read(language, asked[0].context[:shared]) if shared > 0 else None
    parts = [_scores(language, asked[i : i + batch], max(shared, 0), cache) for i in range(0, len(asked), batch)]
    return torch.cat(parts)


def tokens_of(language: LanguageModel, text: str) -> Asked:
    """The text with either answer, cut at the first token where these differ: words of several tokens are no matter."""
    yes, no = (list(language.tokenizer(text + answer)["input_ids"]) for answer in ANSWERS)
    place = common_length([yes, no])
    if place == 0 or place >= min(len(yes), len(no)):
        raise ConfigError(f"the tokenizer in {language.folder} cannot tell {ANSWERS[0]!r} from {ANSWERS[1]!r}")
    return Asked(yes[:place], yes[place], no[place])


def common_length(sequences: Sequence[list[int]]) -> int:
    """How many tokens all sequences begin with."""
    shortest, longest = min(sequences), max(sequences)  # in dictionary order: what these two share, all share
    pairs = enumerate(zip(shortest, longest, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(shortest), len(longest)))


def _check_length(language: LanguageModel, longest: int) -> None:
    most = getattr(language.model.config, "max_position_embeddings", None)
    if most is not None and longest > most:
        raise ConfigError(
            f"a question takes {longest} tokens and the model in {language.folder} reads {most}; "
            "show fewer demonstrations or a shorter span"
        )


def _read(language: LanguageModel, tokens: Sequence[int]) -> Any:
    """Keys and values of the shared tokens."""
    ids = torch.tensor([list(tokens)], device=language.device)
    return language.model(input_ids=ids, use_cache=True).past_key_values


def _scores(language: LanguageModel, asked: Sequence[Asked], shared: int, cache: Any) -> Float[Tensor, " n"]:
    rest = [torch.tensor(one.context[shared:]) for one in asked]
    ids = torch.nn.utils.rnn.pad_sequence(rest, batch_first=True).to(
        language.device
    )  # at the right: nobody looks there
    last = torch.tensor([len(tokens) - 1 for tokens in rest], device=language.device)
    seen = torch.arange(ids.shape[1], device=language.device) <= last[:, None]
    mask = torch.nn.functional.pad(seen, (shared, 0), value=True).long()
    past = copy.deepcopy(cache)  # the model appends to what it is given
    if past is not None:
        past.batch_repeat_interleave(len(asked))
    logits = language.model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=past is not None).logits
    rows = torch.arange(len(asked), device=language.device)
    at_end = logits[rows, last].float()  # (n, vocabulary)
    yes, no = (torch.tensor([getattr(one, name) for one in asked], device=language.device) for name in ("yes", "no"))
    scores: Tensor = at_end[rows, yes] - at_end[rows, no]
    return scores.cpu()
