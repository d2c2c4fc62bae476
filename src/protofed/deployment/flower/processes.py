"""A SuperLink and SuperNodes as processes of this machine, with TLS and node authentication; none of them stays behind.

Every process carries a mark in its environment, by which it is found again even when its parent is gone.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from protofed.deployment.deal import SERVER, host_folders
from protofed.deployment.flower.certificates import CA, CERTIFICATE, HERE, KEY, write_certificates
from protofed.deployment.server import LOG
from protofed.errors import MachineError
from protofed.files import make_folder, write_text

MARK = "PROTOFED_FEDERATION"
LINK = "here"  # the name of the SuperLink in Flower's settings
START, GRACE, POLL = 60.0, 3.0, 0.5  # seconds until a SuperLink must listen, to end in, between two looks
APP = """\
[project]
name = "protofed-federation"
version = "1.0.0"
description = "ProtoFed's rounds"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "protofed"

[tool.flwr.app.components]
serverapp = "protofed.deployment.flower.server_app:app"
clientapp = "protofed.deployment.flower.client_app:app"

[tool.flwr.app.config]
folder = ""
slice = 1
nodes = 1
timeout = 60.0
patience = 60.0
"""


@dataclass(slots=True)
class Cluster:
    """The processes of one federation and where their keys and logs are."""

    folder: Path
    mark: str
    port: int
    environment: dict[str, str]
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_node(self, number: int, host: Path) -> None:
        """Start the SuperNode of a host."""
        where = ["--superlink", f"{HERE}:{self.port}", "--host", HERE, "--port", str(free_port())]
        keys = ["--root-certificates", CA, "--auth-supernode-private-key", f"node-{number}"]
        config = ["--node-config", f'host="{host.resolve()}"']
        self.nodes[number] = self.start("flower-supernode", [*where, *keys, *config], f"node-{number}.log")

    def kill_node(self, number: int) -> None:
        """End a SuperNode and whatever it started at once, as a power failure would."""
        process = psutil.Process(self.nodes.pop(number).pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def start(self, command: str, arguments: list[str], log: str) -> subprocess.Popen[bytes]:
        """Start one of Flower's commands; what it says goes to a log."""
        with open(self.folder / log, "ab") as file:
            return subprocess.Popen(
                [executable(command), *arguments], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

    def flwr(self, *arguments: str) -> None:
        """Run one `flwr` command to its end."""
        done = subprocess.run(
            [executable("flwr"), *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())[-300:]
            raise MachineError(f"`flwr {' '.join(arguments)}` failed: {said}; see the logs in {self.folder}")

    def submit(self, federation: Path, index: int, *, timeout: float) -> subprocess.Popen[bytes]:
        """Start a run of the ServerApp up to the end of a slice; it ends when the run does."""
        folder = (federation / SERVER).resolve()
        config = f'folder="{folder}" slice={index} nodes={len(self.nodes)} timeout={timeout}'
        return self.start("flwr", ["run", "app", LINK, "--run-config", config, "--stream"], "run.log")

    def stop(self) -> None:
        """End everything that carries the mark: politely first."""
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C must not leave anything behind
            for process in marked(self.mark):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
            psutil.wait_procs(marked(self.mark), GRACE)
        while left := marked(self.mark):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, GRACE)


@contextlib.contextmanager
def cluster(folder: Path, federation: Path) -> Iterator[Cluster]:
    """A SuperLink and a SuperNode for each host of a federation, until the block ends, however it does."""
    hosts = host_folders(federation)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    write_certificates(folder, len(hosts))
    port, mark = free_port(), secrets.token_hex(8)
    made = Cluster(folder, mark, port, environment_of(folder, mark))
    try:
        write_settings(folder, port)
        address = ["--host", HERE, "--port", str(port), "--enable-supernode-auth"]
        tls = ["--ssl-ca-certfile", CA, "--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY]
        link = made.start(
            "flower-superlink", [*address, *tls, "--disable-runtime-dependency-installation"], "superlink.log"
        )
        wait_for_port(port, link, folder)
        for number, host in enumerate(hosts):
            made.flwr("supernode", "register", f"node-{number}.pub", LINK)
            made.start_node(number, host)
        yield made
    finally:
        made.stop()


def write_settings(folder: Path, port: int) -> None:
    """Flower's own settings, and the app that a run hands over: two names of modules that every host has installed."""
    (folder / "home").mkdir()
    lines = ["[superlink]", f'default = "{LINK}"', "", f"[superlink.{LINK}]", f'address = "{HERE}:{port}"']
    lines.append(f'root-certificates = "{(folder / CA).resolve()}"')
    (folder / "home" / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_app(folder / "app")


def write_app(folder: Path) -> None:
    """What `flwr run` is given: the names of the two modules, and a run's settings."""
    make_folder(folder)
    write_text(folder / "pyproject.toml", APP)


def environment_of(folder: Path, mark: str) -> dict[str, str]:
    """The environment of every process: its mark, one thread each, no telemetry, nothing installed while it runs."""
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {
        **os.environ,
        MARK: mark,
        "PATH": os.pathsep.join(paths),
        "FLWR_HOME": str((folder / "home").resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }


def executable(command: str) -> str:
    """Where a command of this Python's environment is."""
    return str(Path(sys.executable).with_name(command))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Until somebody listens there."""
    until = time.monotonic() + START
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HERE, port), timeout=POLL):
            return
        time.sleep(POLL)
    raise MachineError(f"the SuperLink did not start within {START:g} s; see {folder / 'superlink.log'}")


def marked(mark: str) -> list[psutil.Process]:
    """The processes of this user that carry the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_slice(
    made: Cluster,
    federation: Path,
    index: int,
    *,
    timeout: float = 60.0,
    watch: Callable[[list[dict[str, object]]], None] = lambda log: None,
) -> None:
    """A slice over the cluster's nodes; `watch` is called with the server's log so far, again and again."""
    run, path = made.submit(federation, index, timeout=timeout), federation / SERVER / LOG
    while run.poll() is None:
        watch(read_log(path))
        time.sleep(POLL)
    if not any(record.get("slice") == index and "finished" in record for record in read_log(path)):
        raise MachineError(f"slice {index} did not end; see run.log and superlink.log in {made.folder}")


def read_log(path: Path) -> list[dict[str, object]]:
    """The records of a server's log, the line that is being written left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
