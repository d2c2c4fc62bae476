"""A model from its folder: the answers of the run it came from, in original ids, and one line where it is damaged."""

import copy
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from worlds import CPU, LENGTH, every_value, random_model, tiny_config, tiny_log, tiny_stream, warmed_up_on

import protofed
from protofed.backbone.content import with_nearest
from protofed.backbone.one_query import embed_history, last_state, lay_out, score_items
from protofed.client.memory import Memory
from protofed.client.model import VARIANTS
from protofed.client.state import from_bytes, select, to_bytes
from protofed.config import override
from protofed.data.interactions import from_columns
from protofed.errors import DataError, RunFolderError
from protofed.experiments.folder import RunFolder, load_checkpoint
from protofed.experiments.publish import Surroundings
from protofed.experiments.run import Experiment
from protofed.experiments.summary import summarise_run
from protofed.features.content import Content, modality
from protofed.federation.popularity import base_votes
from protofed.files import load_tensors, save_tensors
from protofed.inference import device as single
from protofed.inference.answer import make_ready, score_next
from protofed.inference.folder import DEVICES, ITEMS, MODEL
from protofed.inference.folder import _items as read_items
from protofed.inference.head import FittedHead, Head, with_head
from protofed.inference.online import online_inference
from protofed.methods.catalogue import method_named
from protofed.methods.protocol import World
from protofed.methods.protofed_sp import ProtoFedSP
from protofed.privacy.draws import SeededDraws
from protofed.server.accept import accept
from protofed.slices.histories import BOS
from protofed.snapshot import restore

RARE, STRANGE = "somebody rare", "somebody strange"


def everyone():
    """The tiny log, one more user who met two of its items and one that nobody else did, and one who met only that."""
    log = tiny_log()
    users = [*(log.user_ids[u].as_py() for u in log.users.tolist()), *[RARE] * 3, STRANGE]
    rare = [log.item_ids[3].as_py(), "nobody else's", log.item_ids[5].as_py()]
    items = [*(log.item_ids[i].as_py() for i in log.items.tolist()), *rare, "nobody else's"]
    times = [*log.times.tolist(), *(int(log.times[-1]) + n for n in (1, 2, 3, 4))]
    return from_columns("tiny", users, items, times)


@cache
def run_folder(seed=0):
    """A finished run of our method that was kept as a model."""
    out = Path(mkdtemp(prefix="recommender"))
    table = pa.table({"item": tiny_log().item_ids[:40], "title": [f"Title {n}" for n in range(40)]})
    around = Surroundings(everyone(), table)
    Experiment(tiny_config(seed, method="protofed-sp"), tiny_log(), out / "cache", CPU, keep=around).run(out / "run")
    return out / "run"


@cache
def model():
    return protofed.load(run_folder())


def user_with(condition):
    """The first user of the log whose device in the folder meets a condition."""
    devices = model().devices
    place = next(u for u in range(tiny_log().n_users) if condition(devices, u))
    return place, tiny_log().user_ids[place].as_py()


def items_of(log, user):
    return [log.item_ids[i].as_py() for i in log.items[log.users == user].tolist()]


def answer(device, n=10, **more):
    return [(row.item, row.score) for row in device.recommend(n, **more)]


