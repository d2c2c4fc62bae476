"""The data sets ProtoFed knows: where their official files come from and which function reads them."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from protofed.data.interactions import InteractionLog
from protofed.errors import ConfigError, DatasetNotFound, MissingExtra
from protofed.progress import Progress, silent

UTF8 = "utf-8"
ENCODINGS = (UTF8, "latin-1", "cp1252")  # a line of theirs ends in one byte


@runtime_checkable
class Load(Protocol):
    """Reads the official files, or the folder that holds them."""

    def __call__(self, path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog: ...


@dataclass(frozen=True, slots=True)
class Dataset:
    """One official data set; `loader` is imported when it is used, since raw files need polars and logs do not."""

    name: str
    paper_name: str
    family: str
    files: tuple[str, ...]
    page: str
    loader: str  # module:function below protofed.data.datasets


AMAZON_PAGES = (
    "https://jmcauley.ucsd.edu/data/amazon/ (2014), https://nijianmo.github.io/amazon/ (2018), "
    "https://amazon-reviews-2023.github.io/ (2023)"
)
OFFICIAL: tuple[Dataset, ...] = (
    Dataset(
        "amazon-books", "Amazon-Books", "amazon", ("ratings_Books.csv", "Books.csv"), AMAZON_PAGES, "amazon:load_books"
    ),
    Dataset(
        "amazon-electronics",
        "Amazon-Electronics",
        "amazon",
        ("ratings_Electronics.csv", "Electronics.csv"),
        AMAZON_PAGES,
        "amazon:load_electronics",
    ),
    Dataset(
        "movielens-20m",
        "MovieLens-20M",
        "movielens",
        ("ratings.csv", "rating.csv"),
        "https://grouplens.org/datasets/movielens/20m/",
        "movielens:load",
    ),
    Dataset(
        "yelp",
        "Yelp",
        "yelp",
        ("yelp_academic_dataset_review.json",),
        "https://business.yelp.com/data/resources/open-dataset/",
        "yelp:load",
    ),
    Dataset(
        "gowalla",
        "Gowalla",
        "gowalla",
        ("loc-gowalla_totalCheckins.txt",),
        "https://snap.stanford.edu/data/loc-gowalla.html",
        "gowalla:load",
    ),
    Dataset(
        "lastfm-1k",
        "LastFM-1K",
        "lastfm",
        ("userid-timestamp-artid-artname-traid-traname.tsv",),
        "http://ocelma.net/MusicRecommendationDataset/lastfm-1K.html",
        "lastfm:load",
    ),
    Dataset(
        "retailrocket",
        "RetailRocket",
        "retailrocket",
        ("events.csv",),
        "https://www.kaggle.com/datasets/retailrocket/ecommerce-dataset",
        "retailrocket:load",
    ),
    Dataset(
        "taobao", "Taobao", "taobao", ("UserBehavior.csv",), "https://tianchi.aliyun.com/dataset/649", "taobao:load"
    ),
    Dataset(
        "hm",
        "H&M",
        "hm",
        ("transactions_train.csv",),
        "https://www.kaggle.com/competitions/h-and-m-personalized-fashion-recommendations/data",
        "hm:load",
    ),
)
RECBOLE = Dataset(
    "recbole",
    "(any RecBole .inter file)",
    "recbole",
    ("*.inter",),
    "https://recbole.io/docs/user_guide/data/atomic_files.html",
    "recbole:load",
)
DATASETS: Mapping[str, Dataset] = {dataset.name: dataset for dataset in (*OFFICIAL, RECBOLE)}


def dataset(name: str) -> Dataset:
    """The data set of that name, or an error that suggests the nearest one."""
    if name in DATASETS:
        return DATASETS[name]
    raise DatasetNotFound(f"no official data set {name!r}{nearest(name, DATASETS)}; `protofed data list` shows all")


def nearest(name: str, known: Iterable[str]) -> str:
    """`(did you mean ...?)` with the nearest known name, or the known names where none is near."""
    names = sorted(known)
    alike = {known_name.lower().replace("_", "-"): known_name for known_name in names}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), alike, n=1, cutoff=0.5)
    if near:
        return f" (did you mean {alike[near[0]]!r}?)"
    return f" among {', '.join(names)}" if names else ""


def check_encoding(name: str) -> None:
    """Refuse an encoding that official files are not read in."""
    if name not in ENCODINGS:
        raise ConfigError(
            f"--encoding must be one of {', '.join(ENCODINGS)}, got {name!r}; convert the file by `iconv`"
        )


def loader(known: Dataset) -> Load:
    """The function that reads the official files."""
    module, function = known.loader.split(":")
    try:
        load: Load = getattr(importlib.import_module(f"protofed.data.datasets.{module}"), function)
    except ModuleNotFoundError as missing:
        raise MissingExtra(missing.name or "polars") from missing
    return load
