"""Finds out whether all processes are there before JAX waits for them.

JAX ends a process that waited in vain, without an exception. Here process 0 listens on
the coordinator's port first, every process says which one it is, and all of them
receive a start signal, or the error.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fedbilevel.errors import InvalidInputError

_GO = "go"
_LONGEST = 4096  # bytes of a message
_PAUSE = 0.1  # seconds between two attempts to connect
_STRANGER = 2.0  # seconds that process 0 waits for a connection to identify itself


def meet(host: str, port: int, processes: int, process: int, patience: float) -> None:
    """Return when all processes are there; raise in all of them if one is missing."""
    deadline = time.monotonic() + patience
    if process == 0:
        _take(host, port, processes, deadline)
        return
    with _connected(host, port, deadline) as line:
        _say(line, f"{processes} {process}")
        # Process 0 gives up after its own patience; it was there before this line was.
        said = _hear(line, patience + _STRANGER)
    if said != _GO:
        reason = said or "it hung up, or did not answer in time."
        raise InvalidInputError(f"the coordinator {host}:{port} refused: {reason}")


def _take(host: str, port: int, processes: int, deadline: float) -> None:
    callers, missing = [], set(range(processes))
    verdict = "process 0 was interrupted."
    with ExitStack() as lines:
        listener = lines.enter_context(_listening(port))
        # Process 0 calls itself: the address must lead to its own host.
        itself = lines.enter_context(_connected(host, port, deadline))
        _say(itself, f"{processes} 0")
        try:
            while missing:
                line = _next(listener, deadline, missing)
                callers.append(lines.enter_context(line))
                missing -= _identify(line, missing, processes)
            verdict = _GO
        except InvalidInputError as error:
            verdict = str(error)
            raise
        finally:
            for line in callers:
                _say(line, verdict)


def _next(listener: socket.socket, deadline: float, missing: set[int]) -> socket.socket:
    try:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        listener.settimeout(left)
        return listener.accept()[0]
    except TimeoutError:
        names = ", ".join(map(str, sorted(missing)))
        raise InvalidInputError(
            f"these processes did not come in time: {names}. Start every process with "
            "the same coordinator and a number of its own."
        ) from None


def _identify(line: socket.socket, missing: set[int], processes: int) -> set[int]:
    """Return which process called; none if it was a stranger."""
    words = (_hear(line, _STRANGER) or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return set()
    total, process = map(int, words)
    if total == processes and process in missing:
        return {process}
    problem = "two processes have this number"
    if total != processes:
        problem = f"it counts {total} processes, process 0 counts {processes}"
    raise InvalidInputError(
        f"process {process}: {problem}. Number them 0 to {processes - 1}."
    )


def _say(line: socket.socket, message: str) -> None:
    with suppress(OSError):  # the process is gone; one that waits for an answer notices
        line.sendall(f"{message}\n".encode())


def _hear(line: socket.socket, seconds: float) -> str | None:
    """Return one line without its end; None if the other side hung up or is silent."""
    line.settimeout(seconds)
    try:
        with line.makefile("rb") as stream:
            text = stream.readline(_LONGEST)
    except OSError:
        return None
    return text.decode(errors="replace").strip() or None


def _listening(port: int) -> socket.socket:
    problem: Exception | None = None
    for family in (socket.AF_INET6, socket.AF_INET):  # one that serves both, at best
        both = family == socket.AF_INET6
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=both)
        except (OSError, ValueError) as error:  # ValueError: there is no such family
            problem = error
    raise InvalidInputError(
        f"process 0 cannot listen on port {port}: {problem}. Choose another port."
    )


@contextmanager
def _connected(host: str, port: int, deadline: float) -> Iterator[socket.socket]:
    while True:
        left = deadline - time.monotonic()
        try:
            line = socket.create_connection((host, port), max(left, 0.001))
            break
        except (socket.gaierror, UnicodeError) as error:
            raise InvalidInputError(
                f"coordinator '{host}': there is no such host ({error}). Name the host "
                "of process 0, or give its address."
            ) from error
        except OSError as error:
            if left <= _PAUSE:
                raise InvalidInputError(
                    f"the coordinator {host}:{port} does not answer ({error}). Start "
                    "process 0 on that host, and let the network reach that port."
                ) from error
            time.sleep(_PAUSE)
    with line:
        yield line
