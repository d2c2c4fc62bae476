"""Two-line promises that rot: imports point one way, public names exist, the core stays light."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import protofed
from protofed.client.begin import begin_slice
from protofed.client.model import Broadcast, receive
from protofed.client.update import client_update
from protofed.client.upload import make_upload
from protofed.errors import EXTRAS, MODULES, MissingExtra, check_installed
from protofed.federation import simulator
from protofed.inference.end import end_slice
from protofed.methods.catalogue import METHODS
from protofed.methods.names import FLAGSHIP, OURS
from protofed.methods.protofed_sp import ProtoFedSP
from protofed.server.accept import Accepted, accept
from protofed.server.aggregate import release_sums, server_aggregate
from protofed.server.fedkmeans import fedkmeans

SOURCE = Path(protofed.__file__).parent
ORDER = (
    *(
        "errors",
        "seeds",
        "files",
        "progress",
        "config",
        "snapshot",
        "data",
        "features",
        "slices",
        "evaluation",
        "backbone",
        "privacy",
        "client",
    ),
    *("server", "inference", "federation", "methods", "experiments", "deployment", "speed", "report", "cli"),
)
WORKSHOP = ("dev", "docs")  # extras of who works on the project: the package imports nothing of them
HEAVY = ("polars", "dp_accounting", "matplotlib", "jinja2", "typer", "rich", "faiss", "flwr", "transformers", "pandas")


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def top_level(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("protofed."):
            names.add(node.module.split(".")[1])
        if isinstance(node, ast.ImportFrom) and node.module == "protofed":
            names |= {alias.name for alias in node.names if (SOURCE / alias.name).exists()}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_upwards_only(path):
    place = ORDER.index(top_level(path))
    assert [name for name in imported(path) if ORDER.index(name) > place] == []


def texts(path: Path) -> set[str]:
    """String literals of a module, parts of f-strings among them, docstrings aside."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    literals = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in alone)
    return {literal.value for literal in literals if isinstance(literal.value, str)}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_our_method_is_named_in_the_catalogue_alone(path):
    assert path.name in ("names.py", "search_spaces.py") or not any(OURS in text for text in texts(path))


