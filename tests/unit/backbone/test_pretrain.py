"""The warm-up's cache: never a stale answer, never a half-read one, always the same bits."""

from dataclasses import replace

import pytest
import torch
from worlds import CPU, questions, shuffled_after, tiny_config, tiny_log, tiny_stream

from protofed.backbone import pretrain
from protofed.backbone.pretrain import cached_warm_up, content_key, load_backbone, warm_up
from protofed.errors import RunFolderError
from protofed.slices.stream import SliceStream

CONFIG = tiny_config(training__base_epochs=1)


def warm(cache):
    return cached_warm_up(CONFIG, tiny_stream(), cache, device=CPU)


def same_bits(one, other) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def refuse(*args, **options):
    raise AssertionError("trained although the cache had it")


def test_the_cache_gives_back_the_same_bits_without_training(tmp_path, monkeypatch):
    model, fit = warm(tmp_path / "cache")
    monkeypatch.setattr(pretrain, "warm_up", refuse)
    again, fit_again = warm(tmp_path / "cache")
    assert same_bits(model, again)
    assert fit == fit_again
    assert not again.training
    _, queries = questions()
    assert torch.equal(again.last_hidden(queries.tokens), model.last_hidden(queries.tokens))
    assert len(list((tmp_path / "cache").glob("warm-up-*"))) == 1


def test_the_warm_up_does_not_depend_on_the_global_generator():
    base = tiny_stream().slice_(0)
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        one, _ = warm_up(CONFIG, base, device=CPU)
        torch.manual_seed(2)
        again, _ = warm_up(CONFIG, base, device=CPU)
    assert same_bits(one, again)


@pytest.mark.parametrize("kept", [0, 4, 60, 0.5, 0.99])
def test_a_truncated_file_is_trained_again_and_replaced(tmp_path, kept):
    model, fit = warm(tmp_path)
    (path,) = tmp_path.glob("warm-up-*")
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_backbone(path, CONFIG, CPU)
    again, fit_again = warm(tmp_path)
    assert same_bits(model, again)
    assert fit == fit_again
    assert path.read_bytes() == whole


def test_a_file_of_another_shape_is_refused_by_name(tmp_path):
    warm(tmp_path)
    (path,) = tmp_path.glob("warm-up-*")
    wider = replace(CONFIG, backbone=replace(CONFIG.backbone, width=8))
    with pytest.raises(RunFolderError, match=path.name):
        load_backbone(path, wider, CPU)


def key(config=CONFIG, data=None) -> str:
    return content_key(config, data or tiny_stream(), CPU)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 1),
        ("backbone.width", 32),
        ("backbone.layers", 2),
        ("backbone.heads", 4),
        ("backbone.ffn_width", 3),
        ("backbone.history_length", 13),
        ("backbone.dropout", 0.15),
        ("backbone.prompt_length", 3),
        ("training.loss", "bce"),
        ("training.negatives", 33),
        ("training.learning_rate", 2e-3),
        ("training.weight_decay", 0.0),
        ("training.max_grad_norm", 2.0),
        ("training.batch_size", 65),
        ("training.stride", 5),
        ("training.base_epochs", 9),
        ("training.patience", 4),
        ("training.patience_steps", 300),
        ("training.prompt_rate", 0.0),
    ],
)
def test_the_key_changes_with_whatever_shapes_the_weights(field, value):
    assert key(pretrain_override(field, value)) != key()


def pretrain_override(field: str, value: object):
    return tiny_config(**({"training__base_epochs": 1} | {field.replace(".", "__"): value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("training.slice_learning_rate", 0.5),
        ("training.slice_epochs", 77),
        ("method", "finetune-last"),
        ("scoring.personal_memory", 2.0),
        ("scoring.popularity_prior", 0.5),
    ],
)
def test_the_key_does_not_change_with_what_acts_after_the_warm_up(field, value):
    assert key(pretrain_override(field, value)) == key()


@pytest.mark.parametrize(
    ("field", "value"), [("n_negatives", 48), ("row_order_history", True), ("base_fraction", 0.4), ("base", "slice-1")]
)
def test_the_key_changes_with_how_the_base_block_is_cut_and_asked(field, value):
    stream_config = replace(CONFIG.stream, **{field: value})
    assert key(data=SliceStream(tiny_log(), stream_config)) != key()


@pytest.mark.parametrize("column", ["users", "items", "times"])
@pytest.mark.parametrize("part", ["train", "val"])
def test_the_key_changes_with_any_event_of_the_base_block_that_is_used(column, part):
    position = tiny_stream().bounds[0].part(part)[1] - 1
    values = getattr(tiny_log(), column).clone()
    values[position] = values[position] - 1 if column == "times" else (values[position] + 1) % 50
    data = SliceStream(replace(tiny_log(), **{column: values}), CONFIG.stream)
    assert data.bounds[0] == tiny_stream().bounds[0]
    assert key(data=data) != key()


def test_the_key_changes_with_where_the_train_part_ends():
    data = SliceStream(tiny_log(), CONFIG.stream)
    data.bounds = (replace(data.bounds[0], train_end=data.bounds[0].train_end - 9), *data.bounds[1:])
    data._query_sets[0, "val"] = tiny_stream().query_set(0, "val")  # the same questions about the same events
    assert key(data=data) != key()


def test_neither_key_nor_weights_change_with_later_events():
    log, bounds = tiny_log(), tiny_stream().bounds[0]
    later = SliceStream(shuffled_after(log, bounds.val_end, newcomers=30), CONFIG.stream)
    assert not torch.equal(later.log.items, log.items)
    assert key(data=later) == key()
    assert same_bits(
        warm_up(CONFIG, later.slice_(0), device=CPU)[0], warm_up(CONFIG, tiny_stream().slice_(0), device=CPU)[0]
    )
