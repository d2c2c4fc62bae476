"""The committed results and the report stay small, and the bench does not grow back."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("sizes", ROOT / "scripts" / "sizes.py")
sizes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sizes)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files are committed")
@pytest.mark.parametrize("name", sizes.MOST)
def test_nothing_is_larger_than_it_may_be(name):
    assert sizes.sizes()[name] <= sizes.MOST[name]