@pytest.mark.parametrize("folder", ["client", "server", "inference", "federation", "privacy", "experiments", "report"])
def test_no_method_is_favoured_by_its_name(folder):
    """FLAGSHIP is the name of the package and of a section of the settings, too."""
    found = {path.name: texts(path) & (METHODS.keys() - {FLAGSHIP}) for path in (SOURCE / folder).rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == {}


def test_an_upload_takes_the_six_steps_that_are_drawn():
    page = (SOURCE.parents[1] / "docs" / "concepts.md").read_text(encoding="utf-8")
    drawn = dict(re.findall(r"\b([1-6]) ([a-z_]+)", page.partition("takes six steps")[2].partition("[Device and")[0]))
    steps = (make_upload, accept, server_aggregate, release_sums, fedkmeans, receive)
    assert drawn == {str(number): step.__name__ for number, step in enumerate(steps, 1)}
    callers = {
        simulator: ("make_upload", "accept", "server_aggregate", "receive"),
        server_aggregate: ("release_sums", "fedkmeans"),
    }
    for caller, called in callers.items():
        assert all(re.search(rf"\b{name}\(", inspect.getsource(caller)) for name in called)


def test_learning_a_slice_reads_as_the_algorithm():
    assert len(inspect.getsource(ProtoFedSP.learn).splitlines()) <= 25


def test_what_a_device_and_a_server_call_takes_no_name_of_a_user():
    """The server's half is handed uploads alone; the device's half, one state and nobody else's."""
    server = [*inspect.signature(accept).parameters, *inspect.signature(server_aggregate).parameters]
    assert server == ["uploads", "rule", "round_", "version", "library", "accepted", "rule", "noise", "rng"]
    for function in (begin_slice, client_update, make_upload, end_slice):
        assert list(inspect.signature(function).parameters)[:2] == ["model", "state"]
    assert {field.name for field in fields(Accepted)} == {"n", "points", "block", "total", "refused"}
    assert {field.name for field in fields(Broadcast)} == {"version", "v"}


def test_public_names_exist_and_are_sorted():
    assert all(hasattr(protofed, name) for name in protofed.__all__)
    assert protofed.__all__ == sorted(
        protofed.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )


def test_public_names_are_the_same_for_readers_type_checkers_and_python():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    told = {alias.name: str(node.module).removeprefix("protofed.") for node in imports for alias in node.names}
    assert told == protofed.HOMES
    assert list(protofed.HOMES) == protofed.__all__
    assert set(protofed.__all__) <= set(dir(protofed))
    with pytest.raises(AttributeError, match="module 'protofed' has no attribute 'Experimnt'"):
        _ = protofed.Experimnt


def test_the_version_is_the_installed_one_or_says_that_there_is_none(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1.2.3")
    assert protofed._version() == "protofed 1.2.3"
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert protofed._version() == "0+unknown"
    assert isinstance(protofed.__version__, str)


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has once it ran this code."""
    told = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"]
    done = subprocess.run(told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_importing_the_package_loads_none_of_it():
    found = loaded_by("import protofed")
    assert {name for name in found if name.startswith("protofed.")} == set()
    assert "torch" not in found


def test_serving_names_load_neither_the_bench_nor_the_rivals():
    found = loaded_by("from protofed import SASRec, from_columns, load, load_log, preset, slice_log")
    bench = ("protofed.experiments.", "protofed.report.", "protofed.cli.", "protofed.methods.baselines.")
    assert "protofed.inference.recommender" in found
    assert [name for name in found if name.startswith(bench)] == []


@pytest.mark.slow
def test_the_core_imports_nothing_heavier_than_torch_and_pyarrow():
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"
    core = "import protofed, protofed.experiments.run, protofed.experiments.evaluate, protofed.data.prepared"
    subprocess.run([sys.executable, "-c", f"{blocked}; {core}"], check=True, timeout=120)


@pytest.mark.slow
def test_what_windows_lacks_is_imported_by_no_public_name_and_not_by_the_command_line():
    posix = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({posix!r}))"
    public = "import protofed; print(*(getattr(protofed, name).__class__ for name in protofed.__all__))"
    helped = "sys.argv = ['protofed', 'run', '--help']; import protofed.cli.main; protofed.cli.main.main()"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}; {public}; {helped}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "--dataset" in done.stdout


def test_an_extra_is_told_with_the_packages_that_pyproject_names_and_something_imports_each():
    written = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: packages for name, packages in written["optional-dependencies"].items() if name not in WORKSHOP}
    named = {name: tuple(re.match(r"[\w-]+", p)[0] for p in packages) for name, packages in extras.items()}
    told = {name: tuple(re.match(r"[\w-]+", p)[0] for p in packages) for name, packages in EXTRAS.items()}
    assert named == told
    sources = "\n".join(path.read_text(encoding="utf-8") for path in modules())
    for package in (package for packages in EXTRAS.values() for package in packages):
        module = MODULES.get(package, package)
        assert re.search(rf"(import|from) {module}\b|(import_module\(.*|package_folder\(.){module}", sources), package


def test_a_missing_package_of_an_extra_is_told_without_importing_the_others(monkeypatch):
    monkeypatch.setattr("protofed.errors.find_spec", lambda module: None if module == "jinja2" else object())
    way_out = "run `pip install jinja2`, or `pip install -e '.[report]'` in the source tree"
    with pytest.raises(MissingExtra, match=f"^{re.escape(f'jinja2 is not installed; {way_out}')}$"):
        check_installed(extra="report")
    check_installed("dp-accounting", extra="ann")  # all there


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.name == "__init__.py"


def test_every_module_imports():
    for path in modules():
        importlib.import_module("protofed." + ".".join(path.relative_to(SOURCE).with_suffix("").parts))
