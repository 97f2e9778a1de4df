"""Tunes at real sites: a trial is a few rounds with steps that the server gives them.

Sites stay as they are, one trial after the other, and are judged as in a simulation: by
the upper loss on rows that each holds out, or by what the task names. The chosen values
are for the run itself. A trial that was interrupted is made again, those before it are
not.
"""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel import federation
from fedbilevel._files import make_private_folder
from fedbilevel._folders import SEARCH, TUNED, TUNING
from fedbilevel.errors import CheckpointError, DivergedError, InvalidInputError
from fedbilevel.experiments import agreement, run_folder
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.federated import agreed, entry_of, gathered
from fedbilevel.experiments.tuning import NamedSearch, Tuning, search_of
from fedbilevel.federation.server.measuring import willing
from fedbilevel.federation.wire import CHECKSUM, Seal
from fedbilevel.runtime import Watch, execute
from fedbilevel.runtime.checkpoint import Snapshot
from fedbilevel.studies.budgets import looks
from fedbilevel.studies.searching import Point, Search
from fedbilevel.studies.tuning import tuning_seeds
from fedbilevel.studies.validation import HELD_OUT

_LOSS = "upper_loss"


def tune_at_sites(
    transport: federation.Transport,
    experiment: Experiment,
    folder: Path,
    terms: federation.Terms,
    tuning: Tuning,
    rounds: int,
    *,
    seal: Seal = CHECKSUM,
    watch: Watch | None = None,
    report: Callable[[str], None] = print,
) -> agreement.SiteSteps:
    """Search options of an experiment at its sites; return the best for the run.

    A trial has `rounds` rounds. `tuning` in the folder of the run keeps what was tried.
    """
    experiment.require_tunable()
    if tuning.rungs > 1 or rounds < 1:
        raise InvalidInputError(
            "trials at sites run to their end, in at least one round: leave out rungs, "
            "and choose the rounds of a trial."
        )
    asked = {"tuning": asdict(tuning), "rounds": rounds}
    place = _opened(folder / TUNING, experiment, asked)
    trials = _Trials(transport, experiment, place, terms, seal, report)
    named, judged_by = trials.searched()
    search = named.search(tuning.trials, tuning.sampler)
    if search is None:
        raise InvalidInputError(
            "there is nothing to tune: the algorithm has no step or weight that was "
            "left open. Give a range, such as --set KEY=0.01..1."
        )
    seeds = tuning_seeds([experiment.seed], tuning.seeds)
    tried: list[tuple[Point, float]] = []
    for batch, size in enumerate(search.batches(search.count)):
        for point in search.proposed(size, tried, batch):
            steps, apart = _steps(named, point), judged_by == HELD_OUT
            given = [agreement.SiteSteps(steps, seed, apart) for seed in seeds]
            values = [trials.value(len(tried), one, rounds) for one in given]
            tried.append((point, float(np.mean(values))))
            shown = ", ".join(f"{name}={text}" for name, text in steps.items())
            report(
                f"trial {len(tried)} of {search.count}: {shown}, {judged_by} "
                f"{tried[-1][1]:.5g}"
            )
            if watch is not None:
                watch(len(tried), search.count, {})
    return _concluded(place, experiment, named, search, tried, judged_by)


def _opened(folder: Path, experiment: Experiment, asked: Mapping[str, Any]) -> Path:
    """Return the folder of a search: a new one, or that of this very search."""
    settings = {"experiment": agreement.shared_settings(experiment), **asked}
    run_folder.require_same_search(folder / SEARCH, settings)
    make_private_folder(folder)
    run_folder.write_json(folder / SEARCH, settings)
    return folder


def _steps(named: NamedSearch, point: Point) -> dict[str, str]:
    """Return the options of a point that sites do not know already."""
    options = named.options(point)
    return {name: text for name, text in options.items() if name not in named.fixed}


class _Trials(NamedTuple):
    """Makes one trial after the other at the sites of a transport."""

    transport: federation.Transport
    experiment: Experiment
    folder: Path
    terms: federation.Terms
    seal: Seal
    report: Callable[[str], None]

    def searched(self) -> tuple[NamedSearch, str]:
        """Return what is searched, and what decides, as the sites report it."""
        base = agreement.without_searched(self.experiment)
        roster = self._gathered(agreement.SiteSteps({}, base.seed))
        job, sites = agreed(base, roster)
        if sites.tuned_by is None:
            raise InvalidInputError(
                "the sites take no steps from the server. Start their nodes with "
                "--tune, too."
            )
        entry, given = entry_of(base, sites.algorithm), self.experiment.method_options
        usual = sites.recommended
        named = search_of(self.experiment, entry, usual, job.clients, given)
        return named, sites.tuned_by

    def value(self, number: int, given: agreement.SiteSteps, rounds: int) -> float:
        """Return what a trial came to; infinity where it diverged."""
        path = self.folder / f"trial-{number}-seed-{given.seed}.json"
        if path.exists():
            held = run_folder.read_json(path)
            if held.get("told") != asdict(given):
                raise CheckpointError(f"{path} is of another trial. Remove {TUNING}.")
            return math.inf if held["value"] is None else float(held["value"])
        try:
            value = self._made(given, rounds)
        except DivergedError:
            value = math.inf
        finite = math.isfinite(value)
        run_folder.write_json(
            path, {"told": asdict(given), "value": value if finite else None}
        )
        return value if finite else math.inf

    def _made(self, given: agreement.SiteSteps, rounds: int) -> float:
        roster = self._gathered(given)
        job, sites = agreed(given.applied(self.experiment), roster)
        # Metrics may know test rows: sites that hold rows out measure none.
        metrics = () if given.held_out else tuple(sites.metrics)
        runtime = federation.FederationRuntime(job, roster, metrics)
        if not willing(runtime.exchanges, "measures"):
            raise InvalidInputError(
                "no site judges a trial: with masks its operator must allow it (`node "
                "--measure scalars`), and a site needs five upper rows to hold some "
                "out. Tune elsewhere, by `fedbilevel tune`, and give the steps by "
                "--set."
            )
        column = _LOSS if given.held_out else str(sites.tuned_by)
        begin, judged = None, []
        for end in looks(rounds):
            outcome = execute(runtime, end, measure_every=rounds, begin=begin)
            begin = Snapshot(outcome.state, {}, end, {})
            judged.append(float(outcome.columns[column][-1]))
        return float(np.mean(judged))

    def _gathered(self, given: agreement.SiteSteps) -> federation.Roster:
        """Say hello to all sites, as the server of a federation of its own."""
        settings = federation.settings_fingerprint(
            agreement.shared_settings(self.experiment)
        )
        identity = federation.Identity(secrets.token_hex(16), settings, 1)
        how = (self.terms, self.report, self.seal, given)
        return gathered(self.transport, self.experiment, identity, *how)


def _concluded(
    folder: Path,
    experiment: Experiment,
    named: NamedSearch,
    search: Search,
    tried: list[tuple[Point, float]],
    judged_by: str,
) -> agreement.SiteSteps:
    """Take the best, and write down what was tried."""
    if not any(math.isfinite(value) for _, value in tried):
        raise InvalidInputError(
            f"all {len(tried)} trials diverged. Search smaller steps."
        )
    best = _steps(named, tried[search.best(tried)][0])
    trials = [{"options": _steps(named, p), "value": v} for p, v in tried]
    about = {"task": experiment.label, "judged_by": judged_by}
    run_folder.write_json(folder / TUNED, {**about, "options": best, "trials": trials})
    return agreement.SiteSteps(best, experiment.seed)