def test_a_device_scores_what_the_benchmark_scored_for_its_users_queries():
    data, config = tiny_stream(), tiny_config(method="protofed-sp")
    _, snapshot = load_checkpoint(RunFolder(run_folder()))
    world = World(config, data.slice_(0), warmed_up_on(config, data)[0])
    asked = data.query_set(2, "test")
    queries = data.queries(asked, np.arange(len(asked)), LENGTH)
    expected = ProtoFedSP().score(world, restore(snapshot), queries)
    met = restore(snapshot).devices.met
    checked = 0
    for row in range(0, len(queries), 5):
        user, past = int(queries.users[row]), int(queries.offsets.diff()[row])
        state = model().device(tiny_log().user_ids[user].as_py()).state
        if user >= len(met) or not met[user]:
            continue  # the device has met its history since
        memory = Memory(torch.tensor([0, past]), state.memory.items[:past], state.memory.times[:past])
        scores = model().score(replace(state, memory=memory))[: asked.n_items]
        torch.testing.assert_close(scores, expected[row], atol=1e-4, rtol=1e-4)
        checked += 1
    assert checked > 10


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize(("use_prompt", "use_rows"), VARIANTS)
def test_one_device_is_answered_as_in_a_stack(use_prompt, use_rows, met):
    """Who was not met does what base users advise: that advice is made to name each variant in turn."""
    prior = torch.tensor([0.0 if variant == (use_prompt, use_rows) else 1.0 for variant in VARIANTS])
    shared = replace(model().model, prior=prior)
    ready = make_ready(shared)
    for place in range(0, len(model().devices), 9):
        state = select(model().devices, torch.tensor([place]))
        flags = {"use_prompt": use_prompt, "use_rows": use_rows, "met": met}
        state = replace(state, **{name: torch.tensor([value]) for name, value in flags.items()})
        expected = online_inference(shared, state, single.as_query(shared, state))[0]
        torch.testing.assert_close(score_next(ready, state), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_items", [7, 9])
@pytest.mark.parametrize("prompt_length", [0, 3])
@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 11])
def test_the_flat_backbone_computes_what_the_backbone_computes(n, prompt_length, n_items):
    backbone = random_model(7, history_length=6)
    backbone.has_row[2] = False
    rng = torch.Generator().manual_seed(n)
    items = torch.randint(0, n_items, (n,), generator=rng)
    prompt = torch.randn(1, prompt_length, 8, generator=rng) if prompt_length else None
    tokens = torch.cat([torch.tensor([BOS]), items])[None, -6:]
    with torch.no_grad():
        expected = backbone.last_hidden(tokens, prompt)
    flat = lay_out(backbone, n_items, 3)
    history = embed_history(flat, items, items[:0], torch.zeros(0, 8))
    hidden = last_state(flat, history, None if prompt is None else prompt[0])
    torch.testing.assert_close(hidden, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(score_items(flat, hidden), backbone.scores(expected, n_items)[0], atol=1e-5, rtol=1e-5)


def test_a_model_that_was_saved_and_loaded_answers_alike_and_needs_nobody(tmp_path):
    user = tiny_log().user_ids[0].as_py()
    again = protofed.load(protofed.save(model(), tmp_path / "copy"))
    assert answer(again.device(user)) == answer(model().device(user))
    assert every_value(again.devices).keys() == every_value(model().devices).keys()
    assert (again.settings, again.card, again.ledger, again.trust) == (
        model().settings, model().card, model().ledger, model().trust,
    )  # fmt: skip
    bare = protofed.load(protofed.save(model(), tmp_path / "bare", devices=False))
    assert len(bare.devices) == len(bare.bystanders.users) == len(bare.bystanders.memory.items) == 0
    assert RARE not in (tmp_path / "bare" / "README.md").read_text()
    with pytest.raises(DataError, match="no device of a user 'user-1' among the 0 of synthetic"):
        bare.device("user-1")
    history = items_of(tiny_log(), 3)[:6]
    one, other = (each.device("a", history=history, draws=SeededDraws(1)) for each in (model(), bare))
    assert answer(one) == answer(other)


def test_every_device_remembers_its_users_whole_history():
    log = tiny_log()
    for user in range(log.n_users):
        state = model().device(log.user_ids[user].as_py()).state
        assert [model().catalogue.item(i) for i in state.memory.items.tolist()] == items_of(log, user)
        assert state.memory.times.tolist() == log.times[log.users == user].tolist()


def test_a_user_that_training_left_out_is_served_from_the_history_at_once():
    device = model().device(RARE)
    assert [model().catalogue.item(i) for i in device.state.memory.items.tolist()] == [
        tiny_log().item_ids[3].as_py(), tiny_log().item_ids[5].as_py(),
    ]  # fmt: skip
    assert bool(device.state.met)
    assert not bool(device.state.contributes)
    assert device.upload() is None
    device.learn()  # nothing is new
    assert device.upload() is None
    assert answer(device) != answer(model().device(history=[]))


def test_a_user_of_the_log_who_met_no_item_of_the_model_is_served_like_anybody_without_a_history():
    device = model().device(STRANGE)
    assert not len(device.state.memory.items)
    assert answer(device) == answer(model().device(history=[]))


def test_a_device_of_nobody_is_refused():
    with pytest.raises(DataError, match=r"^a device is somebody's: name a user of the log, or give a history"):
        model().device()


def test_candidates_and_seen_items_only_take_items_away():
    user = tiny_log().user_ids[2].as_py()
    device, catalogue = model().device(user), model().catalogue
    everything = answer(device, len(catalogue))
    assert len(everything) == len(catalogue) == tiny_log().n_items
    scores = [score for _, score in everything]
    assert scores == sorted(scores, reverse=True)
    among = [catalogue.item(i) for i in (9, 2, 30, 11)]
    assert [item for item, _ in answer(device, 3, candidates=among)] == [i for i, _ in everything if i in among][:3]
    seen = set(items_of(tiny_log(), 2))
    assert [item for item, _ in answer(device, 20, exclude_seen=True)] == [
        item for item, _ in everything if item not in seen
    ][:20]
    with pytest.raises(DataError, match=r"item 'nothing' is not among the \d+ items of this model \(1 of 2 are not\)"):
        device.recommend(candidates=[among[0], "nothing"])
    with pytest.raises(DataError, match="n must be at least 1, got 0"):
        device.recommend(0)


def test_titles_come_from_the_item_table():
    rows = {row.item: row.title for row in model().device(history=[]).recommend(tiny_log().n_items)}
    known = tiny_log().item_ids.to_pylist()
    assert [rows[item] for item in known[:41]] == [*(f"Title {n}" for n in range(40)), None]


def test_reasons_say_how_often_an_item_was_met_and_what_the_backbone_alone_thinks():
    place, user = user_with(lambda devices, u: bool(devices.use_prompt[u]) and bool(devices.met[u]))
    device, shared = model().device(user), model().model
    rows = device.recommend(8, why=True)
    history = items_of(tiny_log(), place)
    times = tiny_log().times[tiny_log().users == place].tolist()
    with torch.no_grad():
        tokens = torch.tensor([[BOS, *device.state.memory.items.tolist()][-LENGTH:]])
        alone = shared.backbone.scores(shared.backbone.last_hidden(tokens), shared.n_items)[0]
    for row in rows:
        number = model().catalogue.number(row.item)
        assert row.why.times_met == history.count(row.item)
        assert row.why.last_met == max((t for t, i in zip(times, history, strict=True) if i == row.item), default=None)
        assert row.why.public_rank == 1 + sum(float(x) > float(alone[number]) for x in alone)
        assert sum(each.weight for each in row.why.prototypes) == pytest.approx(1.0, abs=1e-5)
        assert len(row.why.prototypes) == min(shared.rule.top_m, len(shared.v))
        assert all(len(each.items) == 3 for each in row.why.prototypes)
    _, user = user_with(lambda devices, u: not bool(devices.use_prompt[u]))
    assert model().device(user).recommend(1, why=True)[0].why.prototypes == ()


def test_an_item_that_content_alone_describes_is_said_to_be_like_the_known_items_beside_it():
    shared, untaught = model().model, 7
    backbone = copy.deepcopy(shared.backbone)
    backbone.has_row[untaught] = False
    degrees = torch.stack([torch.arange(shared.n_items) / 10.0, torch.zeros(shared.n_items)], dim=1).double()
    degrees[untaught] = degrees[3] + 1e-4
    present = torch.ones(shared.n_items, dtype=torch.bool)
    backbone = with_nearest(backbone, Content((modality("place", degrees, present),)), 1)
    told = replace(model(), model=replace(shared, backbone=backbone))
    assert told.like(untaught)[0] == told.catalogue.item(3)
    assert told.like(3) == ()  # events taught it
    assert model().like(untaught) == ()  # nothing is known of it but events
    device = told.device(history=[told.catalogue.item(1)])
    (row,) = device.recommend(1, candidates=[told.catalogue.item(untaught)], why=True)
    assert row.why.like == told.like(untaught)


def test_feedback_learning_and_uploads_are_those_of_the_line():
    _, user = user_with(lambda devices, u: bool(devices.met[u]) and not bool(devices.contributes[u]))
    device = model().device(user, draws=SeededDraws(4))
    before = device.state
    assert device.upload() is None
    item = model().catalogue.item(5)
    device.feedback(item, 2_000_000_000)
    expected = single.feedback(model().model, before, 5, 2_000_000_000, SeededDraws(4))
    assert all(torch.equal(v, every_value(expected)[k]) for k, v in every_value(device.state).items())
    assert device.upload() is None  # observed, not learned from
    device.learn()
    upload = device.upload()
    assert upload is not None
    accepted = accept([upload], model().rule, round_=model().next_round, version=model().model.version)
    assert accepted.n == 1
    assert accepted.refused == {}
    assert upload.round_ == model().next_round
    with pytest.raises(DataError, match="comes in time order"):
        device.feedback(item, 5)
    with pytest.raises(DataError, match="item 'zzz' is not among"):
        device.feedback("zzz")


def test_learning_takes_only_what_came_since():
    _, user = user_with(lambda devices, u: bool(devices.contributes[u]))
    device = model().device(user, draws=SeededDraws(4))
    known = len(device.state.memory.items)
    before = device.state
    device.learn()
    assert device.state is before
    for n, item in enumerate((5, 6, 5)):
        device.feedback(model().catalogue.item(item), 2_000_000_000 + n)
    after = single.learn(model().model, device.state, known, SeededDraws(4), model().next_slice)
    device.learn()
    assert all(torch.equal(v, every_value(after)[k]) for k, v in every_value(device.state).items())


def test_a_history_may_hold_unknown_items_and_must_not_run_backwards():
    known = tiny_log().item_ids.to_pylist()
    device = model().device(history=[known[1], "??", known[2], "!"])
    assert device.unknown == ("??", "!")
    assert [model().catalogue.item(i) for i in device.state.memory.items.tolist()] == known[1:3]
    device = model().device(history=[known[1], "??", known[2]], times=[10, 20, 30])
    assert device.state.memory.times.tolist() == [10, 30]
    with pytest.raises(DataError, match="times must be as many as the history's 2 items and never fall"):
        model().device(history=known[:2], times=[3, 2])
    assert answer(model().device(history=["??"])) == answer(model().device(history=[]))


def damaged(tmp_path, change):
    shutil.copytree(run_folder(), tmp_path / "run")
    change(tmp_path / "run")
    with pytest.raises(RunFolderError) as told:
        protofed.load(tmp_path / "run")
    assert len(str(told.value).splitlines()) == 1
    return str(told.value)


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def flip(name):
    def change(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(bytes(content))

    return change


def rewrite(name, tensors=lambda tensors: tensors, **notes):
    def change(folder):
        whole, found = load_tensors(folder / name)
        save_tensors(folder / name, tensors(whole), found | notes)

    return change


def another_run(folder):
    shutil.copy(run_folder(1) / DEVICES, folder / DEVICES)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cut(MODEL), "model.safetensors cannot be read"),
        (flip(MODEL), "model.safetensors cannot be read"),
        (flip(DEVICES), "devices.safetensors cannot be read (its checksum does not match)"),
        (rewrite(MODEL, format="protofed-model-0"), "is of format 'protofed-model-0', this version reads"),
        (rewrite(MODEL, lambda found: dict(list(found.items())[1:])), "is of another version of ProtoFed"),
        (rewrite(MODEL, outline='["dataclass", "os:system", {}]'), "is of another version of ProtoFed"),
        (rewrite(MODEL, outline='["mapping", {}]'), "holds no model"),
        (another_run, "belongs to model"),
        (cut(ITEMS), "items.parquet cannot be read"),
        (lambda f: (f / ITEMS).unlink(), "items.parquet cannot be read (there is no such file); delete the folder"),
        (lambda f: pq.write_table(pa.table({"item": ["a"]}), f / ITEMS), "found 1 rows"),
        (lambda f: (f / "ledger.json").write_text("{}"), "ledger.json is not a ledger"),
        (lambda f: (f / "config.toml").write_bytes(b"\xff"), "config.toml cannot be read"),
        (lambda f: (f / MODEL).unlink(), "model.safetensors is missing"),
        (lambda f: [(f / name).unlink() for name in (MODEL, DEVICES)], "its run kept none"),
        (lambda f: [(f / name).unlink() for name in (MODEL, "metrics.parquet")], "its run is not finished"),
        (lambda f: [(f / name).unlink() for name in (MODEL, "config.toml")], "it is no run's folder"),
        (lambda f: shutil.rmtree(f), "there is no such folder"),
        (lambda f: (shutil.rmtree(f), f.write_text("x")), "it is a file, a model is a folder"),
    ],
)
def test_a_folder_that_holds_no_whole_model_is_one_line_with_a_way_out(tmp_path, change, told):
    line = damaged(tmp_path, change)
    assert told in line
    assert "protofed run" in line


