"""How well RecBole's SASRec learns the base block: NDCG@10 and HR@10 of full ranking on the test part of D_0.

The dataset, data loader, model, trainer, early stopping and evaluator are RecBole's own; this file only writes the
queries of README.md as pre-split files, and scores the trained model once more under the protocol's rank.

RecBole 1.2.1 needs older libraries than ProtoFed, so it lives in an environment of its own:

    python3.11 -m venv recbole-venv
    recbole-venv/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    recbole-venv/bin/pip install numpy==1.26.4 pandas==2.2.3 "setuptools<81" "pyarrow<22" jaxtyping recbole==1.2.1
    recbole-venv/bin/pip install --no-deps -e .
    OMP_NUM_THREADS=1 recbole-venv/bin/python benchmarks/backbone_parity/recbole_side.py \
        --root ../shared/data --dataset gowalla_1k --out results.json --seeds 0 1 2 --loss CE BPR --dropout 0.2 0.5

Finished runs are kept in the results file and skipped when the command is given again.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # RecBole's checkpoints hold its config object

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_logger, init_seed
from torch import Tensor

from protofed.data.interactions import InteractionLog
from protofed.data.prepared import load_log
from protofed.slices.partition import PARTS, SliceBounds, partition

HISTORY = 50
TOP = 10
FILES = {"train": "train", "val": "valid", "test": "test"}
MODEL = {"hidden_size": 64, "inner_size": 256, "n_layers": 2, "n_heads": 4, "MAX_ITEM_LIST_LENGTH": HISTORY}
TRAINING = {"epochs": 200, "stopping_step": 10, "learning_rate": 1e-3, "train_batch_size": 2048}
EVALUATION = {
    "eval_args": {"mode": "full", "order": "TO", "group_by": "user", "split": {"RS": [0.8, 0.1, 0.1]}},
    "metrics": ["NDCG", "Hit"],
    "topk": [TOP],
    "valid_metric": f"NDCG@{TOP}",
    "metric_decimal_place": 8,
    "eval_batch_size": 2048,
}
FIELDS = {
    "load_col": {"inter": ["user_id", "item_id", "item_id_list"], "item": ["item_id"]},
    "USER_ID_FIELD": "user_id",
    "ITEM_ID_FIELD": "item_id",
    "ITEM_LIST_LENGTH_FIELD": "item_length",
    "LIST_SUFFIX": "_list",
    "alias_of_item_id": ["item_id_list"],
    "benchmark_filename": list(FILES.values()),
}


@dataclass(frozen=True, slots=True)
class Queries:
    """The events of one part of D_0 that have a history; `rows` are positions in the canonical log."""

    rows: np.ndarray
    histories: list[np.ndarray]  # items, oldest first, at most HISTORY of them
    lengths: np.ndarray  # before truncation
    n_empty: int


def earlier_events(log: InteractionLog, end: int) -> tuple[list[np.ndarray], np.ndarray]:
    """For each of the first `end` events: its user's last items with a strictly smaller timestamp, and their count."""
    users, items, times = (column.numpy()[:end] for column in (log.users, log.items, log.times))
    histories: list[np.ndarray] = [items[:0]] * end
    lengths = np.zeros(end, dtype=np.int64)
    for user in np.unique(users):
        rows = np.flatnonzero(users == user)
        lengths[rows] = np.searchsorted(times[rows], times[rows], side="left")
        for row in rows:
            histories[row] = items[rows[max(0, lengths[row] - HISTORY) : lengths[row]]]
    return histories, lengths


def queries_of(log: InteractionLog, base: SliceBounds) -> dict[str, Queries]:
    """The queries of the train, val and test part; an event without history is no query, only counted."""
    histories, lengths = earlier_events(log, base.end)
    queries = {}
    for part in PARTS:
        rows = np.arange(*base.part(part))
        asked = rows[lengths[rows] > 0]
        queries[part] = Queries(asked, [histories[row] for row in asked], lengths[asked], len(rows) - len(asked))
    return queries


def write_inter_file(path: Path, log: InteractionLog, queries: Queries) -> None:
    """RecBole's pre-split format with the history spelled out, so that RecBole builds none of its own."""
    users, items = log.users.numpy(), log.items.numpy()
    lines = [
        f"{users[row]}\t{items[row]}\t{' '.join(map(str, history))}\n"
        for row, history in zip(queries.rows, queries.histories, strict=True)
    ]
    path.write_text("user_id:token\titem_id:token\titem_id_list:token_seq\n" + "".join(lines))


