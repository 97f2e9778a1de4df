"""Serves an experiment over Flower: starts what is needed, and keeps it going.

`federate` does so with a whole federation on this machine, for trying things out.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedbilevel import tasks
from fedbilevel._files import make_private_folder
from fedbilevel._folders import RESULT, TRIAL_KEYS
from fedbilevel._table_choices import FLAGS
from fedbilevel.datasets.tables import READERS, kind_of
from fedbilevel.deployment import apps, processes
from fedbilevel.deployment.processes import Process, wait_for_port
from fedbilevel.deployment.superlink import SuperLink, insisting, key_of, program
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import counted_here
from fedbilevel.experiments.served_model import leave_of_trial
from fedbilevel.federation.signatures import KeyFiles, make_key_pair, server_seal
from fedbilevel.models import can_be_kept
from fedbilevel.result import Result
from fedbilevel.runtime import Watch

KINDS = ("persistent", "stock")
_LOOK = 0.2  # seconds between two looks at the processes
_APPEAR = 180.0  # seconds that a ServerApp has to come up
_FAREWELL = 15.0  # seconds that it has to take leave of the nodes
_EVERY = 10.0  # seconds between two exchanges that are reported


def serve_over_flower(
    served: apps.Served,
    link: SuperLink,
    *,
    watch: Watch,
    say: Callable[[str], None] = print,
    about: Callable[[str, str], None] = lambda word, who: None,
    crowd: Sequence[Process] = (),
) -> Result:
    """Run an experiment to its end, and restart processes that die.

    A SuperLink or a ServerApp that ended is started again, and the run continues after
    its last round; so is a node of the `crowd` on this machine, unless it ended by a
    mistake of its user: then all ends, with its sentence. `say` gets present and
    missing clients, and reasons; `about` the step, and the participants. If `watch`
    raises KeyboardInterrupt, all processes are ended; the folder can be served again.
    With keys packets are signed; with certificates, too, Flower lets in no others.
    """
    server_seal(served.keys)  # or what is wrong with the keys, before anything starts
    folder, keys = served.folder, served.keys
    node_keys = keys.peers if keys is not None and link.certificates else ()
    terms = replace(served.terms, keys=tuple(key_of(path) for path in node_keys))
    config = replace(served, terms=terms).config()
    if processes.listens(link.address):
        # Else the run would be given to a SuperLink that is not ours.
        raise InvalidInputError(
            f"somebody listens at {link.address} already: another server, or the "
            "SuperLink of one that was killed. End it, or choose another address."
        )
    make_private_folder(folder)
    for name in (apps.PROCESS, apps.ERROR, apps.PROGRESS):
        (folder / name).unlink(missing_ok=True)
    superlink, servers = link.process(), []
    try:
        superlink.start()
        for node in crowd:
            node.start()
        look = _Look(folder, watch, say, about, crowd)
        look.say(f"starting the SuperLink at {link.address}")
        wait_for_port(link.address, superlink, look=look)

        def revive() -> None:
            if superlink.revive():
                wait_for_port(link.address, superlink, look=look)

        insisting(lambda: link.register(node_keys), revive)
        look()
        serving = _Serving(folder, link, config, servers, revive)
        return _until_done(serving, superlink, look)
    except KeyboardInterrupt:
        done = processes.read_json(folder / apps.PROGRESS).get("done", 0)
        raise KeyboardInterrupt(f"After round {done}. Kept in {folder}.") from None
    finally:
        processes.end_all([*servers, *crowd, superlink])


@dataclass
class _Serving:
    """The server's process: started for a run, and for another if it was lost.

    `servers` has all that were started, to be ended later; `revive` starts the
    SuperLink again where it was ended.
    """

    folder: Path
    link: SuperLink
    settings: dict
    servers: list[Process]
    revive: Callable[[], None]
    run: int | None = None
    since: float = 0.0

    def kill(self) -> None:
        """End the server at once; what it kept is whole."""
        for server in self.servers:
            server.kill()
        self.servers.clear()
        (self.folder / apps.PROCESS).unlink(missing_ok=True)

    def begin(self) -> None:
        """Start a server, in place of the one that was."""
        self.kill()
        if self.run is not None:
            self.link.stop(self.run)
        self.run = insisting(lambda: self.link.submit(self.settings), self.revive)
        self.since = time.monotonic()
        self.servers.append(self.link.server(self.run).start())

    def wait(self) -> None:
        """Let the server end the run at all nodes."""
        end = time.monotonic() + _FAREWELL
        while any(one.alive for one in self.servers) and time.monotonic() < end:
            time.sleep(_LOOK / 4)

    def is_lost(self) -> bool:
        """Say whether the server was ended; raise if it cannot begin."""
        (server,) = self.servers
        failed = server.failed  # looked at first: its error is written before it ends
        if (self.folder / apps.ERROR).exists():
            raise FedbilevelError((self.folder / apps.ERROR).read_text())
        came = (self.folder / apps.PROCESS).exists()
        if failed:
            # Another would fail as well, and the next, without end.
            reason = "the server ended with an error"
        elif not server.alive:
            return True
        elif came or time.monotonic() - self.since < _APPEAR:
            return False
        else:
            reason = f"the server did not begin within {_APPEAR:g} seconds"
        words = processes.log_tail(server.log)
        raise FedbilevelError(
            f"{reason}. Its last words: {words} The SuperLink's: "
            f"{processes.log_tail(self.folder / 'superlink.log')}"
        )


class _Look:
    """Shows what the server reports, and keeps nodes of this machine running.

    Raises KeyboardInterrupt where the watch does, and with a node's own sentence if
    that cannot take part.
    """

    def __init__(
        self,
        folder: Path,
        watch: Watch,
        say: Callable[[str], None],
        about: Callable[[str, str], None],
        crowd: Sequence[Process],
    ) -> None:
        self.folder, self.watch, self.say, self.crowd = folder, watch, say, crowd
        self.about = about
        self._log, self._progress = folder / apps.LOG, {}
        # Messages of an earlier server were shown then.
        self._read = self._log.stat().st_size if self._log.exists() else 0
        self._next, self._shown = time.monotonic() + _EVERY, 0

    def __call__(self) -> None:
        """Look once."""
        for node in self.crowd:
            node.revive()
        self._say_new_lines()
        # It may be half written.
        known = processes.read_json(self.folder / apps.PROGRESS) or self._progress
        self._progress = known
        exchange = known.get("exchange", {})
        if exchange:
            self.about("running", _who(exchange))
        if exchange and time.monotonic() > self._next:
            self._say_exchange(exchange)
        self.watch(known.get("done", 0), known.get("total", 0), known.get("newest", {}))

    def _say_new_lines(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._read)
            whole, _, _ = log.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            for line in whole.decode(errors="replace").splitlines():
                self.say(line)

    def _say_exchange(self, exchange: dict[str, Any]) -> None:
        number = exchange["exchange"]
        if number == self._shown:
            return
        self._shown, self._next = number, time.monotonic() + _EVERY
        self.say(
            f"exchange {number}, in round {self._progress.get('done', 0) + 1}: "
            f"{_who(exchange)} in {exchange['seconds']:.2g} s"
        )


def _who(exchange: dict[str, Any]) -> str:
    return f"{len(exchange['took_part'])} of {exchange['asked']} clients"


def _until_done(serving: _Serving, superlink: Process, look: _Look) -> Result:
    folder = serving.folder
    serving.begin()
    while not (folder / RESULT).exists():
        time.sleep(_LOOK)
        look()
        down = not superlink.alive
        lost = down or serving.is_lost()
        if down:
            # The next one may not know the run; its server would fail there.
            serving.kill()
            superlink.start()
            wait_for_port(serving.link.address, superlink)
        if lost and not (folder / RESULT).exists():
            serving.begin()
    serving.wait()
    return Result.load(folder)


def federate(
    served: apps.Served,
    *,
    nodes: str,
    watch: Watch,
    say: Callable[[str], None] = print,
    about: Callable[[str, str], None] = lambda word, who: None,
) -> Result:
    """Run an experiment on as many nodes as it has clients, on this machine.

    `nodes` are persistent, ours, or stock, Flower's own. All have keys that are made
    for this run, in its folder. Only nodes of ours can tune.
    """
    experiment, _ = counted_here(served.experiment)
    folder, tuning = served.folder, served.tuning
    if nodes not in KINDS:
        raise InvalidInputError(f"nodes '{nodes}': choose {' or '.join(KINDS)}.")
    if tuning is not None and nodes != KINDS[0]:
        raise InvalidInputError(
            f"--tune with nodes '{nodes}': Flower's own nodes forget their steps "
            f"between two messages. Choose {KINDS[0]}."
        )
    where = f"127.0.0.1:{processes.free_port()}"
    link = SuperLink(where, folder, certificates=None, remembers=False)
    make = persistent_node if nodes == "persistent" else _stock
    keys = make_keys(folder, experiment.sites)
    # One core each: they share this machine, and would only wait for each other.
    crowd = [make(experiment, k, folder, link) for k in range(experiment.sites)]
    for node in crowd if tuning is not None else ():
        node.command.append("--tune")
    served = replace(served, experiment=experiment, keys=keys)
    result = serve_over_flower(
        served, link, watch=watch, say=say, about=about, crowd=crowd
    )
    return _with_model(experiment, result, folder, say)


def _with_model(
    experiment: Experiment, result: Result, folder: Path, say: Callable[[str], None]
) -> Result:
    """Leave a model in the folder, as a simulation would: all rows are here."""
    if not can_be_kept():
        return result
    try:
        model = leave_of_trial(experiment, result, folder)
    except (FedbilevelError, OSError) as error:  # the run is over, and stays
        say(f"No model is left: {error}")
        return result
    if model is not None:
        model.save(folder)
    return replace(result, model=model)


def make_keys(folder: Path, clients: int) -> KeyFiles:
    """Make the keys of a trial, and return those of its server."""
    for name in ("server", *map(str, range(clients))):
        make_key_pair(folder / TRIAL_KEYS / name)
    peers = [folder / TRIAL_KEYS / f"{client}.pub" for client in range(clients)]
    return KeyFiles(folder / TRIAL_KEYS / "server", tuple(peers))


def _held_by(
    experiment: Experiment, client: int, folder: Path
) -> tuple[dict[str, str], list[str]]:
    """Return a node's state and keys, and the keys by which sites know each other."""
    keys = folder.resolve() / TRIAL_KEYS
    own = {
        "state": str(folder.resolve() / "nodes" / str(client)),
        "private_key": str(keys / str(client)),
        "server_key": str(keys / "server.pub"),
    }
    known = experiment.sites if experiment.aggregate == "secure" else 0
    return own, [str(keys / f"{other}.pub") for other in range(known)]


