"""One question under the head, laid out flat: the numbers of the stacked way, whatever is worn and left out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pasts import queries_of

from protofed.inference.head import FittedHead, Head, with_head
from protofed.inference.head_alone import add_head, lay_out_head, lay_out_past
from protofed.inference.item_side import Covisits, ItemCounts
from protofed.inference.kept_past import keep_past
from protofed.inference.own_past import NUMBERS

DAY, N = 24 * 3600, 9
PAST = st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, 90 * DAY)), max_size=30, unique_by=lambda e: e[1])


def drawn_head(*, own: bool, items: bool, seed: int = 0) -> Head:
    """A head of drawn weights, standardised on drawn numbers, one of which never varies."""
    head, rng = Head(own=own, items=items), torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(0, 0.5, generator=rng)
    for part in (head.own, head.items):
        if part is not None:
            x = 3 * torch.rand(50, len(part.centre), generator=rng)
            x[:, -1] = 1.0
            part.standardise(x)
    return head.requires_grad_(False)


def counts(n: int, seed: int = 0) -> ItemCounts:
    """Counts of n items, some of them below 0 as noise makes them, and random neighbours."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 4, (n,), generator=rng)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    near = [torch.randperm(n, generator=rng)[:size].sort().values for size in sizes.tolist()]
    items = torch.cat([torch.zeros(0, dtype=torch.int64), *near])
    recent, total = 4 * torch.randn(2, n, generator=rng)
    return ItemCounts(recent, total, Covisits(offsets, items, torch.rand(len(items), generator=rng)), known=n - 1)


@settings(deadline=None, max_examples=60)
@given(PAST, st.integers(0, 30 * DAY), st.sampled_from(["own", "items", "both", "none"]), st.integers(N - 3, N + 2))
def test_one_question_has_the_scores_it_has_in_a_stack(past, later, worn, counted):
    own, items = worn in ("own", "both"), worn in ("items", "both")
    past = sorted(past, key=lambda event: event[1])
    now = max((time for _, time in past), default=0) + later
    fitted = FittedHead(drawn_head(own=own, items=items), counts(counted))
    if fitted.head.own is not None and later % 2:
        fitted.head.own.leave_out([NUMBERS.index("age"), NUMBERS.index("time of day")])
    scores = torch.randn(N, generator=torch.Generator().manual_seed(1))
    kept = keep_past((item for item, _ in past), (time for _, time in past))
    flat = lay_out_head(fitted, N)
    found = add_head(flat, scores, lay_out_past(flat, kept, [item for item, _ in past]), now)
    queries = queries_of([past], now, N)
    expected = with_head(fitted, scores[None], queries)[0] if own or items else scores * fitted.head.log_beta.exp()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)  # the kept past has sums of 32 bits


@pytest.mark.parametrize("newest", [[], [N + 5], [1, 2, 3, 4, 5, 6]])
def test_only_the_newest_three_are_looked_up_and_unknown_ones_tell_nothing(newest):
    fitted = FittedHead(drawn_head(own=False, items=True), counts(N))
    flat, scores = lay_out_head(fitted, N), torch.zeros(N)
    found, newest_three = (add_head(flat, scores, lay_out_past(flat, None, some), 0) for some in (newest, newest[-3:]))
    assert torch.equal(found, newest_three)
    if not [item for item in newest if item < N]:
        assert torch.allclose(found, flat.plain)
