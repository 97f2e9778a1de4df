"""Serves an experiment over Flower: starts what is needed, and keeps it going."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedbilevel.deployment import apps
from fedbilevel.deployment.processes import (
    Process,
    end_all,
    listens,
    log_tail,
    read_json,
    wait_for_port,
)
from fedbilevel.deployment.superlink import SuperLink, key_of
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.federation import Terms
from fedbilevel.federation.sealing import KeyFiles, server_seal
from fedbilevel.result import Result
from fedbilevel.runtime import Watch

__all__ = ["serve_over_flower"]

_LOOK = 0.2  # seconds between two looks at the processes
_APPEAR = 60.0  # seconds that a ServerApp has to come up


def serve_over_flower(
    experiment: Experiment,
    folder: Path,
    terms: Terms,
    link: SuperLink,
    *,
    keys: KeyFiles | None = None,
    watch: Watch,
    crowd: Sequence[Process] = (),
) -> Result:
    """Run an experiment to its end, whatever dies on the way.

    A SuperLink or a ServerApp that ended is started again, and the run goes on after
    its last round; so is a node of the `crowd` on this machine. If `watch` raises
    KeyboardInterrupt, all processes are ended; the folder can be served again.
    With `keys` packets are signed; with certificates, too, Flower lets in no others.
    """
    if keys is not None:
        server_seal(keys)  # or what is wrong with them, before anything starts
    node_keys = keys.peers if keys is not None and link.certificates else ()
    terms = replace(terms, keys=tuple(key_of(path) for path in node_keys))
    if listens(link.address):
        # Else the run would be given to a SuperLink that is not ours.
        raise InvalidInputError(
            f"somebody listens at {link.address} already: another server, or the "
            "SuperLink of one that was killed. End it, or choose another address."
        )
    for name in (apps.PROCESS, apps.ERROR):
        (folder / name).unlink(missing_ok=True)
    superlink = link.process().start()
    try:
        for node in crowd:
            node.start()
        wait_for_port(link.address, superlink)
        link.register(node_keys)
        settings = apps.settings_of(experiment, folder, terms, keys)
        return _until_done(folder, link, superlink, settings, watch, crowd)
    except KeyboardInterrupt:
        done = read_json(folder / apps.PROGRESS).get("done", 0)
        raise KeyboardInterrupt(f"After round {done}. Kept in {folder}.") from None
    finally:
        _end_server(folder)
        end_all(crowd)
        superlink.end()


def _until_done(
    folder: Path,
    link: SuperLink,
    superlink: Process,
    settings: dict,
    watch: Watch,
    crowd: Sequence[Process],
) -> Result:
    run, submitted, told = link.submit(settings), time.monotonic(), {}
    while not (folder / "result.json").exists():
        time.sleep(_LOOK)
        for node in crowd:
            node.revive()
        told = read_json(folder / apps.PROGRESS) or told  # it may be half written
        watch(told.get("done", 0), told.get("total", 0), told.get("newest", {}))
        lost = False
        if superlink.revive():
            # Its ServerApp ended with it, or never came up.
            wait_for_port(link.address, superlink)
            lost = _server(folder) is None
        if (folder / apps.ERROR).exists():
            raise FedbilevelError((folder / apps.ERROR).read_text())
        if lost or _gone(folder, time.monotonic() - submitted):
            (folder / apps.PROCESS).unlink(missing_ok=True)
            link.stop(run)  # or else it may start beside the next one
            run, submitted = link.submit(settings), time.monotonic()
    return Result.load(folder)


def _server(folder: Path) -> int | None:
    """Return the number of the ServerApp's process, if it came up."""
    path = folder / apps.PROCESS
    text = path.read_text() if path.exists() else ""
    return int(text) if text.isdigit() else None


def _gone(folder: Path, seconds: float) -> bool:
    """Say whether the ServerApp ended, or never came up."""
    number = _server(folder)
    if number is None:
        if seconds > _APPEAR:
            raise FedbilevelError(
                f"no ServerApp within {_APPEAR:g} seconds. The SuperLink's last words: "
                f"{log_tail(folder / 'superlink.log')}"
            )
        return False
    return not _alive(number)


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    about = Path(f"/proc/{number}/stat")
    # On Linux a process that ended is still listed until its parent has looked.
    return not (
        about.exists() and about.read_text().rpartition(")")[2].split()[0] == "Z"
    )


def _end_server(folder: Path) -> None:
    """Ask the ServerApp to end, so that it does so between two rounds."""
    number = _server(folder)
    if number is None or not _alive(number):
        return
    try:
        os.kill(number, signal.SIGTERM)
        end = time.monotonic() + 15
        while _alive(number) and time.monotonic() < end:
            time.sleep(_LOOK)
    except ProcessLookupError:
        pass
