"""Secure aggregation by Flower's SecAgg+: the server learns the sum over hosts, and nothing of one host.

SecAgg+ averages floating-point vectors. Integers go through it exactly: each of our integers modulo 2^32 travels as two
halves of 16 bits, shifted to -2^15 .. 2^15 - 1, with a step of 1 and weight 1; the mean times the number of survivors
is the sum of halves. Flower folds the seed of a mask to 32 bits, which can be searched; here masks are SHAKE-256 of the
whole seed, on both sides.
"""

import hashlib
import importlib
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import flwr.compat.common.recorddict_compat as compat
import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid
from jaxtyping import Int
from torch import Tensor

from protofed.client.upload import Upload
from protofed.deployment.flower.records import order_to_records
from protofed.deployment.orders import Heard, Order
from protofed.privacy.upload import FIELD_BITS

# The modules themselves: their packages hide one behind a function of the same name.
client_side: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
server_side: Any = importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")

HALF = 16  # bits of a half
SHIFT = 2 ** (HALF - 1)
MODULUS = 2**FIELD_BITS
LEAST_HOSTS = 3  # of two, each would know the other's sum
SHARES, THRESHOLD = 1.0, 0.67  # every host holds a share of every other's keys; so many of them restore a lost one's


def masks(seed: bytes, num_range: int, dimensions_list: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Uniform whole numbers below `num_range`, a power of two up to 2^32, from all bits of the seed by SHAKE-256."""
    assert num_range & (num_range - 1) == 0 < num_range <= 2**32
    counts = [int(np.prod(shape, dtype=np.int64)) for shape in dimensions_list]
    words = np.frombuffer(hashlib.shake_256(b"protofed mask" + seed).digest(4 * sum(counts)), dtype="<u4")
    parts = np.split(words.astype(np.int64) & (num_range - 1), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, dimensions_list, strict=True)]


client_side.pseudo_rand_gen = masks
server_side.pseudo_rand_gen = masks


def is_masked(message: Message) -> bool:
    """Whether a message belongs to the secure protocol."""
    return RECORD_KEY_CONFIGS in message.content.config_records


def answer_masked(message: Message, context: Context, sum_of: Any) -> Message:
    """A host's part in the protocol; `sum_of(message)` gives the integers that are to be masked."""

    def integers(message: Message, context: Context) -> Message:
        vector = halves(sum_of(message))
        parameters = ndarrays_to_parameters([vector])
        said = FitRes(Status(Code.OK, ""), parameters, 1, {})
        return Message(compat.fitres_to_recorddict(said, keep_input=False), reply_to=message)

    reply: Message = client_side.secaggplus_mod(message, context, integers)
    return reply


def sum_integers(uploads: Iterable[Upload], shape: tuple[int, int]) -> Int[Tensor, " n"]:
    """What a host puts into the sum: how many devices, then all rows of their uploads added up modulo 2^32."""
    count, total = 0, torch.zeros(shape, dtype=torch.int64)
    for upload in uploads:
        count += len(upload)
        total = (total + upload.codes.sum(0)) & (MODULUS - 1)
    return torch.cat([torch.tensor([count]), total.flatten()])


def halves(integers: Int[Tensor, " n"]) -> np.ndarray:
    """Each integer modulo 2^32 as a low and a high half, both shifted to be around zero."""
    low, high = integers & (2**HALF - 1), integers >> HALF & (2**HALF - 1)
    both: np.ndarray = (torch.cat([low, high]) - SHIFT).double().numpy()
    return both


def whole(sums: np.ndarray, hosts: int) -> Int[Tensor, " n"]:
    """The sum of integers modulo 2^32 from the sums of their halves over so many hosts."""
    low, high = (torch.from_numpy(np.rint(sums)).long() + hosts * SHIFT).chunk(2)
    total: Tensor = (low + (high << HALF)) & (MODULUS - 1)
    return total


class Aggregation(server_side.SecAggPlusWorkflow):  # type: ignore[misc]
    """SecAgg+ with an order in place of Flower's own instructions."""

    def __init__(self, order: Order, nodes: Sequence[int], timeout: float) -> None:
        limits = {"max_weight": 1.0, "clipping_range": float(SHIFT), "quantization_range": 2**HALF}
        super().__init__(SHARES, THRESHOLD, modulus_range=MODULUS, timeout=timeout, **limits)
        self.order, self.nodes = order, list(nodes)
        self.mean: np.ndarray | None = None
        self.survivors: set[int] = set()

    def setup_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        return super().setup_stage(grid, context, state) and without_lost(state)

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        return super().share_keys_stage(grid, context, state) and without_lost(state)

    def collect_masked_vectors_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        state.nid_to_fitins = {node: order_to_records(self.order) for node in state.nid_to_fitins}
        fine: bool = super().collect_masked_vectors_stage(grid, context, state)
        self.survivors = set(state.active_node_ids)
        return fine

    # What the workflow asks of a strategy and of a manager of clients:
    def configure_fit(self, server_round: int, parameters: Parameters, manager: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: object
    ) -> tuple[None, dict[str, float]]:
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}

    def num_available(self) -> int:
        return len(self.nodes)


def without_lost(state: Any) -> bool:
    """Go on as if those who are gone had never been asked: nobody has put a mask between itself and them yet."""
    state.sampled_node_ids = set(state.active_node_ids)
    state.nid_to_neighbours = {
        node: state.nid_to_neighbours[node] & state.sampled_node_ids for node in state.sampled_node_ids
    }
    return len(state.sampled_node_ids) >= LEAST_HOSTS


def ask_masked(grid: Grid, order: Order, shape: tuple[int, int], timeout: float) -> Heard:
    """The sum of what the hosts upload in a round; nothing where too few are there, or stay, to hide one another."""
    nodes = sorted(grid.get_node_ids())
    nothing = Heard([], len(nodes), tuple(map(str, nodes)))
    if len(nodes) < LEAST_HOSTS:
        return nothing
    work = Aggregation(order, nodes, timeout)
    state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: order.round_})})
    state[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(Parameters([], ""), keep_input=False)
    own = Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=state, run_config={})
    try:
        work(grid, LegacyContext(own, strategy=work, client_manager=work))
    except (KeyError, TypeError, ValueError, IndexError, AssertionError):
        return nothing  # a host that does not keep to the protocol costs the round, not the run
    hosts = len(work.survivors)
    if work.mean is None or hosts < LEAST_HOSTS:
        return nothing
    count, *rows = whole(work.mean * hosts, hosts).split([1, shape[0] * shape[1]])
    lost = tuple(str(node) for node in nodes if node not in work.survivors)
    return Heard([], len(nodes), lost, (int(count), rows[0].reshape(shape)))
