"""Named experiments on real sites: builds a site, serves a federation, replays one.

The server has no rows. It learns from the sites what a task recommends, its shapes and
first values, and builds the algorithm from that; both sides compare fingerprints of the
settings and of the algorithm before anything is computed.
"""

import functools
import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree, algorithms
from fedbilevel._files import read_arrays, write_arrays, write_atomically
from fedbilevel._types import Pair
from fedbilevel.algorithms import AbstractAlgorithm, Entry
from fedbilevel.channels import PLAIN
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.experiments.experiment import Experiment, headline_only, weighing
from fedbilevel.experiments.facts import check_facts
from fedbilevel.federation import (
    PROTOCOL,
    FederationRuntime,
    Fingerprints,
    Identity,
    Member,
    Roster,
    ServerReleases,
    Site,
    SiteLimits,
    Terms,
    Transport,
    algorithm_fingerprint,
    blind_job,
    settings_fingerprint,
)
from fedbilevel.federation.server.conclusions import together
from fedbilevel.federation.wire import CHECKSUM, Seal
from fedbilevel.problem import as_weights
from fedbilevel.result import Result, to_plain
from fedbilevel.runtime import (
    Checkpoints,
    Job,
    Ledger,
    Outcome,
    Sampling,
    SimulatorRuntime,
    Watch,
    execute,
)
from fedbilevel.runtime.privacy import privacy_spent
from fedbilevel.studies.single import named_leaves, result_of
from fedbilevel.tasks import Task

if TYPE_CHECKING:
    from fedbilevel.federation.secure.identity import SiteIdentity

__all__ = [
    "ATTENDANCE",
    "LEFT_OUT",
    "RELEASES",
    "build_site",
    "clients_of",
    "replay",
    "serve",
    "shared_settings",
]

_FILE, ATTENDANCE, LEFT_OUT = "federation.json", "attendance.npz", "left-out.jsonl"
RELEASES = "releases.json"
# How long to run, where rows lie, and what is kept are each side's own business.
_LENGTH = ("rounds", "target", "patience", "max_bytes", "max_samples", "max_seconds")
_KEPT = ("runtime", "measure_every", "checkpoint_rounds", "checkpoint_seconds")


