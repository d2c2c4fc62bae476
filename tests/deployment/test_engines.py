"""The same numbers wherever the rounds are carried: the simulator, the apps in one process, Flower's own engine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from federations import DESCEND, METHOD, apart, assert_same, base_block, federated, simulated
from worlds import LENGTH, tiny_stream

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

from protofed.client.codec import CodecTraining
from protofed.deployment.deal import SERVER, collect, host_folders
from protofed.deployment.events import own_events, slice_of
from protofed.deployment.flower.engines import (
    Federated,
    check_federated,
    deal_world,
    run_by_processes,
    run_in_simulation,
    run_locally,
)
from protofed.deployment.flower.processes import MARK
from protofed.deployment.host import STORE, obey, read_host
from protofed.deployment.orders import Order, cuts_of
from protofed.deployment.server import read_server
from protofed.errors import ConfigError, DataError
from protofed.experiments.evaluate import answer, metric_rows
from protofed.federation import preparation
from protofed.federation.plan import Stream
from protofed.inference.folder import load
from protofed.inference.head import FittedHead, Head
from protofed.methods.headed import counts_at, under_head
from protofed.methods.protofed import ProtoFed
from protofed.privacy.ledger import Release, read_ledger

OTHERS = {
    "everybody, in small stacks": {
        **{"privacy__sampling_rate": 1.0, "privacy__rounds_per_slice": 1, "protofed__chunk": 20},
        "protofed__newcomers": "mean-row",
    },
    "local trust": {"privacy__trust": "local", "protofed__newcomers": "auto"},
    "protofed, nothing shared": {"method": "protofed", "protofed__mode": "nothing", "protofed__newcomers": "auto"},
    "protofed, private": {"method": "protofed", "protofed__mode": "private"},
}

# Ray leaves files and processes of its own to the collector, in the test that starts it or in the next one.
WHAT_RAY_LEAVES = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Two slices on three hosts: the folder, and the state that came of it."""
    folder = tmp_path_factory.mktemp("federation") / "fed"
    return folder, federated(*base_block(), 2, folder, run_locally)


def test_the_apps_on_a_grid_in_this_process_end_where_the_simulator_ends(federation):
    world, start = base_block()
    ours = simulated(world, start, 2)
    assert_same(ours, federation[1])
    assert ours.rounds == 8
    assert ours.newcomer_noise > 0


@pytest.mark.parametrize("name", OTHERS)
def test_so_they_do_with_other_settings(name, tmp_path):
    world, start = base_block(**OTHERS[name])
    assert_same(simulated(world, start, 1), federated(world, start, 1, tmp_path / "fed", run_locally, hosts=2))


def metrics(world, state):
    """All metrics of slice 2 that a run would write."""
    data, rows = tiny_stream(), []
    for part in ("val", "test"):
        asked = data.query_set(2, part)
        answered = answer(METHOD, world, state, data.slice_(2).train_counts(), data, asked, 2, None)
        rows += metric_rows(answered)
    return rows


def test_the_metrics_are_the_same(federation):
    world, start = base_block()
    ours, theirs = metrics(world, simulated(world, start, 2)), metrics(world, federation[1])
    assert len(ours) > 20
    assert [{**row, "value": None} for row in ours] == [{**row, "value": None} for row in theirs]
    assert max(abs(a["value"] - b["value"]) for a, b in zip(ours, theirs, strict=True)) <= 1e-6


def test_protofed_ranks_alike_on_hosts_and_its_head_is_dealt_to_them(tmp_path):
    world, _ = base_block(**OTHERS["protofed, nothing shared"], scoring__head=True)
    data, folder = tiny_stream(), tmp_path / "fed"
    carried = Federated(ProtoFed(), folder, data.log, 2, run_locally)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=5))
        start = under_head(ProtoFed(), world.config).start(world)
    scores = []
    for inner in (ProtoFed(), carried):
        method = under_head(inner, world.config)
        state, _ = method.learn(world, start, data.slice_(1), DESCEND)
        queries = data.queries(data.query_set(1, "test"), np.arange(30), LENGTH)
        scores.append(method.score(world, state, queries))
    assert apart(*scores) <= 1e-5
    assert read_ledger(folder / SERVER / "ledger.json")[0] == ()
    assert {key for line in (folder / SERVER / "log.jsonl").read_text().splitlines() for key in json.loads(line)} == {
        *("slice", "finished", "asked", "lost")
    }


def test_a_dealt_head_reaches_every_host(tmp_path):
    world, start = base_block(**OTHERS["protofed, nothing shared"])
    counts = counts_at(world, "base", 0)
    head = FittedHead(Head(), counts)
    carried = Federated(METHOD, tmp_path / "fed", tiny_stream().log, 2, run_locally)
    deal_world(carried, replace(world, head=head), start)
    for here in [*host_folders(tmp_path / "fed"), tmp_path / "fed" / SERVER]:
        dealt = load(here).head
        assert torch.equal(dealt.counts.total, counts.total)


def test_what_hosts_cannot_be_asked_for_is_one_line():
    world, _ = base_block(**OTHERS["protofed, private"])
    with pytest.raises(ConfigError, match=r"hosts are not asked for popularity, .* protofed\.ablate=popularity"):
        check_federated(replace(world, beside=(Stream("popularity", 1.0, 2, 1.0),)))


