"""The library survives disk, starts on the sphere, and is no larger than its cohort feeds."""

import math

import pytest
import torch

from protofed.errors import ConfigError, DataError
from protofed.seeds import stream
from protofed.server.library import PrototypeLibrary, check_cohort, default_prototypes, load, new_library, save


def library() -> PrototypeLibrary:
    return new_library(torch.randn(5, 3, generator=stream(0, "v")))


def test_a_new_library_lies_on_the_sphere_with_its_mass_along_the_prototypes():
    fresh = new_library(torch.tensor([[3.0, 4.0], [0.0, -2.0]]), mass=3.0)
    assert torch.allclose(fresh.v, torch.tensor([[0.6, 0.8], [0.0, -1.0]]))
    assert torch.allclose(fresh.ema_sums, 3 * fresh.v)
    assert fresh.ema_counts.tolist() == [3.0, 3.0]
    assert (fresh.version, fresh.n_prototypes) == (0, 2)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_a_prototype_without_a_direction_is_refused(bad):
    with pytest.raises(ConfigError, match="finite vectors other than zero"):
        new_library(torch.tensor([[1.0, 0.0], bad]))


def test_a_saved_library_comes_back_bit_for_bit(tmp_path):
    before = PrototypeLibrary(*(t for t in (library().v, library().ema_sums, library().ema_counts)), version=41)
    save(before, tmp_path / "library.safetensors")
    after = load(tmp_path / "library.safetensors")
    assert after.version == 41
    assert all(torch.equal(getattr(before, name), getattr(after, name)) for name in ("v", "ema_sums", "ema_counts"))
    assert [path.name for path in tmp_path.iterdir()] == ["library.safetensors"]


def test_another_file_is_not_a_library(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "library.safetensors"
    with pytest.raises(DataError, match="no prototype library at"):
        load(path)
    path.write_bytes(b"rubbish")
    with pytest.raises(DataError, match="is not a safetensors file"):
        load(path)
    save_file({"v": torch.zeros(1)}, path)
    with pytest.raises(DataError, match="not a prototype library of format protofed-library-1, found None"):
        load(path)


@pytest.mark.parametrize(
    ("rate", "clients", "k"),
    [(0.05, 1_000, 16), (0.05, 5_000, 64), (0.05, 10_000, 128), (0.05, 10**6, 128), (1.0, 1_000, 128), (0.05, 40, 1)],
)
def test_the_default_library_is_the_largest_power_of_two_fed_three_uploads_each(rate, clients, k):
    assert default_prototypes(rate, clients) == k
    assert k == 1 or rate * clients / k >= 3
    assert k == 128 or rate * clients / (2 * k) < 3


def test_more_prototypes_than_uploads_are_refused_with_a_way_out():
    check_cohort(16, 0.05, 1_000)
    check_cohort(1, 0.05, 3)
    with pytest.raises(
        ConfigError, match=r"128 prototypes are more than the 50 uploads a round expects .* take K = 16"
    ):
        check_cohort(128, 0.05, 1_000)