# What both sides must agree on


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that server and sites compare."""
    own = (*_LENGTH, *_KEPT)
    settings = {n: v for n, v in asdict(experiment).items() if n not in own}
    options = dict(experiment.options)
    options.pop("data", None)
    return {**settings, "options": options}


def clients_of(experiment: Experiment) -> int:
    """Return the number of sites, which must be given."""
    if experiment.clients is None:
        raise InvalidInputError("give --clients, the number of sites.")
    return experiment.clients


def _federated(name: str) -> Entry:
    """Return an algorithm that can run where rows stay at the sites."""
    entry = algorithms.find(name)
    if entry.pools:
        raise InvalidInputError(
            f"'{name}' needs the rows of all clients in one place, so that it cannot "
            "run on sites. Simulate it, or choose another algorithm."
        )
    return entry


# A site


def build_site(
    experiment: Experiment,
    client: int,
    *,
    trial: bool = False,
    folder: Path | None = None,
    holds: bool = True,
    report: Callable[[str], None] = print,
    seal: Seal = CHECKSUM,
    limits: SiteLimits | None = None,
    identity: "SiteIdentity | None" = None,
    minimum: int = 2,
) -> Site:
    """Return client number `client` of the experiment, with its rows.

    The option `data` is where this site's own rows lie, and no others are read. In a
    `trial` it is data of all clients, dealt as in a simulation, and this site takes its
    share. `folder` keeps what the client remembers between exchanges. `holds` says
    whether this process sees all packets that are sent to the client. `report` is told
    of packets that nobody foresaw. `seal` is how it knows the server's. `limits` are
    what its operator allows. With a secure mean, `identity` has the keys by which the
    sites know each other, and `minimum` is the fewest sites that this one's reply is
    summed with, itself among them.
    """
    clients = clients_of(experiment)
    if not 2 <= minimum <= max(clients, 2):
        raise InvalidInputError(
            f"minimum={minimum}: a sum hides a reply among 2 sites or more, and there "
            f"are {clients}."
        )
    if not 0 <= client < clients:
        raise InvalidInputError(
            f"client {client}: the {clients} clients are numbered from 0."
        )
    task, values = _task(experiment, client, clients, trial)
    entry = _federated(experiment.algorithm_for(task))
    algorithm = experiment.algorithm_by(entry, task.recommended, clients)
    # Alone here, this client is one of so many elsewhere: what depends on their number
    # is checked on the server.
    alone = replace(experiment, participants=None)
    job = alone.setting(task, entry, PLAIN).job(algorithm, experiment.seed)
    participants = experiment.participants or clients
    channel = experiment.channel().shared_by(participants)
    job = replace(job, clients=clients, participants=participants, channel=channel)
    settings = settings_fingerprint(shared_settings(experiment))
    return Site(
        job,
        client,
        Fingerprints(settings, algorithm_fingerprint(job)),
        facts=_facts(task, job, entry.name, values, experiment),
        folder=folder,
        holds=holds,
        conclude=_conclusion(task, job),
        report=report,
        seal=seal,
        limits=limits,
        identity=identity,
        minimum=minimum,
    )


def _task(
    experiment: Experiment, client: int, clients: int, trial: bool
) -> tuple[Task, dict[str, Any]]:
    """Build the task of one client: of its own rows, or of its share of all."""
    alone = experiment if trial else replace(experiment, clients=1)
    task, values, _ = replace(alone, weights=()).build_task()
    if trial and task.data.clients != clients:
        raise InvalidInputError(
            f"task '{experiment.task}' has {task.data.clients} clients, not {clients}."
        )
    if trial:
        share = jax.tree.map(lambda leaf: leaf[client : client + 1], task.data)
        task = eqx.tree_at(lambda one: one.data, task, share)
    return _weighed(task, experiment, client, clients), values


def _weighed(task: Task, experiment: Experiment, client: int, clients: int) -> Task:
    """Give a client the weight that the settings say, which all sides compare.

    Without one a client weighs 1: the server would not know of another.
    """
    weights = as_weights(experiment.weights or None, clients)
    own = float(task.data.weights[0])
    if not experiment.weights and own != 1:
        raise InvalidInputError(
            f"task '{experiment.task}' gives client {client} the weight {own:g}, but "
            "in a federation the operator of the server decides what clients count. "
            "Give --weights, on the server and at all sites alike."
        )
    return weighing(task, [float(weights[client])])


def _facts(
    task: Task, job: Job, name: str, values: dict[str, Any], experiment: Experiment
) -> dict[str, Any]:
    """Return what the server must know of the task, which has no rows of its own."""
    values = {option: value for option, value in values.items() if option != "data"}
    # What a task recommends may depend on the rows; what was chosen does not.
    chosen = {**experiment.options, **experiment.sizes(task.recommended)}
    used = {o: str(chosen.get(o, value)) for o, value in task.recommended.items()}
    return to_plain(
        {
            "algorithm": name,
            "recommended": used,
            "headline": task.headline,
            "shows_point": task.shows_point,
            "task": values,
            "classes": settings_fingerprint({"classes": task.classes}),
            "metrics": sorted(jax.eval_shape(job.measured, job.x, job.y)),
            "concludes": task.concludes,
            "x": _tree.leaf_names(job.x),
            "y": _tree.leaf_names(job.y),
            "private": [
                [bool(flag) for flag in jax.tree.leaves(flags)]
                for flags in (job.private.x, job.private.y)
            ],
        }
    )


def _conclusion(task: Task, job: Job) -> Callable[[PyTree], dict[str, Any]] | None:
    """Return how a finished run is told more of, where the rows are; or None."""
    if task.conclusion is None:
        return None
    conclude = task.conclusion

    def tell(state: PyTree) -> dict[str, Any]:
        point = job.algorithm.point(state)
        leaves = {**named_leaves("x", point.x), **named_leaves("y", point.y)}
        told = to_plain(conclude(task, jax.tree.map(np.asarray, leaves)))
        # What is no number, such as a mean over nothing, is nothing to tell.
        return {name: value for name, value in told.items() if value is not None}

    return tell


# The server


def serve(
    transport: Transport,
    experiment: Experiment,
    folder: Path,
    terms: Terms,
    *,
    seal: Seal = CHECKSUM,
    watch: Watch | None = None,
    report: Callable[[str], None] = print,
) -> Result:
    """Run an experiment on the sites that a transport reaches, known by their seals.

    The folder keeps a checkpoint after every round; served again, the run goes on from
    there. In the end it holds the result, and who took part in each exchange.
    """
    clients = clients_of(experiment)
    identity = _identity(folder, experiment)
    roster = Roster(
        transport,
        clients,
        identity,
        terms,
        report,
        weights=experiment.weights,
        check_facts=check_facts,
        seal=seal,
    )
    first = identity.attempt == 1
    roster.gather(terms.patience, enough=clients if first else terms.minimum)
    job, facts = _agreed(experiment, roster)
    left_out = functools.partial(_note, folder / LEFT_OUT)
    releases, metrics = ServerReleases(folder / RELEASES), tuple(facts["metrics"])
    runtime = FederationRuntime(
        job, roster, metrics, left_out, facts["concludes"], releases
    )
    stopping = experiment.stopping(facts["headline"])
    runtime.check(stopping)
    rounds, ledger = experiment.sizes(facts["recommended"])["rounds"], Ledger(job)
    privacy_spent(job, ledger, rounds)  # or why not, before it runs
    outcome = execute(
        runtime,
        rounds,
        measure_every=experiment.measure_every,
        stopping=stopping,
        checkpoints=Checkpoints(folder, every_rounds=1),
        watch=headline_only(watch, facts["headline"]),
    )
    result = _result(experiment, facts, outcome, runtime, ledger)
    write_arrays(folder / ATTENDANCE, {"attendance": outcome.state.attendance})
    result.save(folder)
    return result


def _identity(folder: Path, experiment: Experiment) -> Identity:
    """Return which federation this is: a new one, or the one begun in the folder."""
    path, settings = folder / _FILE, settings_fingerprint(shared_settings(experiment))
    name, attempt = secrets.token_hex(16), 0
    if path.exists():
        held = _begun(path)
        if held["settings"] != settings:
            raise CheckpointError(
                f"{folder} holds a federation with other settings. Continue it with "
                "the settings it was begun with, or choose a new folder."
            )
        name, attempt = held["federation"], held["attempt"]
    identity = Identity(name, settings, attempt + 1)
    text = json.dumps({"protocol": PROTOCOL, **asdict(identity)}) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
    return identity


def _begun(path: Path) -> dict[str, Any]:
    """Read which federation was begun in a folder."""
    try:
        held = json.loads(path.read_text())
        written = held.get("protocol", "2 or older")
        if written == PROTOCOL:
            return {n: held[n] for n in ("federation", "settings", "attempt")}
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    raise CheckpointError(
        f"{path.parent} holds a federation that was begun under protocol {written}, "
        f"this version of fedbilevel speaks {PROTOCOL}. Finish it with the version "
        "that began it, or choose a new folder."
    )


def _agreed(experiment: Experiment, roster: Roster) -> tuple[Job, Mapping[str, Any]]:
    """Return the job that all sites mean, or say who means another."""
    first = min(roster.members)
    facts, start = roster.members[first].facts, roster.members[first].start
    for client, member in sorted(roster.members.items()):
        apart = _differences(roster.members[first], member)
        apart -= {"rounds"} if experiment.rounds else set()
        if apart:
            raise InvalidInputError(
                f"client {client} differs from client {first} in "
                f"{', '.join(sorted(apart))}. Rows must have the same columns at all "
                "sites, and labels the same classes. What a task recommends may depend "
                "on the rows: choose it, on the server and at all sites alike."
            )
    x = OrderedDict(zip(facts["x"], start, strict=False))
    y = OrderedDict(zip(facts["y"], start[len(x) :], strict=True))
    levels = zip((x, y), facts["private"], strict=True)
    private = [OrderedDict(zip(at, flags, strict=True)) for at, flags in levels]
    recommended, entry = facts["recommended"], _federated(facts["algorithm"])
    batch = experiment.sizes(recommended)["batch"]
    job = blind_job(
        experiment.algorithm_by(entry, recommended, roster.clients),
        (x, y),
        roster.clients,
        jr.key(experiment.seed),
        sampling=Sampling(batch, experiment.participants),
        private=Pair(*private),
        channel=experiment.channel(),
        weights=roster.weights,
    )
    return job, facts


def _differences(one: Member, other: Member) -> set[str]:
    """Return the names of what two clients told differently."""
    names = _unlike(one.facts, other.facts)
    mine, theirs = one.facts.get("recommended"), other.facts.get("recommended")
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = names - {"recommended"} | _unlike(mine, theirs)
    same = len(one.start) == len(other.start) and all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(one.start, other.start, strict=True)
    )
    return names if same else {*names, "shapes or first values"}


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def _result(
    experiment: Experiment,
    facts: Mapping[str, Any],
    outcome: Outcome,
    runtime: FederationRuntime,
    ledger: Ledger,
) -> Result:
    """Return the result with the fields of a simulated one."""
    sizes, state = experiment.sizes(facts["recommended"]), outcome.state
    settings = {
        "rounds": sizes["rounds"],
        "runtime": runtime.name,
        "measure_every": experiment.measure_every,
        "local_steps": sizes["local_steps"],
        "task": facts["task"],
        "headline": facts["headline"],
        "seed": experiment.seed,
        **experiment.channel_settings(),
    }
    job = runtime.job
    spent = runtime.privacy_spent()
    result = result_of(job, outcome, ledger, experiment.task, settings, spent)
    shown = result.point if facts["shows_point"] else {}
    point = {name: leaf.tolist() for name, leaf in shown.items()}
    down, up, headers = (int(n) for n in state.traffic)
    wire = {"bytes_down": down, "bytes_up": up, "of_them_headers": headers}
    # Only now it is known that the run has ended.
    told = runtime.conclude(state, int(outcome.columns["round"][-1]))
    seconds = {**result.seconds, "slowest_sites": runtime.exchanges.site_seconds}
    own = {**result.final, **point}
    return replace(
        result,
        algorithm=facts["algorithm"],
        final={**own, **together(told), **own},  # nobody writes over what is our own
        counts={**result.counts, "wire": wire},
        seconds=seconds,
    )


def _note(path: Path, entry: dict[str, Any]) -> None:
    """Write down a reply that was not taken; restarts add to the file."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


# And afterwards


def replay(folder: Path) -> tuple[Result, Outcome, AbstractAlgorithm]:
    """Repeat a federation in the simulator, with the clients that took part.

    Needs the rows of all clients: it is for trials, and for whoever may pool them.
    """
    deployed, experiment = Result.load(folder), Experiment.load(folder)
    record = read_arrays(folder / ATTENDANCE)["attendance"]
    built = experiment.build()
    job = built.setting.job(built.algorithm, experiment.seed)
    outcome = execute(
        SimulatorRuntime(job.replaying(record)),
        int(deployed.columns["round"][-1]),  # it may have ended early
        measure_every=experiment.measure_every,
    )
    return deployed, outcome, job.algorithm