@pytest.mark.long
@WHAT_RAY_LEAVES
def test_flowers_simulation_engine_ends_where_the_simulator_ends(tmp_path):
    world, start = base_block()
    assert_same(simulated(world, start, 2), federated(world, start, 2, tmp_path / "fed", run_in_simulation))


@pytest.mark.long
@WHAT_RAY_LEAVES
def test_processes_end_where_the_simulator_ends_and_none_is_left(tmp_path):
    world, start = base_block(protofed__newcomers="mean-row", privacy__rounds_per_slice=2)
    theirs = federated(world, start, 1, tmp_path / "fed", run_by_processes, hosts=2)
    assert_same(simulated(world, start, 1), theirs)
    assert [process for process in psutil.process_iter(["environ"]) if MARK in (process.info["environ"] or {})] == []


def test_the_ledger_has_every_release(federation):
    folder, state = federation
    ledger, trust = read_ledger(folder / SERVER / "ledger.json")
    made = dict.fromkeys((release.stream for release in ledger), 0)
    for release in ledger:
        made[release.stream] += release.count
    assert (made, trust) == ({"prototypes": 8, "new items": 2}, "central")
    assert Release(state.noise_multiplier, 0.5, 4) in ledger
    theirs = METHOD.releases(base_block()[0], state)
    assert {release.stream: release.count for release in theirs} == made


def test_a_host_holds_its_own_users_alone_and_the_server_none(federation):
    folder, _ = federation
    everybody = set(base_block()[1].devices.users.tolist())
    hosts = [read_host(here) for here in host_folders(folder)]
    theirs = [set(devices.users.tolist()) for _, devices in hosts]
    assert set().union(*theirs) == everybody
    assert sum(map(len, theirs)) == len(everybody)
    assert sum(len(host.events.times) for host, _ in hosts) == len(tiny_stream().log)
    assert not {"events.parquet", "devices.sqlite"} & {path.name for path in (folder / SERVER).iterdir()}
    told = {key for line in (folder / SERVER / "log.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert told == {"slice", "introducing", "asked", "lost", "round", "uploads", "refused", "finished"}


def by_question(slice_):
    """The candidates of each validation event, in no order."""
    asked = slice_.validation
    users, times = slice_.user_keys[asked.users].tolist(), slice_.times[asked.positions].tolist()
    keys = zip(users, asked.positives.tolist(), times, strict=True)
    return {key: sorted(row) for key, row in zip(keys, asked.negatives.tolist(), strict=True)}


def test_a_hosts_slice_is_its_part_of_the_whole_one(federation):
    data, stream = tiny_stream(), base_block()[0].config.stream
    for cut in cuts_of(data):
        whole = data.slice_(cut.index)
        hosts = [read_host(here)[0] for here in host_folders(federation[0])]
        parts = [slice_of(host.events, cut, stream.n_negatives) for host in hosts]
        assert sum(len(part.train_positions) for part in parts) == len(whole.train_positions)
        assert {part.n_train_items for part in parts} == {whole.n_train_items}
        found = {}
        for part in parts:
            found |= by_question(part)
        assert found == by_question(whole)
        assert len(found) > 20


def test_no_host_answers_a_round_twice_or_one_that_nobody_planned(federation, tmp_path):
    """A server that asks for more than ε was computed for hears nothing, in whichever slice it asks."""
    shutil.copytree(federation[0], tmp_path / "fed")
    folder = host_folders(tmp_path / "fed")[0]
    privacy, library = base_block()[0].config.privacy, federation[1].library
    (first, second), planned = cuts_of(tiny_stream()), 2 * privacy.rounds_per_slice
    (folder / STORE).unlink()

    def asked(cuts, round_):
        return sum(len(up) for up in obey(folder, Order("upload", cuts, library.broadcast(), round_, 1)).uploads)

    assert asked((first,), 2) > 0
    assert asked((first,), planned) == 0
    assert [asked((first, second), round_) for round_ in (0, 1, 2)] == [0, 0, 0]
    assert asked((first, second), planned - 1) > 0
    assert [asked((first, second), round_) for round_ in (planned, planned + 1, 10**6)] == [0, 0, 0]


def test_an_unknown_item_and_a_mode_that_reads_raw_events_are_one_line():
    table = pa.table({"user": ["a"], "item": ["never seen"], "time": [5]})
    with pytest.raises(DataError, match="item 'never seen' of a host's events is not among the catalogue's"):
        own_events("x", table, tiny_stream().log.item_ids.cast(pa.string()))
    world, _ = base_block(protofed__mode="nodp", protofed__newcomers="auto")
    with pytest.raises(ConfigError, match=r"protofed\.mode = reference, nothing or private, got nodp"):
        check_federated(world)


def test_devices_that_are_read_back_are_in_the_logs_order(federation):
    folder, state = federation
    users = torch.from_numpy(tiny_stream().slice_(2).user_keys)
    assert torch.equal(collect(folder, users).users, users)
    assert apart(read_server(folder / SERVER).read_state().library.v, state.library.v) == 0


def test_a_folder_without_a_federation_is_one_line(tmp_path):
    from protofed.errors import RunFolderError

    with pytest.raises(RunFolderError, match="no federation at"):
        read_server(Path(tmp_path))
