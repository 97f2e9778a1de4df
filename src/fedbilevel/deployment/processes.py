"""Starts, watches and ends the processes of a federation."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbilevel._files import make_private_folder
from fedbilevel.deployment import launch
from fedbilevel.errors import FedbilevelError, InvalidInputError

__all__ = [
    "Process",
    "end_all",
    "free_port",
    "listens",
    "log_tail",
    "read_json",
    "tied",
    "wait_for_port",
]

_ENOUGH = 15.0  # seconds that a process has to end when asked
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Process:
    """A command that is started, started again, and ended with all its children.

    It also ends when this process does, if by the thread that started it. Its output
    goes into a file; `home` is a folder for Flower's own files, since its
    processes must not share one.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.command = name, list(command)
        # Flower changes its folder, and would look for a relative home elsewhere.
        folder = folder.resolve()
        self.log, self.home = folder / f"{name}.log", folder / "homes" / name
        self.more = dict(more or {})
        self.running: subprocess.Popen | None = None

    def environment(self) -> dict[str, str]:
        """Return what the command finds in its environment."""
        folder = str(Path(sys.executable).parent)
        return {
            **os.environ,
            **_QUIET,
            "FLWR_HOME": str(self.home),
            # Flower starts its helpers by name.
            "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")]),
            **self.more,
        }

    def start(self) -> "Process":
        """Start the command."""
        make_private_folder(self.home)
        with open(self.log, "ab", opener=_private) as log:
            self.running = subprocess.Popen(
                tied(self.command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment(),
                start_new_session=True,
            )
        return self

    @property
    def alive(self) -> bool:
        """Say whether the process runs."""
        return self.running is not None and self.running.poll() is None

    @property
    def failed(self) -> bool:
        """Say whether the process ended by itself, with an error."""
        return self.running is not None and (self.running.poll() or 0) > 0

    def revive(self) -> bool:
        """Start it again if it ended; say whether it had."""
        if self.alive:
            return False
        self.start()
        return True

    def ask_to_end(self) -> None:
        """Ask it to end."""
        if self.running is not None and self.alive:
            self.running.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Ask it to end, and make it."""
        self.ask_to_end()
        if self.running is None:
            return
        try:
            self.running.wait(_ENOUGH)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """End it at once, with what it started."""
        if self.running is None:
            return
        try:
            os.killpg(self.running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.running.wait()


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that ends with this process, whatever ends it."""
    python = [sys.executable, "-I", "-S", str(Path(launch.__file__).resolve())]
    return [*python, str(os.getpid()), *command]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def end_all(processes: Sequence[Process]) -> None:
    """End processes, all at once."""
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.end()


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(address: str) -> bool:
    """Say whether somebody listens at an address."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise InvalidInputError(f"address '{address}': write HOST:PORT.")
    host = "127.0.0.1" if host == "0.0.0.0" else host
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def wait_for_port(address: str, process: Process, seconds: float = 60.0) -> None:
    """Wait until somebody listens at an address."""
    end = time.monotonic() + seconds
    while process.alive and time.monotonic() < end:
        if listens(address):
            return
        time.sleep(0.1)
    raise FedbilevelError(
        f"{process.name} does not listen at {address}. Its last words: "
        f"{log_tail(process.log)}"
    )


def log_tail(path: Path, characters: int = 2000) -> str:
    """Return the end of a log."""
    if not path.exists():
        return "none"
    return path.read_text(errors="replace")[-characters:]


def read_json(path: Path) -> dict:
    """Return what a process told in a file, or nothing while it is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
