"""Compares algorithms by name: which options are whose, and what is tuned of each."""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedbilevel import algorithms
from fedbilevel._files import naming_damage
from fedbilevel._folders import COMPARISON, require_new
from fedbilevel.algorithms import Entry
from fedbilevel.errors import (
    CheckpointError,
    InvalidInputError,
    NonFiniteError,
    unknown_name,
)
from fedbilevel.experiments.built import Built, headline_only
from fedbilevel.experiments.clients import drawn
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.options import options_of
from fedbilevel.experiments.run_folder import read_json, unlike, write_json
from fedbilevel.experiments.tuning import NamedSearch, Tuning, search_of, trials_of
from fedbilevel.result import to_plain
from fedbilevel.runtime import Watch
from fedbilevel.studies.budgets import TRIALS
from fedbilevel.studies.comparison import Comparison, Contender, compared
from fedbilevel.studies.setting import Keeping


@dataclass(frozen=True)
class NamedComparison:
    """A comparison, and the options, judgment and rounds of every trial, by name."""

    found: Comparison
    trials: dict[str, list[tuple[dict[str, str], float, int]]]


def compare(
    experiment: Experiment,
    names: Sequence[str],
    seeds: int,
    *,
    tuning: Tuning | None = None,
    equal: str = TRIALS,
    folder: Path | str | None = None,
    resume: bool = False,
    about: Callable[[str], None] = lambda name: None,
    watch: Watch | None = None,
) -> NamedComparison:
    """Run every named algorithm from the same seeds.

    Options of the experiment go to each algorithm that knows them; `name.option` goes
    to one alone. With a `tuning` each is tuned first, as by `tune`, all with `equal`
    trials, samples, bytes or seconds. With a folder results are saved there; `resume`
    continues the comparison in it, where what is finished is not run again.
    `about(name)` is called before each algorithm, and `watch` is shown the task's
    headline metric while it runs.
    """
    if not names or len(set(names)) < len(names) or seeds < 1:
        raise InvalidInputError(
            f"algorithms={','.join(names)}, seeds={seeds}: name each algorithm once, "
            "and ask for at least one seed."
        )
    settings = {
        "experiment": asdict(experiment),
        "seeds": seeds,
        "tuning": None if tuning is None else asdict(tuning),
        "equal": equal,
    }
    folder = None if folder is None else Path(folder)
    if folder is not None:
        _check_folder(folder, resume, settings)
    entries = _entries(names)
    built, contenders, searches = _built(experiment, names[0], entries, tuning)
    if folder is not None:
        path = folder / COMPARISON
        earlier = read_json(path).get("names", {}) if path.exists() else {}
        given = zip(entries, map(algorithms.as_name, names), strict=True)
        write_json(path, {**settings, "names": {**earlier, **dict(given)}})
    sampling = drawn(experiment, built.task, built.setting.sampling)
    # Where one pools rows, client 0 may be all of them.
    pools = any(entry.pools for entry in entries.values())
    with nullcontext() if pools else built.naming_sites():
        found = compared(
            # Rows are where they are, in whatever order methods are compared.
            replace(built.setting, data=built.task.data, sampling=sampling),
            contenders,
            built.rounds,
            range(experiment.seed, experiment.seed + seeds),
            # The folder was looked at: it is new, or this comparison's own.
            keeping=None if folder is None else Keeping(folder, resume=True),
            about=about,
            equal=equal,
            tuning=tuning and {"rungs": tuning.rungs, "count": tuning.seeds},
            measure_every=experiment.measure_every or 1,
            stopping=experiment.stopping(built.setting.headline),
            watch=headline_only(watch, built.setting.headline),
            task=experiment.label,
            config=built.config,
        )
    _name_results(built, entries, found, folder)
    trials = {name: trials_of(searches[name], one) for name, one in found.tuned.items()}
    return NamedComparison(found, trials)


