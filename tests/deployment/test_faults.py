"""Whatever is lost, late, doubled, reordered or restarted: releases are all in the ledger, nobody counts twice.

Hypothesis scripts the faults of a grid in this process, and where the server dies; the reference adds up, round by
round, the uploads that came in time, each once.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import pytest
import torch
from federations import METHOD
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from worlds import tiny_config, tiny_log, warmed_up_on

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from protofed.client.codec import CodecTraining
from protofed.data.interactions import select
from protofed.deployment.deal import SERVER, host_folders
from protofed.deployment.flower.engines import Federated, deal_world
from protofed.deployment.flower.local_grid import LocalGrid, host_contexts, serve
from protofed.deployment.flower.processes import read_log
from protofed.deployment.flower.records import answer_from_records, answer_to_records, order_from_records
from protofed.deployment.host import STORE, answer, read_host
from protofed.deployment.server import LEDGER, read_server
from protofed.deployment.store import opened
from protofed.federation import preparation
from protofed.federation.rounds import server_noise
from protofed.methods.protocol import World
from protofed.privacy.ledger import read_ledger, streams
from protofed.seeds import stream
from protofed.server.accept import accept
from protofed.server.aggregate import server_aggregate, slice_end
from protofed.slices.stream import SliceStream

HOSTS, SLICES, ROUNDS, USERS = 2, 2, 2, 8
FAULTS = ("order lost", "answer lost", "order late", "answer late", "order twice", "answer twice", "host dies")
ASKS = SLICES * (ROUNDS + 1)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a file system whose syncs cost nothing, where there is one


class Killed(Exception):
    """The server's process ends here."""


@cache
def dealt() -> Path:
    """The folder of a federation of few users that has yet to begin."""
    log = tiny_log()
    log = select(log, log.users < USERS)
    config = tiny_config(
        method="protofed-sp", backbone__width=8, protofed__embedding=8, protofed__prototypes=2, protofed__local_steps=2,
        protofed__base_steps=1, training__base_epochs=1, training__negatives=8, privacy__sampling_rate=0.7,
        privacy__rounds_per_slice=ROUNDS, protofed__newcomers="mean-row",
    )  # fmt: skip
    data = SliceStream(log, config.stream)
    world = World(config, data.slice_(0), warmed_up_on(config, data)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=5))
        start = METHOD.start(world)
    global _KEPT
    _KEPT = TemporaryDirectory(dir=MEMORY)
    folder = Path(_KEPT.name) / "fed"
    deal_world(Federated(METHOD, folder, log, HOSTS, lambda *_: None), world, start)
    return folder


@cache
def given(number: int):
    """A host's model and events, read once."""
    return read_host(host_folders(dealt())[number])


@cache
def beginning():
    """The server's state before the first round."""
    return read_server(dealt() / SERVER).read_state()


class FaultyGrid(LocalGrid):
    """A grid that does to each order, or to its answer, what the script says."""

    def __init__(self, folder: Path, script: dict, kill_at: int | None, seen: dict) -> None:
        super().__init__(ClientApp(), host_contexts(host_folders(folder)))
        self.folder, self.script, self.kill_at, self.seen = folder, script, kill_at, seen
        self.late_orders, self.late_answers = [], []

    def get_node_ids(self):
        """The hosts that are connected now: one may join late, go and come back."""
        away = {host + 10 for host in range(HOSTS) if ("away", self.seen["asks"], host) in self.script}
        return [node for node in self.nodes if node not in away]

    def send_and_receive(self, messages, *, timeout=None):
        """The replies that come in time for this order, and those of older orders that come now."""
        messages = list(messages)
        if not messages:  # nobody is there to be asked
            self.seen["asks"] += 1
            return []
        order = order_from_records(messages[0].content)
        made = streams(read_ledger(self.folder / SERVER / LEDGER)[0]).get("prototypes", 0)
        assert order.kind != "upload" or made == order.round_ + 1  # written ahead of what it lists
        number, self.seen["asks"] = self.seen["asks"], self.seen["asks"] + 1
        late_orders, self.late_orders = self.late_orders, []
        replies, self.late_answers = self.late_answers, []
        turn = self.script.get(("order", number), 0)
        shuffled = sorted(messages, key=lambda message: turn * message.metadata.dst_node_id % 7)
        for message in [*late_orders, *shuffled]:
            old = message in late_orders
            fault = "" if old else self.script.get((number, message.metadata.dst_node_id - 10), "")
            self.seen["messages"] += 1
            if self.kill_at == self.seen["messages"]:
                raise Killed
            if fault == "order late":
                self.late_orders.append(message)
            if fault in ("order lost", "order late"):
                continue
            copies = [self.reply(message, dies=fault == "host dies") for _ in range(1 + (fault == "order twice"))]
            if fault == "answer lost":
                continue
            if fault == "answer late":
                self.late_answers += copies
                continue
            replies += copies * (1 + (fault == "answer twice"))
        if order.kind == "upload":
            self.seen["heard"][order.round_] = [r for r in replies if r.has_content()]
        return replies

    def reply(self, message, *, dies: bool):
        """What the host answers; one that dies before its transaction ends has done nothing."""
        number, order = message.metadata.dst_node_id - 10, order_from_records(message.content)
        try:
            with opened(host_folders(self.folder)[number] / STORE) as kept:
                said = answer(*given(number), kept, order)
                if dies:
                    raise RuntimeError("out of power")
        except RuntimeError:
            return Message(Error(0, "out of power"), reply_to=message)
        if order.kind == "upload" and said.uploads:
            for upload in said.uploads:
                known = self.seen["sent"].setdefault((number, order.round_, upload.tokens.tolist()[0]), upload)
                assert torch.equal(known.codes, upload.codes)  # never a second step, never another draw
                assert torch.equal(known.block, upload.block)
        return Message(answer_to_records(said), reply_to=message)