def deployment_of(experiment: Experiment, *, tune: bool = False) -> list[str]:
    """Return what a real deployment of an experiment would type."""
    shared = shlex.join(experiment.arguments(shared=True, without=FLAGS))
    known = "--site-key node0.pub ... " if experiment.aggregate == "secure" else ""
    rows = Path(experiment.options.get("data", ""))
    # Sites with tables of their own agree on their columns, by `fedbilevel prepare`.
    if kind_of(rows) in READERS and "preparation" in experiment.task_options:
        shared += " --preparation PREPARATION"
    # Those with texts add up their tokens, which a node prints.
    if rows.is_dir() and "tokens" in experiment.task_options:
        shared += " --set tokens=TOKENS"
    tuned = " --tune" if tune else ""
    return [
        f"fedbilevel serve {shared} --address 127.0.0.1:8000 "
        "--certificates certificates --private-key server --node-key node0.pub ... "
        f"--out RUN{tuned}",
        f"fedbilevel node {shared} --client 0 --superlink SERVER:8443 "
        "--root-certificates ca.crt --private-key node0 --server-key server.pub "
        f"{known}--data ROWS --state STATE{tuned}",
    ]


def persistent_node(
    experiment: Experiment, client: int, folder: Path, link: SuperLink
) -> Process:
    """Return a node of ours for one client, not started yet."""
    own, others = _held_by(experiment, client, folder)
    words = ["node", *experiment.arguments(shared=True), "--client", str(client)]
    words += ["--superlink", link.address, "--trial", "--state", own["state"]]
    if link.certificates is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(link.certificates / "ca.crt")]
    words += ["--private-key", own["private_key"], "--server-key", own["server_key"]]
    for key in others:
        words += ["--site-key", key]
    # All rows of a trial belong to its user, but with noise no one may measure.
    words += [] if experiment.noise else ["--measure", "scalars"]
    command = [sys.executable, "-m", "fedbilevel.cli", *words]
    return Process(f"node-{client}", command, folder)


def _stock(
    experiment: Experiment, client: int, folder: Path, link: SuperLink
) -> Process:
    own, others = _held_by(experiment, client, folder)
    held = [f"{name}={json.dumps(path)}" for name, path in own.items()]
    # A node takes user files from its operator alone.
    for kind in ("task", "algorithm"):
        named = getattr(experiment, kind)
        if named is not None and tasks.is_file(named):
            held.append(f"{kind}={json.dumps(named)}")
    held += [] if experiment.noise else ['measure="scalars"']
    held += [f"site_keys={json.dumps(os.pathsep.join(others))}"] if others else []
    config = " ".join([f'client={client} trial="true"', *held])
    command = [
        program("flower-supernode"),
        *("--insecure", "--superlink", link.address),
        *("--host", "127.0.0.1", "--port", str(processes.free_port())),
        *("--node-config", config),
    ]
    error = Path(own["state"]) / apps.ERROR
    return Process(f"node-{client}", command, folder, error=error)
