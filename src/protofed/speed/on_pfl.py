"""The workload on pfl-research 0.6: its backend calls one client after the other and adds up what they return.

pfl is no dependency of ours: `benchmarks/speed/pfl.sh` makes an environment that has it.
"""

from collections.abc import Iterator
from typing import Any

import torch

from protofed.server.fedkmeans import exact_sums, fedkmeans
from protofed.speed.alone import update_alone
from protofed.speed.clock import Clock
from protofed.speed.workload import Work, first_library, uploads_of


def play(work: Work, clock: Clock) -> None:
    """Rounds of `SimulatedBackend`: the library is its model, prompts stay with the algorithm."""
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.algorithm.base import FederatedAlgorithm  # type: ignore[import-not-found]
    from pfl.common_types import Population  # type: ignore[import-not-found]
    from pfl.context import CentralContext  # type: ignore[import-not-found]
    from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
    from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
    from pfl.hyperparam.base import AlgorithmHyperParams, ModelHyperParams  # type: ignore[import-not-found]
    from pfl.internal.ops import pytorch_ops  # type: ignore[import-not-found]
    from pfl.internal.ops.selector import set_framework_module  # type: ignore[import-not-found]
    from pfl.metrics import Metrics  # type: ignore[import-not-found]
    from pfl.stats import MappedVectorStatistics  # type: ignore[import-not-found]

    set_framework_module(pytorch_ops)
    prompts, rounds = work.first_prompts(torch.arange(work.clients)), clock.rounds()
    sent: list[torch.Tensor] = []

    class Rounds(FederatedAlgorithm):  # type: ignore[misc]
        def get_next_central_contexts(self, model: Any, iteration: int, *_: Any) -> tuple[Any, Any, Any]:
            if next(rounds, None) is None:
                return None, model, Metrics()
            numbers = (AlgorithmHyperParams(), ModelHyperParams(), None)
            return (CentralContext(iteration, False, work.cohort, Population.TRAIN, *numbers),), model, Metrics()

        def simulate_one_user(self, model: Any, user_dataset: Any, central_context: Any) -> tuple[Any, Any]:
            client = user_dataset.user_id
            prompts[client] = update_alone(work, client, prompts[client], model.v)
            z, block = uploads_of(work, prompts[client : client + 1], model.v)
            sent.append(z)
            return MappedVectorStatistics({"sums": exact_sums(z, block, work.upload)}, weight=1), Metrics()

        def process_aggregated_statistics(self, context: Any, metrics: Any, model: Any, statistics: Any) -> Any:
            library = fedkmeans(model, statistics["sums"], count_weight=work.upload.count_weight)
            clock.ended = library.v, torch.cat(sent)
            sent.clear()
            return library, Metrics()

    data = FederatedDataset(lambda client: Dataset((work.events.tokens[:1],), client), everybody(work).__next__)
    numbers = (AlgorithmHyperParams(), SimulatedBackend(data, data), first_library(work), ModelHyperParams())
    Rounds().run(*numbers, send_metrics_to_platform=False)


def everybody(work: Work) -> Iterator[int]:
    """The clients of round 0, 1, 2, ... in turn."""
    round_ = 0
    while True:
        yield from work.cohort_of(round_).tolist()
        round_ += 1
