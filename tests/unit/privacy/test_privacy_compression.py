"""Quantisers are unbiased and bounded; what is fitted is fitted well."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from protofed.errors import ConfigError, MissingExtra
from protofed.privacy.compression import LEVELS, Codebooks, dequantise, fit_codebooks, fit_pca, quantise
from protofed.privacy.draws import uniform
from protofed.seeds import stream


@example(2.0, 1.2790792617268734, 0.0)
@given(st.floats(-3, 3), st.floats(0.5, 3), st.floats(0.0, 1.0, exclude_max=True))
def test_rounding_moves_a_number_by_less_than_a_step(x, reach, u):
    x = max(-reach, min(reach, x))
    code = quantise(torch.tensor([x], dtype=torch.float64), reach, torch.tensor([u], dtype=torch.float64))
    rounding = reach * torch.finfo(torch.float32).eps  # what comes back is a 32-bit number of that size
    assert abs(dequantise(code, reach).item() - x) <= reach / LEVELS + rounding


def test_rounding_is_right_on_average():
    x = torch.tensor([0.123, -0.777, 0.0, 1.0, 0.003]).expand(40_000, 5)
    back = dequantise(quantise(x, 1.0, uniform(0, "rounding", torch.arange(40_000), 0, (5,))), 1.0)
    step = 1 / LEVELS
    assert torch.allclose(back.mean(dim=0), x[0], atol=4 * 0.5 * step / math.sqrt(40_000))
    assert (back[:, 2] == 0).all()
    assert (back[:, 3] == 1).all()


def test_numbers_outside_the_range_are_cut_off_and_nan_becomes_zero():
    x = torch.tensor([5.0, -5.0, math.inf, -math.inf, math.nan])
    assert quantise(x, 1.0, torch.full((5,), 0.5)).tolist() == [127, -127, 127, -127, 0]


def test_a_code_no_honest_client_sends_still_stays_in_the_range():
    assert dequantise(torch.tensor([-128], dtype=torch.int8), 2.0).item() == -2.0


def test_pca_keeps_a_plane_exactly_and_compresses_it_to_its_coordinates():
    rng = stream(0, "plane")
    plane = torch.randn(2, 6, generator=rng, dtype=torch.float64)
    x = torch.randn(50, 2, generator=rng, dtype=torch.float64) @ plane + 3
    pca = fit_pca(x, 2)
    assert pca.compress(x).shape == (50, 2)
    assert torch.allclose(pca.expand(pca.compress(x)), x, atol=1e-10)
    assert torch.allclose(pca.basis.T @ pca.basis, torch.eye(2, dtype=torch.float64), atol=1e-12)


def test_pca_agrees_with_scikit_learn():
    sklearn = pytest.importorskip("sklearn.decomposition", reason="scikit-learn is not installed")
    x = torch.randn(200, 8, generator=stream(1, "pca"), dtype=torch.float64) * torch.arange(1, 9)
    theirs = sklearn.PCA(3).fit(x.numpy())
    ours = fit_pca(x, 3).compress(x)
    assert torch.allclose(ours.abs(), torch.from_numpy(theirs.transform(x.numpy())).abs(), atol=1e-8)


def test_pca_cannot_keep_more_numbers_than_there_are():
    with pytest.raises(ConfigError, match="between 1 and 4 of 8 numbers fitted on 4 rows, got 5"):
        fit_pca(torch.randn(4, 8), 5)


def test_product_codes_are_the_nearest_centres_part_by_part():
    rng = stream(2, "codes")
    books = Codebooks(torch.randn(3, 5, 2, generator=rng))
    z = torch.randn(20, 6, generator=rng)
    codes = books.encode(z)
    for row, code in zip(z, codes, strict=True):
        for part in range(3):
            away = [(row[2 * part : 2 * part + 2] - centre).norm().item() for centre in books.centres[part]]
            assert int(code[part]) == away.index(min(away))
    assert torch.equal(books.encode(books.decode(codes)), codes)


def test_codebooks_find_well_separated_centres():
    rng = stream(3, "separated")
    corners = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    z = corners.repeat(50, 2) + 0.01 * torch.randn(200, 4, generator=rng)
    books = fit_codebooks(z, 2, rng, n_centres=16)
    assert (books.decode(books.encode(z)) - z).norm(dim=1).max() < 0.2


def test_more_bytes_mean_a_smaller_error():
    rng = stream(4, "bytes")
    z = torch.nn.functional.normalize(torch.randn(1_000, 16, generator=rng), dim=1)
    errors = [
        (books.decode(books.encode(z)) - z).square().sum(dim=1).mean().item()
        for books in (fit_codebooks(z, n_parts, rng, n_centres=64) for n_parts in (2, 4, 8))
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(("n_parts", "n_centres"), [(3, 4), (2, 257), (2, 11)])
def test_codebooks_that_cannot_be_are_refused(n_parts, n_centres):
    with pytest.raises(ConfigError, match="codebooks need a width divisible by their parts"):
        fit_codebooks(torch.randn(10, 4), n_parts, stream(0, "x"), n_centres=n_centres)


def test_a_missing_faiss_names_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(MissingExtra, match=r"faiss is not installed; run `pip install faiss-cpu`, or"):
        fit_codebooks(torch.randn(10, 4), 2, stream(0, "x"), n_centres=4, library="faiss")
