"""The server of a named experiment: gathers sites, runs, and writes what happened."""

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel._files import read_arrays, write_arrays, write_atomically
from fedbilevel._types import Pair
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.deployment.settings import clients_of, mark_of
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.experiment import Experiment, headline_only
from fedbilevel.result import Result
from fedbilevel.run import result_of
from fedbilevel.runtime import Job, Ledger, Outcome, SimulatorRuntime, execute
from fedbilevel.runtime.driver import Checkpoints, Watch
from fedbilevel.runtime.federation import (
    FederationRuntime,
    Identity,
    Member,
    Roster,
    Terms,
    Transport,
    server_job,
)
from fedbilevel.runtime.privacy import privacy_spent

__all__ = ["ATTENDANCE", "LEFT_OUT", "replay", "serve"]

_FILE, ATTENDANCE, LEFT_OUT = "federation.json", "attendance.npz", "left-out.jsonl"


def serve(
    transport: Transport,
    experiment: Experiment,
    folder: Path,
    terms: Terms,
    *,
    watch: Watch | None = None,
    report: Callable[[str], None] = print,
) -> Result:
    """Run an experiment on the sites that a transport reaches.

    The folder keeps a checkpoint after every round; served again, the run goes on from
    there. In the end it holds the result, and who took part in each exchange.
    """
    clients = clients_of(experiment)
    identity = _identity(folder, experiment)
    roster = Roster(transport, clients, identity, terms, report)
    first = identity.attempt == 1
    roster.gather(terms.patience, enough=clients if first else terms.minimum)
    job, facts = _agreed(experiment, roster)
    runtime = FederationRuntime(
        job,
        roster,
        identity.experiment,
        tuple(facts["metrics"]),
        _note_left_out(folder),
    )
    rounds = experiment.sizes(facts["recommended"])["rounds"]
    outcome = execute(
        runtime,
        rounds,
        measure_every=experiment.measure_every,
        checkpoints=Checkpoints(folder, every_rounds=1),
        watch=headline_only(watch, facts["headline"]),
    )
    result = _result(experiment, facts, outcome, runtime)
    write_arrays(folder / ATTENDANCE, {"attendance": outcome.state.attendance})
    result.save(folder)
    return result


def _identity(folder: Path, experiment: Experiment) -> Identity:
    """Return which federation this is: a new one, or the one begun in the folder."""
    path, mark = folder / _FILE, mark_of(experiment)
    held = {"experiment": secrets.token_hex(16), "task": mark, "attempt": 0}
    if path.exists():
        try:
            held = json.loads(path.read_text())
            held = {name: held[name] for name in ("experiment", "task", "attempt")}
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error
        if held["task"] != mark:
            raise CheckpointError(
                f"{folder} holds a federation with other settings. Continue it with "
                "the settings it was begun with, or choose a new folder."
            )
    held["attempt"] += 1
    text = json.dumps(held) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
    return Identity(**held)


def _agreed(experiment: Experiment, roster: Roster) -> tuple[Job, dict[str, Any]]:
    """Return the job that all sites mean, or say who means another."""
    first = min(roster.members)
    facts, start = _told(roster.members[first])
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
    private = Pair(
        *(
            OrderedDict(zip(level, marks, strict=True))
            for level, marks in zip((x, y), facts["private"], strict=True)
        )
    )
    algorithm = experiment.algorithm_named(
        facts["algorithm"], facts["recommended"], roster.clients
    )
    job = server_job(
        algorithm,
        (x, y),
        clients=roster.clients,
        participants=experiment.participants,
        batch=experiment.sizes(facts["recommended"])["batch"],
        key=jr.key(experiment.seed),
        private=private,
        channel=experiment.channel(),
    )
    return job, facts


def _told(member: Member) -> tuple[dict[str, Any], list[np.ndarray]]:
    own = ("weight", "holds")
    facts = {name: value for name, value in member.info.items() if name not in own}
    return facts, member.start


def _differences(one: Member, other: Member) -> set[str]:
    """Return the names of what two clients told differently."""
    (facts, start), (others, begin) = _told(one), _told(other)
    names = _unlike(facts, others)
    mine, theirs = facts.get("recommended"), others.get("recommended")
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = names - {"recommended"} | _unlike(mine, theirs)
    same = len(start) == len(begin) and all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(start, begin, strict=True)
    )
    return names if same else {*names, "shapes or first values"}


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def _result(
    experiment: Experiment,
    facts: Mapping[str, Any],
    outcome: Outcome,
    runtime: FederationRuntime,
) -> Result:
    """Return the result with the fields of a simulated one."""
    sizes = experiment.sizes(facts["recommended"])
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
    attended = replace(runtime.job, attendance=jnp.asarray(outcome.state.attendance))
    ledger = Ledger(runtime.job)
    spent = privacy_spent(attended, ledger, sizes["rounds"], experiment.delta)
    result = result_of(runtime.job, outcome, ledger, experiment.task, settings, spent)
    shown = result.point if facts["shows_point"] else {}
    point = {name: leaf.tolist() for name, leaf in shown.items()}
    down, up, headers = (int(n) for n in outcome.state.traffic)
    wire = {"bytes_down": down, "bytes_up": up, "of_them_headers": headers}
    counts = {**result.counts, "wire": wire}
    final = {**result.final, **point, **_together(runtime.conclusions)}
    seconds = {**result.seconds, "slowest_sites": runtime.conversation.site_seconds}
    return replace(
        result,
        algorithm=facts["algorithm"],
        final=final,
        counts=counts,
        seconds=seconds,
    )


def _together(conclusions: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Average the numbers that sites concluded with; list what is no number."""
    names = {name for one in conclusions.values() for name in one}
    merged = {}
    for name in sorted(names):
        values = [one[name] for one in conclusions.values() if name in one]
        numbers = all(isinstance(value, int | float) for value in values)
        merged[name] = float(np.mean(values)) if numbers else values
    return merged


def _note_left_out(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Return how to write down a reply that was not taken; restarts add to the file."""

    def note(entry: dict[str, Any]) -> None:
        with (folder / LEFT_OUT).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    return note


def replay(folder: Path) -> tuple[Result, Outcome, AbstractAlgorithm]:
    """Repeat a federation in the simulator, with the clients that took part.

    Needs the rows of all clients: it is for trials, and for whoever may pool them.
    """
    deployed, experiment = Result.load(folder), Experiment.load(folder)
    record = read_arrays(folder / ATTENDANCE)["attendance"]
    _, job, config = experiment.job()
    outcome = execute(
        SimulatorRuntime(job.replaying(record)),
        config["rounds"],
        measure_every=experiment.measure_every,
    )
    return deployed, outcome, job.algorithm
