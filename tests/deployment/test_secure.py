"""Secure aggregation: exact sums whoever drops out, and nothing else in the server's hands."""

import copy

import numpy as np
import pytest
import torch
from federations import METHOD, apart, assert_same, base_block, federated, simulated
from scipy.stats import kstest
from worlds import tiny_stream

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray

from protofed.client.model import Broadcast
from protofed.client.upload import Upload
from protofed.deployment.deal import SERVER, host_folders
from protofed.deployment.flower import engines, secure
from protofed.deployment.flower.client_app import app
from protofed.deployment.flower.engines import Federated, deal_world, run_locally
from protofed.deployment.flower.local_grid import LocalGrid, context_of, host_contexts
from protofed.deployment.flower.records import order_to_records
from protofed.deployment.orders import Cut, Order
from protofed.deployment.server import read_server
from protofed.methods.protofed_rules import round_rule
from protofed.privacy.ledger import read_ledger

K, ROW = 3, 5
ORDER = Order("upload", (Cut(1, 0, 1, 2, 3, 4),), Broadcast(0, torch.zeros(K, ROW - 1)), 0)
MOD = 2**32
SECURE = {"privacy__trust": "secure-aggregation", "protofed__newcomers": "auto", "privacy__rounds_per_slice": 2}


class Dropping(LocalGrid):
    """Hosts with given integers, some of which are gone from a stage on; all that the server is sent is kept."""

    def __init__(self, integers: dict[int, torch.Tensor], gone: dict[int, int]) -> None:
        super().__init__(ClientApp(), {node: context_of(node, {}) for node in integers})
        self.integers, self.gone, self.stage, self.seen = integers, gone, -1, []

    def send_and_receive(self, messages, *, timeout=None):
        self.stage += 1
        return super().send_and_receive(messages, timeout=timeout)

    def answer(self, message):
        node = message.metadata.dst_node_id
        if self.stage >= self.gone.get(node, 9):
            return Message(Error(0, "gone"), reply_to=message)
        message.content = copy.deepcopy(message.content)
        reply = secure.answer_masked(message, self.nodes[node], lambda _: self.integers[node])
        self.seen.append((node, self.stage, reply))
        return reply


def hosts(n: int, seed: int = 0) -> dict[int, torch.Tensor]:
    """Each host's number of devices and its sum, over the whole field."""
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 50, (n, 1), generator=rng)
    return {
        10 + i: row for i, row in enumerate(torch.cat([counts, torch.randint(MOD, (n, K * ROW), generator=rng)], 1))
    }


@pytest.mark.parametrize(
    ("n", "gone"),
    [(3, {}), (4, {11: 2}), (10, {12: 2, 17: 2}), (10, {12: 0}), (9, {12: 1}), (10, {11: 0, 13: 3, 15: 2})],
    ids=["three", "one of four", "two of ten", "before it began", "before it shared its keys", "one at each stage"],
)
def test_the_sum_of_those_who_stay_is_exact(n, gone):
    integers = hosts(n)
    grid = Dropping(integers, gone)
    came = secure.ask_masked(grid, ORDER, (K, ROW), 1.0)
    stay = [row for node, row in integers.items() if gone.get(node, 9) > 2]
    count, total = came.total
    assert count == int(sum(row[0] for row in stay))
    assert torch.equal(total, (sum(row[1:] for row in stay) % MOD).reshape(K, ROW))
    assert came.lost == tuple(str(node) for node in sorted(gone) if gone[node] <= 2)


@pytest.mark.parametrize(("n", "gone"), [(2, {}), (4, {10: 2, 11: 2}), (5, {10: 3, 11: 3, 12: 3})])
def test_too_few_to_hide_one_another_give_nothing(n, gone):
    came = secure.ask_masked(Dropping(hosts(n), gone), ORDER, (K, ROW), 1.0)
    assert came.total is None
    assert len(came.lost) == n


