"""The systems that are compared: each plays rounds of the workload as long as its clock asks for them.

python -m protofed.speed.systems stack --width 64
"""

import argparse
from collections.abc import Callable, Mapping

import torch

from protofed.client.lessons import stack_size
from protofed.speed.alone import update_alone
from protofed.speed.clock import Clock, own_output
from protofed.speed.workload import Work, aggregate, first_library, made_up, update_together, uploads_of

CHUNK = 64  # clients of a stack on one core


def play_stack(work: Work, clock: Clock) -> None:
    """Ours: whole stacks of clients in one tensor program."""
    library = first_library(work)
    prompts = work.first_prompts(torch.arange(work.clients))
    size = stack_size(CHUNK, work.model.backbone.items)
    for round_ in clock.rounds():
        sent = []
        for clients in work.cohort_of(round_).split(size):
            at = clients.to(prompts.device)
            new = update_together(work, clients, prompts[at], library.v)
            prompts[at] = new
            sent.append(uploads_of(work, new, library.v))
        z, block = (torch.cat(column) for column in zip(*sent, strict=True))
        library = aggregate(work, library, z, block)
        clock.ended = library.v, z


def play_loop(work: Work, clock: Clock) -> None:
    """One client after the other, as one would write it by hand."""
    library = first_library(work)
    prompts = work.first_prompts(torch.arange(work.clients))
    for round_ in clock.rounds():
        sent = []
        for client in work.cohort_of(round_).tolist():
            prompts[client] = update_alone(work, client, prompts[client], library.v)
            sent.append(uploads_of(work, prompts[client : client + 1], library.v))
        z, block = (torch.cat(column) for column in zip(*sent, strict=True))
        library = aggregate(work, library, z, block)
        clock.ended = library.v, z


def play_flower(work: Work, clock: Clock) -> None:
    """Flower's simulation engine."""
    from protofed.speed.on_flower import play

    play(work, clock)


def play_pfl(work: Work, clock: Clock) -> None:
    """Apple's pfl-research."""
    from protofed.speed.on_pfl import play

    play(work, clock)


SYSTEMS: Mapping[str, Callable[[Work, Clock], None]] = {
    "stack": play_stack,
    "loop": play_loop,
    "pfl": play_pfl,
    "flower": play_flower,
}


def main() -> None:
    """Play one system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    clock = Clock(own_output())
    torch.set_num_threads(1)
    SYSTEMS[asked.system](made_up(asked.clients, asked.cohort, asked.width, asked.device), clock)


if __name__ == "__main__":
    main()
