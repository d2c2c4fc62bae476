"""RecICL with a language model: prompts by hand, cached scores equal uncached ones, errors in one line.

The models here are tiny and randomly initialised, with tokenizers built in the test: they know nothing, and what they
rank first means nothing. What is tested is that the right logits are read.
"""

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protofed.errors import ConfigError, DataError, MissingExtra
from protofed.methods.baselines.recicl_llm import (
    ANSWERS,
    LanguageModel,
    Shape,
    answer_scores,
    common_length,
    demonstration_texts,
    load_language_model,
    questions,
    rank_candidates,
    read_titles,
    tokens_of,
)

TITLES = {"a": "Alien", "b": "Brazil", "c": "Cube", "d": "Dune", "e": "Eraserhead", "f": "Fargo"}
WORDS = ["Liked", "before", "Will", "they", "like", "this", "next", "Answer", "nothing", "yet", "Yes", "No"]


def tiny_tokenizer(*, spelled: bool = False) -> Any:
    """Words by their spaces, or (`spelled`) bytes, where answers are several tokens long."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    if spelled:
        vocabulary = {symbol: n for n, symbol in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
        vocabulary |= {"<s>": len(vocabulary)}
        raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = tokenizers.decoders.ByteLevel()
    else:
        names = ["<s>", "<unk>", *WORDS, *TITLES.values(), ":", ";"]
        raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(names)}, unk_token="<unk>"))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def tiny_model(n_tokens: int, positions: int = 2_048) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=n_tokens, n_positions=positions, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        for name, parameter in model.named_parameters():  # the library starts so flat that mistakes would not show
            if parameter.dim() == 2 and "wpe" not in name:
                torch.nn.init.normal_(parameter, std=0.7)
    return model.eval().requires_grad_(False)


@cache
def tiny(*, spelled: bool = False) -> LanguageModel:
    tokenizer = tiny_tokenizer(spelled=spelled)
    return LanguageModel(tiny_model(len(tokenizer)), tokenizer, Path("tiny"))


def saved(folder: Path) -> Path:
    tiny().model.save_pretrained(folder)
    tiny().tokenizer.save_pretrained(folder)
    return folder


def test_the_demonstrations_by_hand_are_the_newest_events_oldest_first_each_with_one_that_was_not_met():
    titles = {key: TITLES[key] for key in "abcd"}
    assert demonstration_texts(titles, ["a", "b"], ["c"], Shape(demonstrations=2)) == [
        "Liked before: nothing yet\nWill they like this next: Alien\nAnswer: Yes\n\n",
        "Liked before: nothing yet\nWill they like this next: Dune\nAnswer: No\n\n",
        "Liked before: Alien\nWill they like this next: Brazil\nAnswer: Yes\n\n",
        "Liked before: Alien\nWill they like this next: Dune\nAnswer: No\n\n",
    ]


def test_only_the_newest_events_are_shown_and_only_the_newest_titles_are_named():
    texts = demonstration_texts(TITLES, list("abcd"), ["e", "f"], Shape(demonstrations=1, span=2))
    assert texts == ["Liked before: Brazil; Cube\nWill they like this next: Dune\nAnswer: Yes\n\n"]


def test_a_user_without_history_is_asked_about_the_candidate_alone():
    assert questions(TITLES, [], ["c"], Shape()) == [
        "Liked before: nothing yet\nWill they like this next: Cube\nAnswer:"
    ]


def test_no_candidate_is_named_before_its_own_question():
    for text, item in zip(questions(TITLES, list("abc"), list("de"), Shape()), "de", strict=True):
        assert text.endswith(f"Liked before: Alien; Brazil; Cube\nWill they like this next: {TITLES[item]}\nAnswer:")
        assert text.count(TITLES["d"]) + text.count(TITLES["e"]) == 1


def test_what_was_not_met_is_drawn_by_the_seed_and_the_history_alone():
    def drawn(seed: int) -> list[str]:
        many = TITLES | {f"x{n}": f"Title {n}" for n in range(1_000)}
        return demonstration_texts(many, list("abcd"), ["e"], Shape(seed=seed))

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_the_common_start_of_token_lists_by_hand():
    assert common_length([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert common_length([[1, 2], [1, 2, 3]]) == 2
    assert common_length([[7], [8]]) == 0
    assert common_length([[1, 2, 9], [1, 2, 3], [1, 0]]) == 1


@pytest.mark.slow
def test_answers_of_several_tokens_are_told_apart_at_the_first_that_differs():
    """In bytes " Yes" and " No" share their space: the question then ends with it, and Y is held against N."""
    language = tiny(spelled=True)
    asked = tokens_of(language, "Answer:")
    assert language.tokenizer.decode(asked.context) == "Answer: "
    assert language.tokenizer.decode([asked.yes]) == "Y"
    assert language.tokenizer.decode([asked.no]) == "N"


def by_hand(language: LanguageModel, text: str) -> float:
    """The whole text through the model, alone and without a cache."""
    yes, no = (language.tokenizer(text + answer)["input_ids"] for answer in ANSWERS)
    place = next(n for n, (a, b) in enumerate(zip(yes, no, strict=False)) if a != b)
    logits = language.model(input_ids=torch.tensor([yes[:place]])).logits[0, -1]
    return float(logits[yes[place]] - logits[no[place]])


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 32])
def test_shared_keys_and_values_change_no_score(spelled, batch):
    language = tiny(spelled=spelled)
    texts = questions(TITLES, list("ab"), list("cdef"), Shape(demonstrations=2))
    expected = torch.tensor([by_hand(language, text) for text in texts])
    assert expected.std() > 1e-2
    assert torch.allclose(answer_scores(language, texts, batch=batch), expected, atol=1e-4)


def test_texts_that_share_nothing_or_everything_are_scored_too():
    language = tiny()
    for texts in (["Alien Answer:", "Brazil like Answer:"], ["Cube Answer:"] * 3, ["Dune Answer:"]):
        expected = torch.tensor([by_hand(language, text) for text in texts])
        assert torch.allclose(answer_scores(language, texts), expected, atol=1e-4)
    assert len(answer_scores(language, [])) == 0


def test_candidates_come_back_best_first_with_the_scores_of_their_questions():
    history, candidates = ["a", "b"], ["c", "d", "e"]
    ranking = rank_candidates(tiny(), TITLES, history, candidates)
    scores = dict(
        zip(candidates, map(float, answer_scores(tiny(), questions(TITLES, history, candidates, Shape()))), strict=True)
    )
    assert [score for _, score in ranking] == sorted(scores.values(), reverse=True)
    assert dict(ranking) == scores


def test_a_model_folder_gives_the_scores_of_the_model_that_was_saved_there(tmp_path):
    pytest.importorskip("transformers")
    folder = saved(tmp_path)
    assert rank_candidates(folder, TITLES, ["a"], ["b", "c"]) == rank_candidates(tiny(), TITLES, ["a"], ["b", "c"])


def test_a_question_longer_than_the_model_reads_is_an_error_with_both_numbers():
    language = tiny()
    short = LanguageModel(tiny_model(len(language.tokenizer), positions=16), language.tokenizer, Path("short"))
    with pytest.raises(ConfigError, match=r"a question takes \d+ tokens and the model in short reads 16; show fewer"):
        rank_candidates(short, TITLES, ["a", "b"], ["c"])


def test_a_tokenizer_that_reads_yes_and_no_alike_is_an_error():
    class Deaf:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, 2, 3]}

    with pytest.raises(ConfigError, match="the tokenizer in deaf cannot tell ' Yes' from ' No'"):
        tokens_of(LanguageModel(SimpleNamespace(), Deaf(), Path("deaf")), "Answer:")


def test_an_item_without_a_title_and_a_data_set_without_titles_are_errors():
    with pytest.raises(DataError, match="item 'z' has no title; add it"):
        questions(TITLES, ["a"], ["z"], Shape())
    with pytest.raises(DataError, match="item 'b' has no title"):
        questions(TITLES | {"b": ""}, ["b"], ["a"], Shape())
    with pytest.raises(DataError, match="there are no item titles"):
        questions({}, [], ["a"], Shape())


def test_a_folder_that_holds_no_causal_model_is_an_error(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"is no model folder: it has no config.json"):
        load_language_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ConfigError, match="must hold a causal language model, got the architecture BertForMaskedLM"):
        load_language_model(tmp_path)
    (tmp_path / "config.json").write_text("[not json")
    with pytest.raises(ConfigError, match="is not the JSON of a model"):
        load_language_model(tmp_path)


def test_a_model_without_a_tokenizer_or_weights_is_an_error(tmp_path):
    pytest.importorskip("transformers")
    tiny().model.save_pretrained(tmp_path / "mute")
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(tokenizer.json, .*; save it there"):
        load_language_model(tmp_path / "mute")
    folder = saved(tmp_path / "empty")
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be read"):
        load_language_model(folder)
    (folder / "tokenizer.json").write_text(whole)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"the model in .* cannot be read"):
        load_language_model(folder)


def test_without_transformers_the_extra_to_install_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"transformers is not installed; run `pip install transformers`, or"):
        load_language_model(tmp_path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_titles_are_read_from_csv_and_parquet_with_ids_as_text(kind, tmp_path):
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = tmp_path / f"titles.{kind}"
    table = pa.table({"item": pa.array(["007", "12"]), "title": ["Dr. No", None], "year": [1962, 1963]})
    pyarrow.csv.write_csv(table, path) if kind == "csv" else pyarrow.parquet.write_table(table, path)
    assert read_titles(path) == {"007": "Dr. No"}


def test_titles_that_cannot_be_read_are_errors_in_one_line(tmp_path):
    with pytest.raises(DataError, match="no titles at"):
        read_titles(tmp_path / "none.csv")
    (tmp_path / "wrong.csv").write_text("item,name\n1,Alien\n")
    with pytest.raises(DataError, match="has no column 'title', only item, name"):
        read_titles(tmp_path / "wrong.csv")
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"cannot be read \(.*; a CSV or parquet file is needed") as caught:
        read_titles(tmp_path / "broken.parquet")
    assert "\n" not in str(caught.value)