def test_what_the_server_is_sent_of_one_host_looks_the_same_whatever_it_holds():
    nothing = {node: torch.zeros(1 + 2_000, dtype=torch.int64) for node in (10, 11, 12)}
    order = Order("upload", ORDER.cuts, Broadcast(0, torch.zeros(2, 999)), 0)
    grid = Dropping(nothing, {})
    assert secure.ask_masked(grid, order, (2, 1_000), 1.0).total[0] == 0
    vectors = []
    for _, stage, reply in grid.seen:
        assert not any(len(record) for record in reply.content.array_records.values())  # nothing beside the masked sum
        if stage == 2:
            sent = reply.content.config_records[secure.RECORD_KEY_CONFIGS]["masked_params"]
            vector = bytes_to_ndarray(sent[1]).ravel()
            vectors.append(vector)
            assert kstest(vector / MOD, "uniform").pvalue > 1e-4
            assert len(np.unique(vector)) > 3_990
    assert max(abs(np.corrcoef(vectors)[np.triu_indices(3, 1)])) < 0.08
    assert len(np.unique(sum(vectors) % MOD)) > 3_990  # each host's own mask is in their sum still


def test_masks_take_every_bit_of_their_seed_and_are_flowers_on_neither_side():
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    one = secure.masks(b"\0" * 32, MOD, [(1_000,), (), (2, 3)])
    assert [part.shape for part in one] == [(1_000,), (), (2, 3)]
    folded = b"\1\0\0\0" * 2 + b"\0" * 24  # the same 32 bits for Flower's generator
    assert np.array_equal(pseudo_rand_gen(b"\0" * 32, MOD, [(9,)])[0], pseudo_rand_gen(folded, MOD, [(9,)])[0])
    assert not np.array_equal(one[0], secure.masks(folded, MOD, [(1_000,)])[0])
    assert np.array_equal(one[0], secure.masks(b"\0" * 32, MOD, [(1_000,)])[0])
    assert (one[0].min(), one[0].max()) > (0, MOD // 2)
    assert secure.server_side.pseudo_rand_gen is secure.client_side.pseudo_rand_gen is secure.masks


@pytest.mark.parametrize("hosts_", [1, 7, 1_000])
def test_halves_add_up_modulo_the_field(hosts_):
    rng = torch.Generator().manual_seed(hosts_)
    integers = torch.randint(MOD, (hosts_, 6), generator=rng)
    sums = np.sum([secure.halves(row) for row in integers], axis=0)
    assert torch.equal(secure.whole(sums, hosts_), integers.sum(0) % MOD)


def test_a_hosts_sum_counts_its_devices():
    codes = torch.randint(MOD, (4, K, ROW))
    uploads = [Upload(0, 0, torch.arange(2), torch.zeros(2), codes[at : at + 2]) for at in (0, 2)]
    summed = secure.sum_integers(uploads, (K, ROW))
    assert int(summed[0]) == 4
    assert torch.equal(summed[1:].reshape(K, ROW), codes.sum(0) % MOD)


def test_a_federation_with_secure_aggregation_ends_where_the_simulator_ends(tmp_path):
    world, start = base_block(**SECURE)
    ours = simulated(world, start, 1)
    with pytest.MonkeyPatch.context() as patch:  # the simulator's rule counts the users of the slice
        patch.setattr(
            engines, "round_rule", lambda config, k, noise, n: round_rule(config, k, noise, len(ours.devices))
        )
        theirs = federated(world, start, 1, tmp_path / "fed", run_locally)
    assert_same(ours, theirs)
    assert apart(theirs.library.ema_sums, start.library.ema_sums) > 0.01
    assert read_ledger(tmp_path / "fed" / SERVER / "ledger.json")[1] == "secure-aggregation"


def test_integers_never_leave_a_host_without_a_mask(tmp_path):
    world, start = base_block(**SECURE)
    deal_world(Federated(METHOD, tmp_path / "fed", tiny_stream().log, 3, run_locally), world, start)
    server = read_server(tmp_path / "fed" / SERVER)
    order = Order("upload", server.cuts[:1], server.read_state().library.broadcast(), 0, 1)
    contexts = host_contexts(host_folders(tmp_path / "fed"))
    LocalGrid(app, contexts)
    message = Message(order_to_records(order), 10, "train")
    with pytest.raises(Exception, match="integers of secure aggregation were asked for without a mask"):
        app(message, contexts[10])
