"""examples/: every script and the notebook run, with the settings they are shown with."""

import ast
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_command_line import FAST, protofed

import protofed as package

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.iterdir() if path.name not in ("__pycache__", "runs")} == {
        "own_method.py",
        "own_data.py",
        "privacy_budget.py",
        "quickstart.ipynb",
    }


def test_a_method_of_ones_own_takes_thirty_lines_and_beats_popularity(tmp_path, monkeypatch):
    source = (EXAMPLES / "own_method.py").read_text(encoding="utf-8")
    docstring, *statements = ast.parse(source).body
    lines = source.splitlines()[docstring.end_lineno : statements[-1].end_lineno]
    assert sum(bool(line.strip()) for line in lines) <= 30
    shutil.copy(EXAMPLES / "own_method.py", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    scores = {}
    try:
        for method in ("own_method:Habit", "popularity"):
            out = tmp_path / method.rpartition(":")[2]
            places = ["--out", out, "--cache", tmp_path / "cache", "--json"]
            done = protofed("run", "--dataset", "synthetic", "--method", method, *places, *FAST, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            scores[method] = json.loads(done.stdout)["headline"][0]["ndcg@10"]
    finally:
        sys.modules.pop("own_method", None)
    assert scores["own_method:Habit"] > scores["popularity"]


def test_own_data_goes_from_a_csv_to_recommendations(tmp_path, capsys):
    rows = example("own_data").main(tmp_path)
    said = capsys.readouterr().out
    assert "5-core, which is trained on: 1,800 rows, 60 users, 80 items" in said
    assert re.search(r"privacy: ε = 3\.\d+ against who sees what is released", said)
    assert len(rows) == 5
    assert all(re.fullmatch(r"item-[0-3]-[01]\d", str(row.item)) for row in rows)
    assert (tmp_path / "orders.csv").read_text().startswith("customer_id,sku,created_at\n")


def test_a_privacy_budget_is_planned_with_the_figures_of_the_privacy_page():
    answers = list(example("privacy_budget").plans().values())
    assert answers == pytest.approx([1.1282, 1.5898, 3.5237, 3.3999, 5.8825, 4.7686, 93], abs=2e-4)


def test_the_notebook_is_kept_without_outputs():
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


def test_the_notebook_runs_from_top_to_bottom():
    names: dict[str, object] = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert set(names["accuracy"]) == {"popularity", "protofed-sp"}
    assert len(names["best"]) == 5
    assert isinstance(names["model"], package.Recommender)
    assert names["upload"].codes.shape == (1, 1, 64)  # what leaves the device: 64 bytes and a prototype's number
