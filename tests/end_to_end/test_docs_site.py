"""`make docs`: the site is built without a warning, and loads nothing from anywhere else."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WANTED = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WANTED), reason=f"{', '.join(WANTED)} not installed; `pip install -e '.[docs]'` has them"),
]
LOADED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)""")
STYLES = re.compile(
    r"""<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|icon)[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    around = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> dict[str, str]:
    """The site's own pages; the reports are pages of another make."""
    made = (path for path in site.rglob("*.html") if path.with_suffix(".md").name != "report.md")
    return {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in made}


def test_the_site_is_built_without_warnings_and_has_every_page(site):
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {str(page) for page in sources} <= set(pages(site))


def test_lists_and_tables_of_the_sources_are_lists_and_tables(site):
    odd = {name: re.findall(r"<p>(?:- |1\. |\| ).{0,40}", text) for name, text in pages(site).items()}
    assert {name: what for name, what in odd.items() if what} == {}


def test_no_page_loads_anything_from_another_place(site):
    found = {name: LOADED.findall(text) + STYLES.findall(text) for name, text in pages(site).items()}
    assert {name: what for name, what in found.items() if what} == {}


def test_the_reference_is_filled_in(site):
    text = pages(site)
    assert "--target-epsilon" in text["reference/cli.html"]
    assert "training.slice_learning_rate" in text["reference/settings.html"]
    assert "exclude_seen" in text["reference/api.html"]
    assert "&lt;!--" not in text["reference/cli.html"]
