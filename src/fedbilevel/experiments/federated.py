"""Named experiments on real sites: serves a federation, and replays one.

The server has no rows. It learns from the sites what a task recommends, its shapes and
first values, and builds the algorithm from that; both sides compare fingerprints of the
settings and of the algorithm before anything is computed.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np

from fedbilevel import _files, algorithms, federation
from fedbilevel._folders import FEDERATION
from fedbilevel._types import Pair
from fedbilevel.algorithms import AbstractAlgorithm, Entry
from fedbilevel.datasets import Preparation
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.evaluation import split
from fedbilevel.experiments import agreement, served_model
from fedbilevel.experiments.built import headline_only, leave_files
from fedbilevel.experiments.clients import agreed as agreed_weights
from fedbilevel.experiments.clients import counted, require_signal
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.run_folder import unlike
from fedbilevel.federation.server.measuring import together
from fedbilevel.federation.wire import CHECKSUM, Seal
from fedbilevel.result import Result
from fedbilevel.runtime import (
    Checkpoints,
    Job,
    OnRound,
    Outcome,
    Sampling,
    SimulatorRuntime,
    Watch,
    execute,
)
from fedbilevel.runtime.job import ABSENT, RENEWED
from fedbilevel.runtime.traced_calls import SAMPLES
from fedbilevel.studies.single import Ran, executed, result_of

ATTENDANCE, LEFT_OUT = "attendance.npz", "left-out.jsonl"
RELEASES = "releases.json"


def serve(
    transport: federation.Transport,
    experiment: Experiment,
    folder: Path,
    terms: federation.Terms,
    *,
    seal: Seal = CHECKSUM,
    watch: Watch | None = None,
    report: Callable[[str], None] = print,
    made: Callable[[dict[str, Any]], None] = lambda exchange: None,
    preparation: Preparation | None = None,
    on_round: OnRound | None = None,
    steps: agreement.SiteSteps | None = None,
) -> Result:
    """Run an experiment on the sites that a transport reaches, known by their seals.

    The folder keeps a checkpoint after every round; served again, the run continues
    from there. In the end it holds the result, and the participants of each exchange;
    `made` gets each at once, `on_round` every measured round, and may stop the run.
    Sites learn when all is over. By the `preparation` of all sites a model is left,
    too, and adapters where it is known how many tokens they have; whether it is theirs
    is known by its fingerprint. `steps` are for sites that take them from the server.
    """
    if preparation is None:
        blank = served_model.blank_of_texts(experiment)
    else:
        blank = served_model.blank_task(experiment, preparation)
    experiment, words = counted(experiment, preparation)
    identity = _identity(folder, experiment)
    if steps is not None:
        experiment = steps.applied(experiment)
    roster = gathered(transport, experiment, identity, terms, report, seal, steps)
    job, sites = agreed(experiment, roster)
    if blank is not None:
        served_model.check_blank(blank, sites, job)

    def left_out(entry: dict[str, Any]) -> None:
        with (folder / LEFT_OUT).open("a") as file:  # restarts add to it
            file.write(json.dumps(entry) + "\n")

    runtime = federation.FederationRuntime(
        job,
        roster,
        tuple(sites.metrics),
        left_out,
        sites.concludes,
        federation.ServerReleases(folder / RELEASES),
        made,
    )
    stopping = experiment.stopping(sites.headline)
    runtime.check(stopping)
    rounds = experiment.sizes(sites.recommended)["rounds"]
    require_signal(experiment, job, rounds, report)
    ran = executed(
        runtime,
        rounds,
        measure_every=experiment.measure_every or 1,
        stopping=stopping,
        checkpoints=Checkpoints(folder, every_rounds=1),
        watch=headline_only(watch, sites.headline),
        on_round=on_round,
    )
    counts = preparation.sites if preparation is not None else ()
    result = _result(experiment, sites, runtime, ran, counts)
    held = [{"name": f"client {k}", "rows": rows} for k, rows in enumerate(counts)]
    data = {"sites": held, "remarks": [words]}
    result = replace(result, config={**result.config, "data": data})
    if blank is not None:
        result = replace(result, model=served_model.model_at(blank, result, sites.task))
    attendance = ran.outcome.state.attendance
    _files.write_arrays(folder / ATTENDANCE, {"attendance": attendance})
    if steps is not None:
        experiment.save(folder)  # as it was run, for a replay
    result.save(folder)
    if blank is not None and blank.files is not None:
        leave_files(blank, result, folder)
    roster.farewell()
    return result


def gathered(
    transport: federation.Transport,
    experiment: Experiment,
    identity: federation.Identity,
    terms: federation.Terms,
    report: Callable[[str], None],
    seal: Seal,
    steps: agreement.SiteSteps | None,
) -> federation.Roster:
    """Say hello to the sites: to all at the first attempt, later to a minimum."""
    weights = agreed_weights(experiment)
    roster = federation.Roster(
        transport,
        experiment.sites,
        identity,
        terms,
        report,
        weights=() if isinstance(weights, str) else weights,
        check_facts=agreement.SiteSchema.check,
        seal=seal,
        steps=None if steps is None else asdict(steps),
    )
    first = identity.attempt == 1
    roster.gather(terms.patience, enough=roster.clients if first else terms.minimum)
    return roster


def _identity(folder: Path, experiment: Experiment) -> federation.Identity:
    """Return which federation this is: a new one, or the one begun in the folder."""
    settings = federation.settings_fingerprint(agreement.shared_settings(experiment))
    path = folder / FEDERATION
    name, attempt = secrets.token_hex(16), 0
    if path.exists():
        held = _begun(path)
        if held["settings"] != settings:
            raise CheckpointError(
                f"{folder} holds a federation with other settings. Continue it with "
                "the settings it was begun with, or choose a new folder."
            )
        name, attempt = held["federation"], held["attempt"]
    identity = federation.Identity(name, settings, attempt + 1)
    text = json.dumps({"protocol": federation.PROTOCOL, **asdict(identity)}) + "\n"
    _files.write_atomically(path, text)
    return identity


def _begun(path: Path) -> dict[str, Any]:
    """Read which federation was begun in a folder."""
    with _files.naming_damage(path):
        held = json.loads(path.read_text())
        written = held.get("protocol", "2 or older")
        if written == federation.PROTOCOL:
            kinds = {"federation": str, "settings": str, "attempt": int}
            if not all(isinstance(held[name], kind) for name, kind in kinds.items()):
                raise TypeError("it names no federation")
            return {name: held[name] for name in kinds}
    raise CheckpointError(
        f"{path.parent} holds a federation that was begun under protocol {written}, "
        f"this version of fedbilevel speaks {federation.PROTOCOL}. Finish it with "
        "the version that began it, or choose a new folder."
    )


def agreed(
    experiment: Experiment, roster: federation.Roster
) -> tuple[Job, agreement.SiteSchema]:
    """Return the job that all sites agree on, or name one that differs."""
    first = min(roster.members)
    facts, start = roster.members[first].facts, roster.members[first].start
    for client, member in sorted(roster.members.items()):
        agreement.require_alike(
            (f"client {client}", member.facts.get("alike", {})),
            (f"client {first}", facts.get("alike", {})),
            "all sites",
        )
        apart = _differences(roster.members[first], member)
        apart -= {"rounds"} if experiment.rounds else set()
        if apart:
            raise InvalidInputError(
                f"client {client} differs from client {first} in "
                f"{', '.join(sorted(apart))}. Rows must have the same columns at all "
                "sites, and labels the same classes. Recommended values may depend on "
                "the rows: give them, on the server and at all sites alike."
            )
    sites = agreement.SiteSchema(**facts)
    x = OrderedDict(zip(sites.x, start, strict=False))
    y = OrderedDict(zip(sites.y, start[len(x) :], strict=True))
    levels = zip((x, y), sites.private, strict=True)
    private = [OrderedDict(zip(at, flags, strict=True)) for at, flags in levels]
    recommended, entry = sites.recommended, entry_of(experiment, sites.algorithm)
    batch = experiment.sizes(recommended)["batch"]
    job = federation.blind_job(
        experiment.algorithm_by(entry, recommended, roster.clients),
        (x, y),
        roster.clients,
        jr.key(experiment.seed),
        sampling=Sampling(batch, experiment.participants),
        private=Pair(*private),
        separate=bool(sites.separate),
        channel=experiment.channel(),
        weights=roster.weights,
    )
    return job, sites


def entry_of(experiment: Experiment, named: str) -> Entry:
    """Return the algorithm that the sites mean, of code that the server has itself."""
    own = experiment.algorithm
    if own is None and named in {*algorithms.names(), *algorithms.installed()}:
        return agreement.federated_entry(named)
    if own is None or algorithms.identity(own) != named:
        raise InvalidInputError(
            f"the sites use the algorithm '{named:.80}', which the server has not, or "
            "not the same. Give --algorithm on the server and at all sites, each with "
            "its copy of the same file."
        )
    return agreement.federated_entry(own)


def _differences(one: federation.Member, other: federation.Member) -> set[str]:
    """Return the names of what two clients report differently."""
    names = unlike(one.facts, other.facts)
    mine, theirs = one.facts.get("recommended"), other.facts.get("recommended")
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = names - {"recommended"} | unlike(mine, theirs)
    same = len(one.start) == len(other.start) and all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(one.start, other.start, strict=True)
    )
    return names if same else {*names, "shapes or first values"}


def _result(
    experiment: Experiment,
    sites: agreement.SiteSchema,
    runtime: federation.FederationRuntime,
    ran: Ran,
    counts: Sequence[int],
) -> Result:
    """Return the result with the fields of a simulated one."""
    job, state = runtime.job, ran.outcome.state
    config = {
        "local_steps": experiment.sizes(sites.recommended)["local_steps"],
        "task": sites.task,
        "headline": sites.headline,
        "seed": experiment.seed,
        **experiment.channel_settings(),
    }
    result = result_of(job, ran, experiment.label, config, runtime.privacy_spent())
    shown = result.point if sites.shows_point else {}
    point = {name: leaf.tolist() for name, leaf in shown.items()}
    # Only now it is known that the run has ended.
    concluded, quality = split(
        runtime.conclude(state, int(ran.outcome.columns["round"][-1])), counts
    )
    own = {**result.final, **point}
    return replace(
        result,
        algorithm=entry_of(experiment, sites.algorithm).name,
        levels=None,  # the server knows names of leaves, and no structure
        # Sites cannot overwrite the server's values.
        final={**own, **together(list(concluded.values())), **own},
        counts=_served_counts(job, result.counts, state.traffic),
        quality=quality,
        events=[*result.events, *quality.get("warnings", ())],
    )


def _served_counts(
    job: Job, counts: Mapping[str, Any], traffic: np.ndarray
) -> dict[str, Any]:
    """Return costs as the server knows them, with what traveled.

    Where replies are of all rows the server, which has none, counts one for each site.
    """
    down, up, headers = (int(n) for n in traffic)
    wire = {"bytes_down": down, "bytes_up": up, "of_them_headers": headers}
    bounds = dict(counts.get("bounds", {}))
    if None in (job.upper_batch, job.lower_batch) or job.algorithm.sends_hessian:
        bounds |= dict.fromkeys(SAMPLES, "at least")
    return {**counts, **({"bounds": bounds} if bounds else {}), "wire": wire}


def replay(folder: Path) -> tuple[Result, Outcome, AbstractAlgorithm]:
    """Repeat a federation in the simulator, with the clients that took part.

    Needs the rows of all clients: it is for trials, and for data that may be pooled.
    """
    experiment = Experiment.load(folder)
    if not (folder / ATTENDANCE).exists():
        raise CheckpointError(
            f"{folder} holds no {ATTENDANCE}: only a finished federation can be "
            "replayed, made by `fedbilevel federate --out` or `fedbilevel serve`."
        )
    deployed = Result.load(folder)
    with _files.naming_damage(folder / ATTENDANCE):
        record = _files.read_arrays(folder / ATTENDANCE)["attendance"]
    if np.max(record, initial=ABSENT) > RENEWED:
        raise CheckpointError(
            f"{folder} holds sums that were asked again of other rows, which only "
            "version 0.2.0 draws once more. Replay it with that version."
        )
    built = replace(experiment, weights=agreed_weights(experiment)).build()
    job = built.setting.job(built.algorithm, experiment.seed)
    outcome = execute(
        SimulatorRuntime(job.replaying(record)),
        int(deployed.columns["round"][-1]),  # it may have ended early
        measure_every=experiment.measure_every or 1,
    )
    return deployed, outcome, job.algorithm
