"""Files of vectors that are cut, flipped, stretched or full of odd numbers: read, or refused in one line."""

import io
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protofed.errors import DataError
from protofed.features.vectors import read_vectors

ITEMS = pa.table({"item": pa.array(list("abcd"), pa.large_string())})
CASES = 300


def npy(values: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, values)
    return made.getvalue()


def parquet(**columns: object) -> bytes:
    made = io.BytesIO()
    pq.write_table(pa.table(columns), made)
    return made.getvalue()


NUMBERS = np.random.default_rng(0).normal(size=(4, 3))
WHOLE = {
    ".npy": [npy(NUMBERS), npy(NUMBERS.astype(">f4")), npy(np.arange(12).reshape(4, 3))],
    ".parquet": [
        parquet(item=list("abcd"), vector=NUMBERS.tolist()),
        parquet(item=list("abe"), x=[1.0, 2.0, 3.0], y=[1, 2, 3]),
        parquet(item=["a"], vector=pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))),
    ],
}


def broken(seed: int) -> tuple[str, bytes]:
    """A file that something happened to."""
    draws = random.Random(seed)
    suffix = draws.choice(sorted(WHOLE))
    content = bytearray(draws.choice(WHOLE[suffix]))
    place = draws.randrange(len(content))
    what = draws.randrange(4)
    if what == 0:
        del content[place:]
    elif what == 1:
        content[place] = draws.randrange(256)
    elif what == 2:
        content[place:place] = draws.randbytes(draws.choice((1, 50)))
    else:
        shape = draws.choice((b"(9, 9)", b"(0, 3)", b"(-1,3)", b"(4,  )", b"99,999", b"((((((", b"(4,3j)"))
        content = bytearray(bytes(content).replace(b"(4, 3)", shape))
    return suffix, bytes(content)


def refusal(file: Path) -> str:
    """What is said against the file; nothing where it is read."""
    try:
        assert np.isfinite(read_vectors(file, ITEMS).vectors.numpy()).all()
    except DataError as problem:
        return str(problem)
    return ""


def test_300_broken_files_of_vectors_are_read_or_refused_in_one_line(tmp_path):
    said = []
    for seed in range(CASES):
        suffix, content = broken(seed)
        file = tmp_path / f"vectors{suffix}"
        file.write_bytes(content)
        said.append(refusal(file))
    assert [line for line in said if len(line.splitlines()) > 1] == []
    assert CASES / 2 < sum(map(bool, said)) < CASES


@pytest.mark.parametrize("value", [1e300, -4e38, np.inf, np.nan])
def test_numbers_that_are_none_in_single_precision_are_refused(tmp_path, value):
    values = NUMBERS.copy()
    values[2, 1] = value
    (tmp_path / "vectors.npy").write_bytes(npy(values))
    with pytest.raises(DataError, match="the one of item 'c' holds NaN, infinity or more than 3e38; leave the item"):
        read_vectors(tmp_path / "vectors.npy", ITEMS)