def test_no_flipped_bit_of_an_item_table_names_another_item(tmp_path):
    protofed.save(model(), tmp_path / "copy", devices=False)
    file = tmp_path / "copy" / ITEMS
    whole, names, refused = file.read_bytes(), model().catalogue.table["item"], 0
    for seed in range(200):
        draws = random.Random(seed)
        damaged = bytearray(whole)
        damaged[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
        file.write_bytes(damaged)
        try:
            assert read_items(file, len(names))["item"].equals(names), seed
        except RunFolderError:
            refused += 1
    assert refused > 100


def test_the_card_says_what_it_is_what_leaves_a_device_and_where_it_ends():
    card = (run_folder() / "README.md").read_text()
    assert card.startswith("# protofed-sp on synthetic\n")
    assert "joint user-level differential privacy" in card
    assert f"{len(tiny_log()):,} events of {tiny_log().n_users:,} users with {tiny_log().n_items:,} items" in card
    assert "2 more users have too few events to learn from" in card
    summary = summarise_run(RunFolder(run_folder()))
    first = summary["headline"][0]
    assert f"| sampled | all | {first['ndcg@10']:.4f} | {first['hr@10']:.4f} | {first['queries']:,} |" in card
    assert "Events of the base block, the first 50 %, were collected centrally; no ε covers them." in card
    for word in ("ε = ", "δ = 1e-5", "add or remove one user", "per user", "central trust"):
        assert word in card


def test_where_nothing_is_shared_no_device_makes_an_upload(tmp_path):
    config = tiny_config(method="protofed", protofed__mode="nothing", scoring__head=True)
    Experiment(config, tiny_log(), tmp_path / "cache", CPU, keep=Surroundings()).run(tmp_path / "run")
    loaded = protofed.load(tmp_path / "run")
    assert bool(loaded.devices.contributes.any())
    users = [tiny_log().user_ids[u].as_py() for u in loaded.devices.contributes.nonzero()[:, 0].tolist()]
    assert [loaded.device(user).upload() for user in users] == [None] * len(users)
    device = loaded.device(users[0])
    device.feedback(loaded.catalogue.item(5))
    device.learn()
    assert device.upload() is None


def test_a_finished_run_keeps_its_model_as_it_is(tmp_path):
    shutil.copytree(run_folder(), tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    (tmp_path / "run" / "README.md").unlink()  # killed between the metrics and the card
    around = Surroundings(everyone(), None)
    config = tiny_config(method="protofed-sp")
    Experiment(config, tiny_log(), tmp_path / "cache", CPU, keep=around).run(tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_bench_keeps_no_model(tmp_path):
    config = tiny_config(method="frozen", training__base_epochs=1)
    Experiment(config, tiny_log(), tmp_path / "cache", CPU).run(tmp_path / "run")
    assert not (tmp_path / "run" / MODEL).exists()


@pytest.mark.parametrize("name", ["frozen", "prompt-tuning"])
def test_a_method_that_is_a_backbone_alone_recommends_as_it_ranked(tmp_path, name):
    entry, data = method_named(name), tiny_stream()
    config = override(tiny_config(method=name), {"training.base_epochs": 1, **entry.settings})
    Experiment(config, tiny_log(), tmp_path / "cache", CPU, keep=Surroundings()).run(tmp_path / "run")
    loaded = protofed.load(tmp_path / "run")
    state = restore(load_checkpoint(RunFolder(tmp_path / "run"))[1])
    asked = data.query_set(2, "test")
    queries = data.queries(asked, np.arange(len(asked)), LENGTH)
    expected = entry.method.score(World(config, data.slice_(0), state.backbone), state, queries)
    for row in range(0, len(queries), 40):
        user, past = int(queries.users[row]), int(queries.offsets.diff()[row])
        device = loaded.device(tiny_log().user_ids[user].as_py())
        memory = device.state.memory
        shorter = replace(
            device.state, memory=Memory(torch.tensor([0, past]), memory.items[:past], memory.times[:past])
        )
        torch.testing.assert_close(loaded.score(shorter)[: asked.n_items], expected[row], atol=1e-4, rtol=1e-4)
    device.feedback(loaded.catalogue.item(3))
    device.learn()
    assert device.upload() is None  # there is no rule by which anything would leave


def under_a_head():
    """The model with a head of drawn weights, which reads the own past and the base block's counts."""
    head = Head()
    for parameter in head.parameters():
        parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    return replace(model(), head=FittedHead(head.requires_grad_(False), base_votes(tiny_stream().slice_(0))))


def test_under_a_head_a_device_keeps_up_with_its_past_and_answers_as_if_it_read_all_of_it():
    loaded = under_a_head()
    _, user = user_with(lambda devices, u: bool(devices.met[u]))
    device = loaded.device(user)
    newest = int(device.state.memory.times[-1])
    for number, item in enumerate((3, 8, 3, 5)):
        device.feedback(loaded.catalogue.item(item), newest + 3_600 * (number + 1))
    assert device.past.n_events == len(device.state.memory.items)
    query = single.as_query(loaded.model, device.state)
    plain = online_inference(loaded.model, device.state, query)
    expected = with_head(loaded.head, plain, query)[0]
    torch.testing.assert_close(loaded.score(device.state, device.laid_out), expected, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(expected, plain[0], atol=0.1)
    later = newest + 90 * 24 * 3_600  # asked later, the past is older
    at_last, then = ({r.item: r.score for r in device.recommend(40, time=t)} for t in (None, later))
    assert any(abs(at_last[item] - then[item]) > 1e-3 for item in at_last.keys() & then.keys())
    back = from_bytes(to_bytes(device.state, loaded.model), loaded.model)
    again = protofed.Device(loaded, back, device.draws, learned=0)
    assert again.recommend(40) == device.recommend(40)


@pytest.mark.parametrize("name", ["personal-memory", "popularity"])
def test_what_no_device_could_answer_is_not_kept(tmp_path, name):
    entry = method_named(name)
    config = override(tiny_config(method=name), {"training.base_epochs": 1, **entry.settings})
    Experiment(config, tiny_log(), tmp_path / "cache", CPU, keep=Surroundings()).run(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"its run kept none .* or ranked by what no device holds"):
        protofed.load(tmp_path / "run")
