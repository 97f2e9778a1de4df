"""Starts, watches and ends the processes of a federation."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedbilevel._files import make_private_folder
from fedbilevel.deployment import launch
from fedbilevel.errors import FedbilevelError, InvalidInputError

_BEGIN = 60.0  # seconds that a process has to listen at its port
_ENOUGH = 15.0  # seconds that a process has to end when asked
TOKEN = "FEDBILEVEL_TOKEN"  # the name of the variable; other users cannot read it
USER_ERROR = 2  # the exit status of a command that cannot be used as given
_MOST_FAILURES = 3  # in a row, after which a process is not started again
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Process:
    """A command that is started, started again, and ended with all its children.

    It also ends when this process does, if by the thread that started it. Its output
    goes into a file; `home` is a folder for Flower's own files, since its
    processes must not share one. `error` is where it may write what its user did wrong,
    if it is not the one to end.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        more: Mapping[str, str] | None = None,
        error: Path | None = None,
    ) -> None:
        self.name, self.command, self.error = name, list(command), error
        # Flower changes its folder, and would look for a relative home elsewhere.
        folder = folder.resolve()
        self.log, self.home = folder / f"{name}.log", folder / "homes" / name
        self.more = dict(more or {})
        self.running: subprocess.Popen | None = None
        self._failures = 0  # in a row

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

        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        make_private_folder(self.home)
        with open(self.log, "ab", opener=private) as log:
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
        """Start it again if it ended; say whether it had.

        Raise if that would not help: its user made a mistake, or it fails every time.
        """
        self.check()
        if self.alive:
            return False
        code = 0 if self.running is None else self.running.returncode
        self._failures = self._failures + 1 if code > 0 else 0
        if self._failures > _MOST_FAILURES:
            raise FedbilevelError(
                f"{self.name} failed {self._failures} times in a row. Its last words: "
                f"{log_tail(self.log)}"
            )
        self.start()
        return True

    def check(self) -> None:
        """Raise with its own sentence if it ended by a mistake of its user."""
        sentence = self.error.read_text() if self.error and self.error.exists() else ""
        if not sentence and self.running and self.running.poll() == USER_ERROR:
            # The last sentence of a command of ours.
            last = log_tail(self.log)
            sentence = last.rpartition("Error: ")[2].strip() or last
        if sentence:
            raise InvalidInputError(f"{self.name} cannot take part: {sentence}")

    def ask_to_end(self) -> None:
        """Ask it to end."""
        if self.running is not None and self.alive:
            self.running.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Ask it to end, and make it."""
        self.ask_to_end()
        if self.running is not None:
            with suppress(subprocess.TimeoutExpired):
                self.running.wait(_ENOUGH)
            self.kill()

    def kill(self) -> None:
        """End it at once, with what it started."""
        if self.running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that ends with this process, whatever ends it."""
    python = [sys.executable, "-I", "-S", str(Path(launch.__file__).resolve())]
    return [*python, str(os.getpid()), *command]


def end_all(processes: Sequence[Process]) -> None:
    """End processes, all at once."""
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.end()


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def called_at(address: str) -> tuple[str, int]:
    """Return host and port by which processes of this machine call an address."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise InvalidInputError(f"address '{address}': write HOST:PORT.")
    return "127.0.0.1" if host == "0.0.0.0" else host, int(port)


def listens(address: str) -> bool:
    """Say whether somebody listens at an address."""
    try:
        socket.create_connection(called_at(address), 1).close()
    except OSError:
        return False
    return True


def wait_for_port(
    address: str, process: Process, look: Callable[[], None] = lambda: None
) -> None:
    """Wait until somebody listens at an address; `look` is called often, may raise."""
    end = time.monotonic() + _BEGIN
    while process.alive and time.monotonic() < end:
        if listens(address):
            return
        look()
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
    """Return what a process wrote in a file, or nothing while it is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
