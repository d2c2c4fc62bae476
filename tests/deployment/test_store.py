"""The SQLite file of a host: what is in it survives, what was not finished never was."""

import random
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cohorts import devices_with, drawn

from protofed.deployment.host import read_events
from protofed.deployment.server import read_cuts
from protofed.deployment.store import bytes_of, opened, secret_of, state_of
from protofed.errors import DataError, RunFolderError, StorageError


def put_and_break(path, state):
    """A transaction that ends with the power."""
    with opened(path) as kept:
        kept.put("devices", state)
        kept.write("uploads", b"1")
        raise RuntimeError


def test_a_state_survives_and_one_of_a_broken_transaction_does_not(tmp_path):
    first, second = (devices_with(torch.arange(3), drawn(3, 1, 8, seed=seed)) for seed in (1, 2))
    with opened(tmp_path / "a.sqlite") as kept:
        assert kept.get("devices") is None
        kept.put("devices", first)
    with pytest.raises(RuntimeError):
        put_and_break(tmp_path / "a.sqlite", second)
    with opened(tmp_path / "a.sqlite") as kept:
        assert torch.equal(kept.get("devices").prompts.long, first.prompts.long)
        assert kept.read("uploads") is None


def test_the_secret_is_drawn_once_for_a_file(tmp_path):
    secrets = set()
    for name in ("a", "a", "b"):
        with opened(tmp_path / name) as kept:
            secrets.add(secret_of(kept))
    assert sorted(map(len, secrets)) == [32, 32]


def test_what_is_no_store_and_what_is_no_state_are_one_line(tmp_path):
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one" * 20)
    with pytest.raises(StorageError, match="device states cannot be kept there"), opened(tmp_path / "text"):
        pass
    with pytest.raises(DataError, match="a state of the store could not be read"):
        state_of(b"12345678")
    whole = bytes_of(devices_with(torch.arange(2), drawn(2, 1, 8)))
    with pytest.raises(DataError, match="could not be read"):
        state_of(whole.replace(b"protofed-store-1", b"protofed-store-0"))


def test_no_flipped_bit_and_no_cut_of_a_state_is_taken_for_one():
    whole = bytes_of(devices_with(torch.arange(2), drawn(2, 1, 8)))
    rng = random.Random(0)
    damaged = [whole[: rng.randrange(len(whole))] for _ in range(100)]
    for _ in range(400):
        place = rng.randrange(len(whole))
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
    for blob in damaged:
        with pytest.raises(DataError, match="a state of the store could not be read"):
            state_of(blob)


@pytest.mark.parametrize("text", [b"", b"[", b"{}1", b'[{"index": 1}]', b"[1]", b"\xff", b"null"])
def test_damaged_edges_of_slices_are_one_line(tmp_path, text):
    (tmp_path / "cuts.json").write_bytes(text)
    with pytest.raises(RunFolderError, match=r"cuts.json cannot be read .*; copy it from where the federation began$"):
        read_cuts(tmp_path / "cuts.json")


def test_damaged_events_of_a_host_are_one_line(tmp_path):
    file, rng = tmp_path / "events.parquet", random.Random(1)
    pq.write_table(pa.table({"user": [1, 2, 2], "time": [5, 6, 7]}), file)
    whole = file.read_bytes()
    assert read_events(file).num_rows == 3
    for size in (0, 3, len(whole) // 2, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(30))):
        file.write_bytes(whole[:size])
        with pytest.raises(RunFolderError, match=r"^.*events.parquet cannot be read \(.*\); copy it"):
            read_events(file)
    file.unlink()
    with pytest.raises(RunFolderError, match="cannot be read"):
        read_events(file)


def test_keys_of_a_federation_are_for_their_owner_alone_and_fit_each_other(tmp_path):
    pytest.importorskip("flwr", reason="the extra `federated` is not installed")
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    from protofed.deployment.flower.certificates import write_certificates

    write_certificates(Path(tmp_path), 2)
    for name in ("server.key", "node-0", "node-1"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    authority, leaf = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in ("ca.crt", "server.pem")
    )
    leaf.verify_directly_issued_by(authority)
    private = serialization.load_ssh_private_key((tmp_path / "node-0").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "node-0.pub").read_bytes())
    assert private.public_key() == public
    assert (tmp_path / "node-0").read_bytes() != (tmp_path / "node-1").read_bytes()
