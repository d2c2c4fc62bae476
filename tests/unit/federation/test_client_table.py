"""The table of all clients: in memory or in mapped files it holds the same, and only the rows that were written."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from protofed.client.drift import DriftState, no_drift, observe
from protofed.client.prompts import PromptState
from protofed.errors import ConfigError
from protofed.federation.table import (
    ClientTable,
    drift_of,
    grown,
    keep_drift,
    keep_prompts,
    new_table,
    prompts_of,
)

CPU = torch.device("cpu")
N, L_P, WIDTH, D_Z = 9, 2, 4, 3
NAMES = [f.name for f in fields(ClientTable)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def made(kind: str, folder, n: int = N) -> ClientTable:
    if kind == "mapped":
        return new_table(n, L_P, WIDTH, D_Z, folder=folder / "table")
    return new_table(n, L_P, WIDTH, D_Z, device="cpu" if kind == "host" else CPU)


KINDS = ["device", "host", "mapped"]


def written(table: ClientTable) -> ClientTable:
    """The table after some users were met, in no order and partly twice."""
    for turn, users in enumerate(([4, 0, 7], [7, 2], [8])):
        at = torch.tensor(users)
        prompts = PromptState(*(drawn(len(users), L_P, WIDTH, seed=10 * turn + n) for n in (0, 1)))
        keep_prompts(table, at, prompts)
        keep_drift(table, at, observe(drift_of(table, at, CPU), drawn(len(users), D_Z, seed=10 * turn + 2)))
        table.met[at] = True
        table.losses[at] += turn + 1
    return table


def slow_table() -> dict[str, list]:
    """The same, user by user in dictionaries."""
    users: dict[int, dict[str, Tensor | int]] = {}
    drift = {u: no_drift(1, D_Z) for u in range(N)}
    for turn, met in enumerate(([4, 0, 7], [7, 2], [8])):
        long, short, h = (drawn(len(met), *s, seed=10 * turn + n) for n, s in enumerate([(L_P, WIDTH)] * 2 + [(D_Z,)]))
        for n, u in enumerate(met):
            drift[u] = observe(drift[u], h[n : n + 1])
            before = users.get(u, {}).get("losses", 0)
            users[u] = {"long": long[n], "short": short[n], "losses": before + turn + 1}
    empty = {"long": torch.zeros(L_P, WIDTH), "short": torch.zeros(L_P, WIDTH), "losses": 0}
    every = [users.get(u, empty) for u in range(N)]
    table = {name: torch.stack([row[name] for row in every]) for name in ("long", "short")}
    table |= {name: torch.cat([getattr(drift[u], name) for u in range(N)]) for name in ("mean", "step", "total")}
    table["periods"] = torch.cat([drift[u].periods for u in range(N)])
    table["met"] = torch.tensor([u in users for u in range(N)])
    table["losses"] = torch.tensor([[float(row["losses"])] * 4 for row in every])
    return table


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_table_knows_nobody(kind, tmp_path):
    table = made(kind, tmp_path)
    assert len(table) == N
    assert not any(bool(getattr(table, name).any()) for name in NAMES)
    assert (table.periods.dtype, table.met.dtype, table.long.dtype) == (torch.int64, torch.bool, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_table_holds_what_a_dictionary_would(kind, tmp_path):
    table, expected = written(made(kind, tmp_path)), slow_table()
    for name in NAMES:
        torch.testing.assert_close(getattr(table, name), expected[name], atol=1e-7, rtol=0, msg=name)


def test_the_three_kinds_agree_bit_for_bit(tmp_path):
    device, host, mapped = (written(made(kind, tmp_path)) for kind in KINDS)
    for name in NAMES:
        assert torch.equal(getattr(device, name), getattr(host, name))
        assert torch.equal(getattr(device, name), getattr(mapped, name))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_a_copy_in_the_order_asked_for(kind, tmp_path):
    table = written(made(kind, tmp_path))
    users = torch.tensor([7, 0, 7])
    prompts, drift = prompts_of(table, users, CPU), drift_of(table, users, CPU)
    assert isinstance(drift, DriftState)
    for n, u in enumerate(users.tolist()):
        assert torch.equal(prompts.long[n], table.long[u])
        assert torch.equal(prompts.short[n], table.short[u])
        assert torch.equal(drift.mean[n], table.mean[u])
        assert int(drift.periods[n]) == int(table.periods[u])
    before = table.long.clone()
    prompts.long.zero_()
    assert torch.equal(table.long, before)


def test_a_mapped_table_lies_in_its_files(tmp_path):
    table = written(made("mapped", tmp_path))
    kinds = {"periods": np.int64, "met": np.bool_}
    for name in NAMES:
        column = getattr(table, name)
        on_disk = np.fromfile(tmp_path / "table" / f"{name}.bin", dtype=kinds.get(name, np.float32))
        assert np.array_equal(on_disk.reshape(column.shape), column.numpy())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_there_already_is_refused_in_one_line_and_left_alone(name, tmp_path):
    path = tmp_path / "table" / f"{name}.bin"
    path.parent.mkdir()
    path.write_bytes(b"somebody's")
    with pytest.raises(ConfigError) as problem:
        made("mapped", tmp_path)
    assert str(problem.value) == f"{path} is there already; a mapped table wants a folder of its own"
    assert path.read_bytes() == b"somebody's"


def test_two_mapped_tables_cannot_share_a_folder(tmp_path):
    first = written(made("mapped", tmp_path))
    before = first.long.clone()
    with pytest.raises(ConfigError, match="there already"):
        made("mapped", tmp_path)
    assert torch.equal(first.long, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_table_keeps_its_rows_and_has_met_nobody_new(kind, tmp_path):
    table = written(made(kind, tmp_path))
    for n in (N, N + 1, 3 * N):
        bigger = grown(table, n)
        assert len(bigger) == n
        for name in NAMES:
            assert torch.equal(getattr(bigger, name)[:N], getattr(table, name))
            assert not getattr(bigger, name)[N:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_writing_to_a_grown_table_leaves_the_old_one(kind, tmp_path):
    table = written(made(kind, tmp_path))
    before = {name: getattr(table, name).clone() for name in NAMES}
    for n in (N, N + 2):
        bigger = grown(table, n)
        for name in NAMES:
            getattr(bigger, name).fill_(1)
        assert all(torch.equal(getattr(table, name), column) for name, column in before.items())


def test_a_table_cannot_shrink():
    with pytest.raises(ConfigError, match="a table of 9 users cannot shrink to 8"):
        grown(made("device", None), N - 1)


def test_a_table_of_nobody_can_be_made_everywhere_and_grow(tmp_path):
    for kind in KINDS:
        empty = made(kind, tmp_path, n=0)
        assert len(empty) == 0
        assert len(grown(empty, 3)) == 3
