"""Whatever arrives, the round goes on with what can be used; how it arrives changes no bit of the library."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from cohorts import D, K, cohort, devices_with, drawn, model_with
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.client.upload import FORMAT, Upload, from_bytes, make_upload, to_bytes
from protofed.errors import DataError
from protofed.privacy.draws import SeededDraws
from protofed.privacy.mechanism import seeded_noise
from protofed.privacy.upload import NOTHING, RoundRule, UploadRule, local_length, local_reach
from protofed.seeds import stream
from protofed.server.accept import Accepted, accept, first_copies
from protofed.server.aggregate import RoundReport, server_aggregate
from protofed.server.library import PrototypeLibrary, new_library

SEED, ROUND, VERSION = 9, 5, 3
UPLOAD = UploadRule(K, D)
CENTRAL = RoundRule(UPLOAD, 1.0)
LOCAL = RoundRule(UPLOAD, 1.0, "local")
SECURE = RoundRule(UPLOAD, 1.0, "secure-aggregation", least=4)
COMPACT = RoundRule(UPLOAD, 1.0, "local", "geometric-median")
TWO_POINTS = RoundRule(UPLOAD, 0.0, aggregator="barycenter")
RULES = {"central": CENTRAL, "local": LOCAL, "secure": SECURE, "compact": COMPACT, "two points": TWO_POINTS}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def library() -> PrototypeLibrary:
    return replace(new_library(unit(drawn(K, D, seed=4))), version=VERSION)


def uploads_of(n: int, rule: RoundRule, seed: int = 0) -> Upload:
    users, z = cohort(n, seed, points=rule.points)
    return make_upload(model_with(library().v, VERSION), devices_with(users, z), rule, SeededDraws(SEED), ROUND)


def some_of(upload: Upload, places: Tensor | slice) -> Upload:
    return replace(upload, tokens=upload.tokens[places], block=upload.block[places], codes=upload.codes[places])


def one_by_one(upload: Upload) -> list[Upload]:
    return [some_of(upload, slice(u, u + 1)) for u in range(len(upload))]


def round_of(uploads: Iterable[Upload], rule: RoundRule) -> tuple[PrototypeLibrary, RoundReport, dict[str, int]]:
    accepted = arrived(uploads, rule)
    noise, parting = seeded_noise(stream(1, "noise")), stream(1, "parting")
    return *server_aggregate(library(), accepted, rule, noise, parting), dict(accepted.refused)


def same(one: PrototypeLibrary, other: PrototypeLibrary) -> bool:
    columns = ("v", "ema_sums", "ema_counts")
    return one.version == other.version and all(torch.equal(getattr(one, c), getattr(other, c)) for c in columns)


def arrived(uploads: Iterable[Upload], rule: RoundRule) -> Accepted:
    return accept(uploads, rule, round_=ROUND, version=VERSION)


def check_same(one: Accepted, other: Accepted) -> None:
    """All that a server has of a round, to the bit but for float sums of local rows, which other stacks add anew."""
    assert one.n == other.n
    assert torch.equal(one.points, other.points)
    assert torch.equal(one.block, other.block)
    assert (one.total is None) == (other.total is None)
    if one.total is not None:
        atol = 0 if one.total.dtype == torch.int64 else 1e-9
        torch.testing.assert_close(one.total, other.total, atol=atol, rtol=0)


def check_refused(good: Upload, bad: Upload, rule: RoundRule, reason: str, times: int) -> None:
    """Wherever the bad upload comes, it is counted with its reason, and the round is the one without it."""
    expected = arrived([good], rule)
    assert expected.refused == {}
    for arrival in ([good, bad], [bad, good], [*one_by_one(good)[:2], bad, *one_by_one(good)[2:]]):
        accepted = arrived(arrival, rule)
        assert accepted.refused == {reason: times}
        check_same(accepted, expected)
        if rule in (CENTRAL, SECURE):
            after, report, _ = round_of(arrival, rule)
            assert same(after, round_of([good], rule)[0])
            assert (report.uploads, report.refused) == (len(good), times)


def kind_and_shape(rule: RoundRule) -> str:
    kind = "torch.int64" if rule is SECURE else "torch.int8"
    shape = f"{K}x{D + 1}" if rule in (LOCAL, SECURE) else f"{rule.points}x{D}"
    return f"codes are not {kind} of shape {shape}"


@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_codes_that_are_no_whole_numbers_are_refused(rule, bad):
    good, more = uploads_of(8, rule), uploads_of(3, rule, seed=20)
    broken = more.codes.double()
    broken[1, 0, 2] = bad
    check_refused(good, replace(more, codes=broken), rule, kind_and_shape(rule), 3)


@every_rule
@pytest.mark.parametrize("kind", [torch.int64, torch.int8, torch.int16, torch.uint8, torch.bool, torch.float16])
def test_codes_of_another_type_are_refused(rule, kind):
    good, more = uploads_of(8, rule), uploads_of(3, rule, seed=20)
    if kind != good.codes.dtype:
        check_refused(good, replace(more, codes=more.codes.to(kind)), rule, kind_and_shape(rule), 3)


@every_rule
@pytest.mark.parametrize(
    "change",
    [
        lambda codes: codes[..., :-1],
        lambda codes: torch.cat([codes, codes[..., :1]], dim=-1),
        lambda codes: torch.cat([codes, codes[:, :1]], dim=1),
        lambda codes: codes[:, :0],
        lambda codes: codes[:2],
        lambda codes: codes[:, 0],
        lambda codes: codes[None],
        lambda codes: codes[0, 0, 0],
    ],
    ids=["narrow", "wide", "more rows", "no row", "too few", "flat", "deep", "a number"],
)
def test_codes_of_another_shape_are_refused(rule, change):
    good, more = uploads_of(8, rule), uploads_of(3, rule, seed=20)
    check_refused(good, replace(more, codes=change(more.codes)), rule, kind_and_shape(rule), 3)


@every_rule
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": VERSION - 1}, "made for other prototypes"),
        ({"version": VERSION + 1}, "made for other prototypes"),
        ({"round_": ROUND - 1}, "of a round that is over"),
        ({"round_": ROUND + 1}, "of a round that has not begun"),
    ],
)
def test_uploads_of_another_round_or_version_are_refused(rule, change, reason):
    check_refused(uploads_of(8, rule), replace(uploads_of(3, rule, seed=20), **change), rule, reason, 3)


@every_rule
@pytest.mark.parametrize("index", [K, NOTHING - 1, 2**62, -(2**62)])
def test_an_index_outside_of_the_library_is_refused(rule, index):
    good, bad = uploads_of(8, rule), uploads_of(1, rule, seed=20)
    check_refused(good, replace(bad, block=torch.tensor([index])), rule, f"an index outside 0..{K - 1}", 1)


COLUMNS = "tokens and index are not whole numbers, one of each for a device"


@every_rule
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens", lambda column: column.double()),
        ("tokens", lambda column: column.int()),
        ("tokens", lambda column: column[:, None]),
        ("tokens", lambda column: column[0]),
        ("block", lambda column: column.double()),
        ("block", lambda column: column.double() * math.nan),
        ("block", lambda column: column.int()),
        ("block", lambda column: column[:, None]),
        ("block", lambda column: column[0]),
        ("block", lambda column: torch.cat([column, column])),
    ],
)
def test_tokens_and_indices_that_are_not_one_number_a_device_are_refused(rule, name, change):
    good, more = uploads_of(8, rule), uploads_of(1, rule, seed=20)
    check_refused(good, replace(more, **{name: change(getattr(more, name))}), rule, COLUMNS, 1)


@every_rule
def test_an_upload_that_arrives_again_counts_once(rule):
    good = uploads_of(8, rule)
    again = some_of(good, torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 2, 2, 5]))
    singles = one_by_one(good)
    arrivals = [
        [again],  # inside a stack
        [good, some_of(good, torch.tensor([5, 2, 2]))],  # across stacks
        [some_of(good, slice(0, 6)), some_of(good, torch.tensor([5, 2, 6, 7, 2]))],  # both
        [*singles[:4], singles[2], *singles[4:], singles[2], singles[5]],  # messages
    ]
    for arrival in arrivals:
        accepted = arrived(arrival, rule)
        assert accepted.refused == {"sent twice": 3}
        check_same(accepted, arrived([good], rule))


def test_a_library_is_the_same_when_uploads_arrive_again():
    for rule in (CENTRAL, SECURE):
        good = uploads_of(8, rule)
        after, report, _ = round_of([good, *one_by_one(good), good], rule)
        assert same(after, round_of([good], rule)[0])
        assert (report.uploads, report.refused) == (8, 16)


def test_a_second_copy_with_other_contents_does_not_replace_the_first():
    good = uploads_of(8, CENTRAL)
    other = replace(some_of(uploads_of(8, CENTRAL, seed=20), slice(0, 1)), tokens=good.tokens[3:4])
    after, _, refused = round_of([good, other], CENTRAL)
    assert same(after, round_of([good], CENTRAL)[0])
    assert refused == {"sent twice": 1}


@given(st.lists(st.integers(-3, 3), max_size=12), st.sets(st.integers(-3, 3)))
def test_first_copies_are_those_of_a_loop(tokens, seen):
    by_hand, known = [], set(seen)
    for token in tokens:
        by_hand.append(token not in known)
        known.add(token)
    columns = (torch.tensor(list(values), dtype=torch.int64) for values in (tokens, seen))
    assert first_copies(*columns).tolist() == by_hand


def test_a_round_of_nothing_but_refused_uploads_is_an_empty_round():
    for rule in RULES.values():
        bad = replace(uploads_of(3, rule), version=VERSION + 1)
        empty, _, _ = round_of([], rule)
        after, report, refused = round_of([bad], rule)
        assert same(after, empty)
        assert (report.uploads, refused) == (0, {"made for other prototypes": 3})


def test_every_reason_is_counted_apart():
    good, bad = uploads_of(8, CENTRAL), uploads_of(2, CENTRAL, seed=20)
    arrival = [replace(bad, version=0), replace(bad, round_=0), good, replace(bad, codes=bad.codes.float()), good]
    _, report, refused = round_of(arrival, CENTRAL)
    width = kind_and_shape(CENTRAL)
    assert refused == {"made for other prototypes": 2, "of a round that is over": 2, width: 2, "sent twice": 8}
    assert report.refused == 14


def stacked(upload: Upload, order: Tensor, sizes: list[int]) -> list[Upload]:
    """The uploads in another order, and in stacks of these sizes."""
    return [some_of(upload, part) for part in order.split(sizes)]


@settings(max_examples=15)
@given(st.integers(1, 30), st.integers(0, 2**32 - 1), st.data())
def test_neither_arrival_nor_stacks_change_what_the_server_has_of_a_round(n, seed, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    order = torch.randperm(n, generator=Generator().manual_seed(seed))
    for rule in RULES.values():
        upload = uploads_of(n, rule, seed)
        for arrival in (stacked(upload, order, sizes), one_by_one(some_of(upload, order))):
            check_same(arrived(arrival, rule), arrived([upload], rule))
            if rule in (CENTRAL, SECURE):
                assert same(round_of(arrival, rule)[0], round_of([upload], rule)[0])


@pytest.mark.parametrize("rule", [TWO_POINTS, COMPACT], ids=["two points", "compact"])
def test_neither_arrival_nor_stacks_change_a_bit_of_a_robust_library(rule):
    upload = uploads_of(12, rule)
    order = torch.randperm(12, generator=Generator().manual_seed(1))
    assert same(round_of(stacked(upload, order, [5, 0, 6, 1]), rule)[0], round_of([upload], rule)[0])


def test_neither_arrival_nor_stacks_change_a_local_library_beyond_the_rounding_of_float64_sums():
    upload = uploads_of(30, LOCAL)
    expected, _, _ = round_of([upload], LOCAL)
    for seed in range(5):
        order = torch.randperm(30, generator=Generator().manual_seed(seed))
        after, _, _ = round_of(stacked(upload, order, [7, 0, 22, 1]), LOCAL)
        torch.testing.assert_close(after.v, expected.v, atol=1e-6, rtol=0)
        torch.testing.assert_close(after.ema_sums, expected.ema_sums, atol=1e-6, rtol=0)


def test_the_server_works_on_uploads_in_the_order_of_their_tokens():
    upload = uploads_of(30, CENTRAL)
    accepted = arrived(one_by_one(upload), CENTRAL)
    order = sorted(range(30), key=lambda u: int(upload.tokens[u]))
    assert order != list(range(30))
    assert torch.equal(accepted.block, upload.block[order])
    by_hand = upload.codes[order].double() / 127
    by_hand = by_hand / by_hand.norm(dim=-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(accepted.points.double(), by_hand, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", [CENTRAL, TWO_POINTS], ids=["central", "two points"])
def test_codes_of_a_cheating_device_are_clipped_to_the_radius_by_the_server(rule):
    rule = replace(rule, upload=replace(UPLOAD, clip_radius=0.7))
    good = uploads_of(8, rule)
    cheat = replace(uploads_of(1, rule, seed=20), codes=torch.full((1, rule.points, D), -128, dtype=torch.int8))
    accepted = arrived([good, cheat], rule)
    lengths = accepted.points.double().norm(dim=-1)
    assert (lengths <= 0.7 * (1 + 1e-6)).all()
    theirs = (accepted.points < 0).all(-1).all(-1)
    assert int(theirs.sum()) == 1
    torch.testing.assert_close(accepted.points[theirs], torch.full((1, rule.points, D), -0.7 / math.sqrt(D)))


@pytest.mark.parametrize(("rule", "numbers"), [(LOCAL, K * (D + 1)), (COMPACT, D)], ids=["local", "compact"])
def test_a_cheating_device_adds_no_more_than_an_honest_ones_noise_may(rule, numbers):
    """Before, every number could be at the end of its range: four standard deviations and the radius."""
    honest, std = uploads_of(64, rule), 2.0
    cheat = replace(honest, codes=torch.full_like(honest.codes, -128))
    longest = local_length(UPLOAD, std, numbers)
    assert longest < (1 + 4 * std) * math.sqrt(numbers)
    for upload, cut in ((honest, False), (cheat, True)):
        for alone in one_by_one(upload):
            accepted = arrived([alone], rule)
            told = accepted.points if accepted.total is None else accepted.total
            length = float(told.double().norm())
            sent = float((alone.codes.double().clamp(min=-127) * local_reach(UPLOAD, std) / 127).norm())
            assert length == pytest.approx(longest if cut else sent, rel=1e-6)
            assert (sent > longest) == cut


def test_a_local_upload_of_pure_noise_is_hardly_ever_as_long_as_the_server_cuts():
    std, n = 2.0, 20_000
    lengths = (std * torch.randn(n, K * (D + 1), generator=stream(3, "honest"))).norm(dim=1)
    assert float(lengths.max()) < local_length(UPLOAD, std, K * (D + 1)) - UPLOAD.sensitivity


def test_noised_embeddings_are_not_shortened():
    upload = uploads_of(8, COMPACT)
    accepted = arrived([upload], COMPACT)
    by_hand = upload.codes.double() * local_reach(UPLOAD, 2.0) / 127
    torch.testing.assert_close(accepted.points.double(), by_hand[upload.tokens.argsort()], atol=1e-5, rtol=0)
    assert (accepted.points.norm(dim=-1) > 2).all()


def test_nothing_but_the_total_is_kept_where_devices_send_all_rows():
    for rule in (LOCAL, SECURE):
        upload = uploads_of(8, rule)
        accepted = arrived([upload], rule)
        assert (accepted.n, len(accepted.points), len(accepted.block)) == (8, 0, 0)
        assert accepted.total.shape == (K, D + 1)
    assert torch.equal(accepted.total, upload.codes.sum(0) % 2**32)


@every_rule
def test_an_upload_survives_its_bytes(rule):
    upload = uploads_of(8, rule)
    for part in (upload, *one_by_one(upload), some_of(upload, slice(0, 0))):
        back = from_bytes(to_bytes(part))
        assert (back.round_, back.version) == (part.round_, part.version)
        for name in ("tokens", "block", "codes"):
            there, here = getattr(back, name), getattr(part, name)
            assert there.dtype == here.dtype
            assert torch.equal(there, here)
    messages = [from_bytes(to_bytes(part)) for part in one_by_one(upload)]
    check_same(arrived(messages, rule), arrived([upload], rule))


def test_a_blob_that_was_cut_anywhere_is_refused_in_one_line():
    blob = to_bytes(uploads_of(2, CENTRAL))
    for end in (0, 1, 7, 8, 9, 40, len(blob) // 2, len(blob) - 1):
        with pytest.raises(DataError, match=r"^an upload could not be read: .+$") as refused:
            from_bytes(blob[:end])
        assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match=r"^an upload could not be read: .+$"):
        from_bytes(blob + b"more")


def a_blob(about: dict[str, str] | None, **tensors: Tensor) -> bytes:
    zeros = {name: torch.zeros(1, dtype=torch.int64) for name in ("tokens", "block", "codes")}
    return bytes(save({**zeros, **tensors}, metadata=about))


@pytest.mark.parametrize(
    "blob",
    [
        a_blob(None),
        a_blob({}),
        a_blob({"format": "protofed-upload-0", "round": "1", "version": "0"}),
        a_blob({"format": FORMAT, "version": "0"}),
        a_blob({"format": FORMAT, "round": "1"}),
        a_blob({"format": FORMAT, "round": "first", "version": "0"}),
        bytes(save({"codes": torch.zeros(1)}, metadata={"format": FORMAT, "round": "1", "version": "0"})),
        b"not a blob at all, but longer than a header",
    ],
    ids=["no metadata", "no format", "old format", "no round", "no version", "no number", "no tokens", "text"],
)
def test_a_blob_of_another_format_is_refused_in_one_line(blob):
    with pytest.raises(DataError, match=r"^an upload could not be read: .+$") as refused:
        from_bytes(blob)
    assert "\n" not in str(refused.value)


def test_a_readable_message_with_anything_in_it_is_refused_where_it_is_accepted():
    good = uploads_of(8, CENTRAL)
    about = {"format": FORMAT, "round": str(ROUND), "version": str(VERSION)}
    bad = from_bytes(a_blob(about, codes=torch.full((1, 1, D), math.nan)))
    check_refused(good, bad, CENTRAL, kind_and_shape(CENTRAL), 1)
    number = from_bytes(a_blob(about, tokens=torch.tensor(7), codes=torch.zeros(1, 1, D, dtype=torch.int8)))
    check_refused(good, number, CENTRAL, COLUMNS, 1)
