"""The stages of a run, in words, in the order in which it tells of them."""

from protofed.progress import Stage

CHECKING = "checking candidates"
WARM_UP = "warm-up"
PREPARING = "preparing the method"


def learning(index: int, n_slices: int) -> str:
    return f"slice {index} of {n_slices}: learning"


def evaluating(index: int, n_slices: int) -> str:
    return f"slice {index} of {n_slices}: evaluating" if index else "base block: evaluating"


def stages_of(n_slices: int) -> tuple[Stage, ...]:
    """All stages of a run of so many slices; learning and evaluating are of one kind each."""
    once = [Stage(name, name) for name in (CHECKING, WARM_UP, PREPARING)]
    slices = [
        stage
        for index in range(1, n_slices + 1)
        for stage in (Stage(learning(index, n_slices), "learning"), Stage(evaluating(index, n_slices), "evaluating"))
    ]
    return (*once, Stage(evaluating(0, n_slices), "evaluating"), *slices)