def write_query_table(path: Path, log: InteractionLog, queries: Queries) -> None:
    """The same queries with original identifiers, for comparison with another implementation's."""
    rows = queries.rows
    columns = {
        "row": rows,
        "user": log.user_ids.take(pa.array(log.users.numpy()[rows])),
        "item": log.item_ids.take(pa.array(log.items.numpy()[rows])),
        "timestamp": log.times.numpy()[rows],
        "history_length": queries.lengths,
    }
    pq.write_table(pa.table(columns), path)


def export(log: InteractionLog, base: SliceBounds, folder: Path) -> dict[str, Any]:
    """Write everything RecBole reads; returns the counts that identify the protocol."""
    atomic = folder / log.name
    atomic.mkdir(parents=True, exist_ok=True)
    queries = queries_of(log, base)
    for part, name in FILES.items():
        write_inter_file(atomic / f"{log.name}.{name}.inter", log, queries[part])
        write_query_table(folder / f"queries_{part}.parquet", log, queries[part])
    items = log.items.numpy()
    catalogue, trained = np.unique(items[: base.end]), np.unique(items[: base.train_end])
    # The item file fixes the candidates: items met only in events without history occur in no .inter row.
    (atomic / f"{log.name}.item").write_text("item_id:token\n" + "".join(f"{item}\n" for item in catalogue))
    return {
        "events": len(log),
        "base": [base.start, base.train_end, base.val_end, base.end],
        "queries": {part: len(queries[part].rows) for part in PARTS},
        "empty_history": {part: queries[part].n_empty for part in PARTS},
        "known_target": {part: int(np.isin(items[queries[part].rows], trained).sum()) for part in PARTS},
        "items": len(catalogue),
        "items_with_train_event": len(trained),
    }


def recbole_config(dataset: str, folder: Path, *, loss: str, dropout: float, seed: int, gpu: bool) -> Config:
    """RecBole's defaults with the settings above; BPR draws one uniform negative per target, CE uses all items."""
    negatives = {"distribution": "uniform", "sample_num": 1, "dynamic": False} if loss == "BPR" else None
    settings = {
        **(MODEL | TRAINING | EVALUATION | FIELDS),
        **{"hidden_dropout_prob": dropout, "attn_dropout_prob": dropout, "loss_type": loss, "seed": seed},
        **{"train_neg_sample_args": negatives, "repeatable": True, "use_gpu": gpu, "show_progress": False},
        **{"data_path": str(folder), "checkpoint_dir": str(folder / "saved")},
    }
    return Config(model="SASRec", dataset=dataset, config_dict=settings)


