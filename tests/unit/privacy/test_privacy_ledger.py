"""The ledger loses nothing and is on disk before a release."""

import errno
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.errors import ConfigError, DataError, StorageError
from protofed.privacy.ledger import (
    Release,
    add_release,
    claim,
    from_json,
    read_ledger,
    record_ahead,
    share_beside,
    share_with_base_events,
    streams,
    to_json,
    write_ledger,
)

releases = st.builds(
    Release,
    noise_multiplier=st.floats(0, 100),
    sampling_rate=st.floats(1e-6, 1),
    count=st.integers(1, 1000),
    stream=st.text(max_size=8),
    max_uploads=st.none() | st.integers(1, 50),
)


@given(st.lists(releases, max_size=5).map(tuple), st.sampled_from(["central", "secure-aggregation", "local"]))
def test_a_ledger_survives_being_written_and_read(ledger, trust):
    assert from_json(to_json(ledger, trust=trust)) == (ledger, trust)


@given(st.lists(releases, max_size=6))
def test_recording_one_by_one_keeps_every_round_of_every_stream(entries):
    ledger = ()
    for release in entries:
        ledger = add_release(ledger, release)
    assert streams(ledger) == streams(tuple(entries))
    assert sum(release.uploads for release in ledger) == sum(release.uploads for release in entries)


def test_the_claim_says_the_runs_delta_and_the_logs_share_word_for_word():
    assert claim([1e-5], [0.9893]) == (
        "(ε, δ) joint user-level differential privacy for a user's events after the base block, add / remove all of "
        "them, δ = 1e-5. Events in the base block are not protected (98.9 % of later users have some). The catalogue, "
        "slice edges, the number of clients, preprocessing and hyper-parameters are taken as public; published metrics "
        "are not covered."
    )
    assert "δ = 2.5e-6. Events in the base block are not protected (some later users have some)." in claim([2.5e-6])
    assert "δ = 1e-6 or 1e-5. " in claim({1e-5, 1e-6})
    assert "(56.1 to 98.9 % of later users" in claim([1e-5], [0.9893, 0.5612, 0.7])
    assert "(100 % of later users" in claim([1e-5], [1.0])


def test_the_share_is_of_users_with_events_after_the_base_block():
    users = np.array([0, 1, 1, 2, 0, 3, 3, 4, 2])
    assert share_with_base_events(users, 4) == 2 / 4  # 0 and 2 of 0, 2, 3, 4
    assert share_with_base_events(users, len(users)) == 0


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"later_users_with_base_events": "all"}'])
def test_a_run_that_wrote_no_share_has_none(tmp_path, text):
    if text is not None:
        (tmp_path / "environment.json").write_text(text)
    assert share_beside(tmp_path / "ledger.json") is None


def test_equal_rounds_are_one_entry_and_different_noise_is_another():
    ledger = ()
    for _ in range(3):
        ledger = add_release(ledger, Release(1.2, 0.05))
    ledger = add_release(ledger, Release(1.3, 0.05))
    assert ledger == (Release(1.2, 0.05, 3), Release(1.3, 0.05))


def test_capped_releases_are_never_merged_since_each_cap_is_its_own():
    capped = Release(1.2, 0.05, 20, max_uploads=1)
    ledger = add_release(add_release((), capped), capped)
    assert ledger == (capped, capped)
    assert sum(release.uploads for release in ledger) == 2


def test_the_release_is_on_disk_before_the_caller_gets_to_make_it(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = ()
    for round_ in range(3):
        ledger = record_ahead(path, ledger, Release(1.2, 0.05), trust="local", noise="operating-system")
        assert read_ledger(path) == ((Release(1.2, 0.05, round_ + 1),), "local")
    assert json.loads(path.read_text())["noise"] == "operating-system"


def test_a_failed_write_leaves_the_ledger_as_it_was_and_makes_no_release(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    write_ledger(path, (Release(1.2, 0.05),))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(StorageError, match=r"ledger\.json: No space left on device; make room"):
        record_ahead(path, (Release(1.2, 0.05),), Release(1.2, 0.05))
    assert read_ledger(path)[0] == (Release(1.2, 0.05),)
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.json"]


@pytest.mark.parametrize(
    "text",
    [
        *["", "[]", "{}", '{"format": "protofed-ledger-1"}'],
        '{"format": "protofed-ledger-1", "trust": "blind", "releases": []}',
        to_json((Release(1.25, 1.0),)).replace("1.25", "-1"),
        to_json((Release(1.25, 1.0),)).replace("1.25", '"much"'),
        '{"format": "protofed-ledger-1", "trust": "central", "releases": [{"sigma": 1}]}',
    ],
)
def test_a_damaged_ledger_is_refused_in_one_line_that_names_the_file(tmp_path, text):
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"ledger\.json is not a ledger of format protofed-ledger-1") as problem:
        read_ledger(path)
    assert "\n" not in str(problem.value)


def test_a_missing_ledger_is_refused(tmp_path):
    with pytest.raises(DataError, match="no ledger at"):
        read_ledger(tmp_path / "ledger.json")


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ({"noise_multiplier": -0.1}, "finite number >= 0, got -0.1"),
        ({"noise_multiplier": float("nan")}, "finite number >= 0, got nan"),
        ({"sampling_rate": 0.0}, "above 0 and at most at 1, got 0"),
        ({"sampling_rate": 1.1}, "above 0 and at most at 1, got 1.1"),
        ({"count": 0}, "at least 1 round, got 0"),
        ({"max_uploads": 0}, "at least 1, got 0"),
    ],
)
def test_a_release_that_cannot_be_is_refused(bad, rule):
    with pytest.raises(ConfigError, match=rule):
        Release(**{"noise_multiplier": 1.0, "sampling_rate": 0.1, **bad})