class Federation(RuleBasedStateMachine):
    """Faults are scripted, then the server runs, until it has finished or dies."""

    def __init__(self) -> None:
        super().__init__()
        self.place = TemporaryDirectory(dir=MEMORY)
        self.folder = Path(self.place.name) / "fed"
        copytree(dealt(), self.folder)
        self.script: dict = {}
        self.seen = {"asks": 0, "messages": 0, "heard": defaultdict(list), "sent": {}}
        self.kill_at: int | None = None
        self.runs = self.deaths = 0

    @rule(ask=st.integers(0, ASKS), host=st.integers(0, HOSTS - 1), fault=st.sampled_from(FAULTS))
    def something_goes_wrong(self, ask: int, host: int, fault: str) -> None:
        self.script[ask, host] = fault

    @rule(ask=st.integers(0, ASKS), how=st.integers(1, 6))
    def orders_are_sent_in_another_order(self, ask: int, how: int) -> None:
        self.script["order", ask] = how

    @rule(first=st.integers(0, ASKS), asks=st.integers(1, ASKS), host=st.integers(0, HOSTS - 1))
    def a_host_is_away(self, first: int, asks: int, host: int) -> None:
        self.script |= {("away", ask, host): 1 for ask in range(first, first + asks)}

    @rule(messages=st.integers(1, 2 * HOSTS * ROUNDS))
    def the_server_dies_after(self, messages: int) -> None:
        self.kill_at = self.seen["messages"] + messages

    @rule(until=st.integers(1, SLICES))
    def the_server_runs(self, until: int) -> None:
        grid = FaultyGrid(self.folder, self.script, self.kill_at, self.seen)
        try:
            serve(grid, {"folder": str(self.folder / SERVER), "slice": until, "nodes": HOSTS, "patience": 0.0})
        except Killed:
            self.deaths += 1
        self.kill_at, self.runs = None, self.runs + 1

    def teardown(self) -> None:
        if not self.runs:
            self.the_server_runs(SLICES)
            self.all_is_well()
        self.place.cleanup()

    @invariant()
    def all_is_well(self) -> None:
        if self.runs:
            check(self.folder, self.seen, self.deaths)


def check(folder: Path, seen: dict, deaths: int) -> None:
    """The ledger covers every release, and the library is that of the uploads that came in time, each counted once."""
    server, fresh = read_server(folder / SERVER), beginning()
    log = read_log(folder / SERVER / "log.jsonl")
    released = [record for record in log if "round" in record]
    made = streams(server.ledger()).get("prototypes", 0)
    assert len({record["round"] for record in released}) == len(released)
    assert len(released) <= made <= len(released) + deaths
    library, done = fresh.library, server.read_state()
    by_slice = defaultdict(list)
    for record in released:
        by_slice[record["round"] // ROUNDS + 1].append(record)
    for index in range(1, SLICES + 1):
        for record in by_slice[index]:
            round_, first = record["round"], {}
            for reply in seen["heard"][round_]:
                for upload in answer_from_records(reply.content).uploads:
                    if (upload.round_, upload.version) == (round_, library.version):
                        for place, token in enumerate(upload.tokens.tolist()):
                            first.setdefault(token, (upload, place))
            alone = [one_of(upload, place) for upload, place in first.values()]
            assert record["uploads"] == len(alone)
            accepted = accept(alone, fresh.rule, round_=round_, version=library.version)
            assert not accepted.refused
            parting = stream(server.config.seed, "separation", round_)
            noise = server_noise(server.config.seed, round_)
            library, _ = server_aggregate(library, accepted, fresh.rule, noise, parting)
        if index <= done.index:
            library, _ = slice_end(library, fresh.rule, stream(server.config.seed, "pruning", index))
    torch.testing.assert_close(done.library.v, library.v, atol=1e-6, rtol=0)
    torch.testing.assert_close(done.library.ema_sums, library.ema_sums, atol=1e-5, rtol=0)
    assert done.library.version == library.version


def one_of(upload, place: int):
    """One device's part of a stack's upload."""
    part = slice(place, place + 1)
    return replace(upload, tokens=upload.tokens[part], block=upload.block[part], codes=upload.codes[part])


QUICK = settings(max_examples=200, stateful_step_count=8, deadline=None, derandomize=True)


def test_two_hundred_schedules_of_faults():
    run_state_machine_as_test(Federation, settings=QUICK)


@pytest.mark.long
def test_two_thousand_schedules_of_faults():
    run_state_machine_as_test(Federation, settings=settings(QUICK, max_examples=2_000, derandomize=False))