def _check_folder(folder: Path, resume: bool, settings: Mapping[str, Any]) -> None:
    """Raise unless a folder is new, or holds this very comparison to continue."""
    path = folder / COMPARISON
    if not resume:
        require_new(folder)
        return
    if not path.exists():
        raise CheckpointError(
            f"{folder} holds no {COMPARISON}: no comparison began there."
        )
    held, plain = read_json(path), json.loads(json.dumps(to_plain(settings)))
    with naming_damage(path):
        apart = unlike(held, plain) - {"experiment", "names"}
        apart |= unlike(held["experiment"], plain["experiment"])
    if apart:
        raise CheckpointError(
            f"{folder} holds a comparison with other settings of "
            f"{', '.join(sorted(apart))}. Continue with the settings of its start, or "
            "choose a new folder."
        )


def _entries(names: Sequence[Any]) -> dict[str, Entry]:
    """Return the algorithms by the names that results go by."""
    found = [algorithms.find(algorithms.as_name(name)) for name in names]
    entries = {entry.name: entry for entry in found}
    if len(entries) < len(found):
        raise InvalidInputError(
            f"algorithms={','.join(map(str, names))}: two of them have the same name "
            "of their own, so that their results could not be distinguished."
        )
    return entries


def _built(
    experiment: Experiment,
    first: Any,
    entries: Mapping[str, Entry],
    tuning: Tuning | None,
) -> tuple[Built, dict[str, Contender], dict[str, NamedSearch]]:
    """Build the task once, and every contender; return with what is searched."""
    for_task = experiment.task_options.keys()
    known = {name: options_of(entry).keys() for name, entry in entries.items()}
    own = _shared_out(experiment.options, known, for_task)
    only_task = {n: v for n, v in experiment.options.items() if n in for_task}
    built = replace(experiment, algorithm=first, options=only_task).build()
    about = (built.task.recommended, built.task.data.clients)
    contenders, searches = {}, {}
    for name, entry in entries.items():
        searches[name] = search_of(experiment, entry, *about, own[name])
        contenders[name] = _contender(experiment, built, entry, searches[name], tuning)
    return built, contenders, searches


def _name_results(
    built: Built, entries: Mapping[str, Entry], found: Comparison, folder: Path | None
) -> None:
    """Give results the names, and what the task concludes, also where they are kept."""
    sites = built.task.names
    for name, error in found.diverged.items():
        if isinstance(error, NonFiniteError) and sites and not entries[name].pools:
            found.diverged[name] = error.at(sites[error.client])
    for name, results in found.results.items():
        one = built._replace(entry=entries[name])
        found.results[name] = [one.named(result) for result in results]
        if folder is not None:
            for result in found.results[name]:
                result.save(folder / name / f"seed-{result.config['seed']}")


def _contender(
    experiment: Experiment,
    built: Built,
    entry: Entry,
    named: NamedSearch,
    tuning: Tuning | None,
) -> Contender:
    """Return an algorithm as it is, or what is searched of it."""
    search = tuning and named.search(tuning.trials, tuning.sampler)
    first = search.first() if search else named.build(named.given)
    setting = experiment.setting(built.task, entry, built.setting.channel)
    shown = built._replace(entry=entry, algorithm=first, setting=setting)
    shown.job()  # which warns where the limit will be off
    return Contender(search or (first,), entry.pools)


def _shared_out(
    options: Mapping[str, str], known: Mapping[str, Set[str]], for_task: Set[str]
) -> dict[str, dict[str, str]]:
    """Return the options that each algorithm takes, and the task does not."""
    chosen: dict[str, dict[str, str]] = {name: {} for name in known}
    for option, value in options.items():
        owner, dot, rest = option.rpartition(".")
        if dot and owner not in known:
            raise unknown_name("algorithm of the option", owner, known)
        takers = known[owner] if dot else set(for_task).union(*known.values())
        if rest not in takers:
            raise unknown_name("option", rest, sorted(takers))
        for name in [owner] if dot else known:
            if rest in known[name] - for_task:
                chosen[name][rest] = value
    return chosen
