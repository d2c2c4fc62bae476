"""A recommendation for one user against the backbone's own pass for the same query, and the time to the first answer.

    python benchmarks/recommend_speed.py runs/shop

Every answer is computed anew: routing, prompt, own rows, ranking, the head; nothing is kept from the answer before but
what no question changes (counts of items, the device's folded past). The peer is
the bare backbone (`SASRec.last_hidden`, scores of all items, the ten best) on the same history; beside it stands the
backbone in the flat form that answers are computed with, which has one pass where an answer has two. Under a head the
answer is timed with it and without, and an event folded into what the device keeps of its past and laid out. Users are
those of the folder who use their prompt and their own rows, which is the longest way. Times are of the processor, on
one thread.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

import protofed
from protofed.backbone.one_query import embed_history, last_state, score_items
from protofed.client.state import DeviceState, select
from protofed.inference import device as single
from protofed.inference.answer import make_ready
from protofed.inference.kept_past import KeptPast, after_event
from protofed.inference.online import online_inference


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median of seven means, each over `repeats` calls."""
    call()
    means = []
    for _ in range(7):
        began = time.process_time()
        for _ in range(repeats):
            call()
        means.append((time.process_time() - began) / repeats * 1e3)
    return statistics.median(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model's folder")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    model = protofed.load(arguments.folder)
    loading = time.perf_counter() - began
    backbone, shared = model.model.backbone, model.model
    places = (model.devices.use_prompt & model.devices.use_rows & model.devices.met).nonzero()[:, 0][: arguments.users]
    if not len(places):
        sys.exit(f"error: no device of {arguments.folder} uses both its prompt and its own rows; train a larger model")
    headless = replace(model, head=None)
    ratios, alone, whole, stacked, flat, bare_headed, folded = [], [], [], [], [], [], []
    ready = make_ready(shared)
    assert ready is not None
    for place in places:
        state = select(model.devices, place[None])
        device = protofed.Device(model, state, None, learned=0)  # type: ignore[arg-type]

        @torch.no_grad()
        def bare(state: object = state) -> object:
            query = single.as_query(shared, state)  # type: ignore[arg-type]
            return backbone.scores(backbone.last_hidden(query.tokens), query.n_items)[0].topk(10)

        @torch.no_grad()
        def in_a_stack(state: object = state) -> object:
            return online_inference(shared, state, single.as_query(shared, state))[0].topk(10)  # type: ignore[arg-type]

        @torch.inference_mode()
        def laid_out(state: object = state) -> object:
            items = state.memory.items  # type: ignore[attr-defined]
            history = embed_history(ready.flat, items, items[:0], ready.flat.rows[:0])
            return score_items(ready.flat, last_state(ready.flat, history)).topk(10)

        flat.append(milliseconds(laid_out, arguments.repeats))
        alone.append(milliseconds(bare, arguments.repeats))
        whole.append(milliseconds(lambda device=device: device.recommend(10), arguments.repeats))  # type: ignore[misc]
        without = protofed.Device(headless, state, None, learned=0)  # type: ignore[arg-type]
        bare_headed.append(milliseconds(lambda device=without: device.recommend(10), arguments.repeats))  # type: ignore[misc]
        if (past := device.past) is not None:
            event = int(state.memory.items[-1]), int(state.memory.times[-1])

            def fold(past: KeptPast = past, event: tuple[int, int] = event, state: DeviceState = state) -> object:
                return model.lay_out(state, after_event(past, *event))

            folded.append(milliseconds(fold, arguments.repeats))
        stacked.append(milliseconds(in_a_stack, arguments.repeats))
        ratios.append(whole[-1] / alone[-1])
    command = [sys.executable, "-m", "protofed.cli.main", "recommend", arguments.folder, "--history", "", "--json"]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    print(
        json.dumps(
            {
                "items": shared.n_items,
                "devices": len(model.devices),
                "load_s": round(loading, 2),
                "first_answer_of_the_command_s": round(time.perf_counter() - began, 2),
                "backbone_ms": round(statistics.median(alone), 3),
                "recommend_ms": round(statistics.median(whole), 3),
                "recommend_without_head_ms": round(statistics.median(bare_headed), 3),
                "event_into_the_heads_past_ms": round(statistics.median(folded), 3) if folded else None,
                "through_the_stacked_way_ms": round(statistics.median(stacked), 3),
                "backbone_laid_out_flat_ms": round(statistics.median(flat), 3),
                "recommend_over_flat_backbone": round(
                    statistics.median([a / b for a, b in zip(whole, flat, strict=False)]), 2
                ),
                "recommend_over_backbone": round(statistics.median(ratios), 2),
                "worst_user": round(max(ratios), 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