@torch.no_grad()
def target_ranks(model: SASRec, loader: Any, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The target of each query and its rank among the candidates, the worst one where scores are equal."""
    model.eval()
    targets, ranks = [], []
    for interaction, *_ in loader:
        target = interaction[model.ITEM_ID].cpu()
        scores = model.full_sort_predict(interaction.to(model.device)).cpu()
        own = scores.gather(1, target[:, None])
        is_target = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, target[:, None], True)
        ranks.append(((scores >= own) & candidates & ~is_target).sum(1) + 1)
        targets.append(target)
    return torch.cat(targets), torch.cat(ranks)


def averages(ranks: Tensor) -> dict[str, float]:
    """NDCG@10 and HR@10 of single-target queries."""
    hit = (ranks <= TOP).double()
    return {"ndcg10": (hit / (ranks + 1.0).log2()).mean().item(), "hr10": hit.mean().item()}


def protocol_figures(model: SASRec, loader: Any, trained: Tensor) -> dict[str, dict[str, float]]:
    """The figures by query subset and candidate set; `trained` marks RecBole's ids of items with a train event."""
    everything = torch.ones_like(trained)
    everything[0] = False  # RecBole's padding
    targets, ranks = target_ranks(model, loader, everything)
    _, among_trained = target_ranks(model, loader, trained)
    known = trained[targets]
    return {
        "all": averages(ranks),
        "known_target": averages(ranks[known]),
        "all_among_train_items": averages(among_trained),
        "known_target_among_train_items": averages(among_trained[known]),
    }


def run(config: Config, train_items: list[str]) -> dict[str, Any]:
    """Train once with RecBole, take its best checkpoint, and measure it both ways."""
    init_seed(config["seed"], config["reproducibility"])
    init_logger(config)
    dataset = create_dataset(config)
    train_data, valid_data, test_data = data_preparation(config, dataset)
    model = SASRec(config, train_data.dataset).to(config["device"])
    trainer = Trainer(config, model)
    settings = {name: config[name] for name in ("loss_type", "seed", "hidden_dropout_prob")}
    trainer.saved_model_file = str(Path(config["checkpoint_dir"]) / ("-".join(map(str, settings.values())) + ".pth"))
    started = time.perf_counter()
    trainer.fit(train_data, valid_data, verbose=True, show_progress=False)
    seconds = time.perf_counter() - started
    by_recbole = {part: dict(trainer.evaluate(data)) for part, data in (("val", valid_data), ("test", test_data))}
    trained = torch.zeros(dataset.item_num, dtype=torch.bool)
    trained[dataset.token2id("item_id", train_items)] = True
    epochs = len(trainer.train_loss_dict)
    return {
        "loss": config["loss_type"],
        "seed": config["seed"],
        "dropout": config["hidden_dropout_prob"],
        "epochs": epochs,
        "best_epoch": torch.load(trainer.saved_model_file)["epoch"] + 1,
        "seconds": round(seconds, 1),
        "seconds_per_epoch": round(seconds / epochs, 2),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "recbole": by_recbole,
        "val": protocol_figures(model, valid_data, trained),
        "test": protocol_figures(model, test_data, trained),
    }


def best_dropout(runs: list[dict[str, Any]], loss: str, seed: int) -> float:
    """The dropout whose run with this seed has the highest validation NDCG@10."""
    tried = [run_ for run_ in runs if run_["loss"] == loss and run_["seed"] == seed]
    return float(max(tried, key=lambda run_: run_["val"]["all"]["ndcg10"])["dropout"])


def summary(runs: list[dict[str, Any]], seeds: list[int]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of every figure, at each loss's chosen dropout."""
    chosen: dict[str, Any] = {}
    for loss in sorted({run_["loss"] for run_ in runs if run_["seed"] == seeds[0]}):
        dropout = best_dropout(runs, loss, seeds[0])
        values = defaultdict(list)
        for run_ in runs:
            if (run_["loss"], run_["dropout"]) == (loss, dropout) and run_["seed"] in seeds:
                for part in ("val", "test"):
                    for subset, figures in run_[part].items():
                        for metric, value in figures.items():
                            values[f"{part}/{subset}/{metric}"].append(value)
        spread = {
            name: {"mean": statistics.mean(found), "std": statistics.stdev(found) if len(found) > 1 else None}
            for name, found in values.items()
        }
        chosen[loss] = {"dropout": dropout, "seeds": len(values["val/all/ndcg10"]), **spread}
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="folder that holds DATASET/interactions.parquet")
    parser.add_argument("--dataset", default="gowalla_1k")
    parser.add_argument("--out", type=Path, required=True, help="results file; RecBole's files go beside it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--loss", nargs="+", choices=["CE", "BPR"], default=["CE", "BPR"])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.2, 0.5], help="tuned with the first seed")
    parser.add_argument("--gpu", action="store_true", help="train on the first CUDA device")
    parser.add_argument("--export-only", action="store_true", help="write the queries and stop")
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # RecBole's Config reads the command line too
    torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(False)  # importing RecBole's models turns it on; it only costs time

    log = load_log(arguments.dataset, arguments.root)
    base = partition(log)[0]
    arguments.out = arguments.out.resolve()
    folder = arguments.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # RecBole writes its logs into the working directory
    protocol = export(log, base, folder)
    print(json.dumps(protocol))
    if arguments.export_only:
        return
    train_items = [str(item) for item in np.unique(log.items.numpy()[: base.train_end])]
    runs = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []

    def ensure(loss: str, dropout: float, seed: int) -> None:
        if any((done["loss"], done["dropout"], done["seed"]) == (loss, dropout, seed) for done in runs):
            return
        config = recbole_config(log.name, folder, loss=loss, dropout=dropout, seed=seed, gpu=arguments.gpu)
        runs.append(run(config, train_items))
        save()

    def save() -> None:
        results = {"protocol": protocol, "runs": runs, "summary": summary(runs, arguments.seeds)}
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")

    first, *others = arguments.seeds
    for loss in arguments.loss:
        for dropout in arguments.dropout:
            ensure(loss, dropout, first)
        for seed in others:
            ensure(loss, best_dropout(runs, loss, first), seed)
    save()


if __name__ == "__main__":
    main()
