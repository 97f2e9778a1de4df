"""Theory by names: constants, conditions, plans and exponents of an experiment."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbilevel import algorithms
from fedbilevel._files import DAMAGED
from fedbilevel._schema import checked as of_right_types
from fedbilevel.algorithms import Entry
from fedbilevel.errors import InvalidInputError, sentence_of, unknown_name
from fedbilevel.experiments.built import Built
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.options import as_options
from fedbilevel.runtime import configure
from fedbilevel.studies.planning import (
    Ground,
    SettingOf,
    calibrated,
    check_preset,
    checked,
    measure_ground,
)
from fedbilevel.studies.setting import Setting
from fedbilevel.theory.claims import CLAIMS, algorithm_by, subject_of, theorem_for
from fedbilevel.theory.plan import Calibration, Plan, practical_plan
from fedbilevel.theory.theorems import Parameters


def with_theorems() -> list[str]:
    """List the algorithms that a theorem plans; presets of one are not."""
    entries = [algorithms.find(name) for name in algorithms.names()]
    return [one.name for one in entries if one.make is one.kind and one.kind in CLAIMS]


def name_of(kind: type) -> str:
    """Return the name of an algorithm by its class."""
    entries = [algorithms.find(name) for name in algorithms.names()]
    return next(entry.name for entry in entries if entry.make is kind)


def _with_numbers(experiment: Experiment, **changes: Any) -> Experiment:
    """Return an experiment as theorems have it: steps are numbers, clients alike."""
    weights = experiment.weights or "task"
    return replace(experiment, safeguard=False, weights=weights, **changes)


def theorist(name: str) -> Entry:
    """Return an algorithm that there is a theorem of, or say which there are."""
    if name not in with_theorems():
        raise unknown_name("algorithm with a theorem", name, with_theorems())
    return algorithms.find(name)


def setting_of(experiment: Experiment) -> SettingOf:
    """Return the setting of an experiment by the number of its clients."""

    def setting(clients: int) -> Setting:
        built = _with_numbers(experiment, clients=clients).build()
        built.job()  # which warns where the limit will be off
        return built.setting

    return setting


def check_theory(
    experiment: Experiment, given: Mapping[str, float]
) -> tuple[Ground, dict[str, Any]]:
    """Say which inequalities of its theorem a configuration satisfies."""
    built = _with_numbers(experiment).build()
    built.job()  # which warns where the limit will be off
    ground, summary = checked(built.setting, built.algorithm, built.rounds, given)
    return ground, {**summary, "algorithm": built.entry.name}


def planned(
    experiment: Experiment,
    clients: int,
    *,
    preset: str,
    theorem: int | None,
    iterations: int | None,
    target: float | None,
    given: Mapping[str, float],
    seeds: int = 16,
) -> Plan:
    """Plan a run of a task by the `theory` or the `practical` preset."""
    aim = {"iterations": iterations, "target": target}
    check_preset(preset, given)
    number = theorem_for(theorist(str(experiment.algorithm)).kind, theorem)
    if preset == "theory":
        # The plan's own K has the same constants: clients are assumed to be alike.
        built = _with_numbers(experiment).build()
        ground = measure_ground(built.setting, built.algorithm, built.rounds, given)
        return ground.plan(number, clients, **aim)
    return practical_plan(calibrate(experiment, number, seeds), clients, **aim)


def calibrate(experiment: Experiment, theorem: int | None, seeds: int) -> Calibration:
    """Measure once, at small K and T, what the corollary's exponents then scale.

    The parameters are the task's own for this, or its recommended ones for one client
    with the eta, among a quarter to four times theirs, that has the lowest mean metric.
    Options of the experiment take precedence; an eta among them is kept.
    """
    entry = theorist(str(experiment.algorithm))
    number = theorem_for(entry.kind, theorem)
    built = _with_numbers(experiment, clients=1).build()
    own = built.task.calibration.get(entry.name, {})
    settings = {**built.task.recommended, **own, **experiment.options}
    first = _first_guess(number, settings, built)
    keeps_eta = bool(own) or "eta" in experiment.options
    by_clients = setting_of(experiment)
    return calibrated(by_clients, entry.kind, first, seeds, search=not keeps_eta)


def _first_guess(
    theorem: int, settings: Mapping[str, str], built: Built
) -> Calibration:
    def read(letter: str, plain: str) -> float:
        return float(settings[letter if letter in settings else plain])

    letters = Parameters(
        clients=int(settings.get("clients", "1")),
        local_steps=int(settings["local_steps"]),
        eta=float(settings.get("eta", "1")),
        alpha=read("alpha", "upper_weight"),
        beta=read("beta", "lower_weight"),
        rho1=read("rho1", "upper_step"),
        rho2=read("rho2", "lower_step"),
        first_batch=int(read("first_batch", "local_steps")),
    )
    recommended = built.rounds * built.config["local_steps"]
    iterations = int(settings.get("iterations", recommended))
    series = (float(settings["theta"]), int(settings["q"]), built.setting.sizes)
    return Calibration(theorem, iterations, letters, *series, value=1.0)


def follow_file(path: Path, experiment: Experiment) -> Experiment:
    """Return the experiment with the algorithm and the numbers of a plan in a file."""
    try:
        written = json.loads(path.read_text())
        written.pop("algorithm", None)  # the theorem says it
        found = Plan.from_plain(of_right_types(Plan, written).plain())
    except OSError as error:
        raise InvalidInputError(f"--plan {sentence_of(error)}") from error
    except DAMAGED as error:
        raise InvalidInputError(
            f"--plan {path}: not a plan of `fedbilevel plan --out` ({error})."
        ) from error
    configure(experiment.precision)
    return follow(found, experiment)


def follow(plan: Plan, experiment: Experiment) -> Experiment:
    """Return the experiment with a plan's algorithm and all its numbers."""
    kind = subject_of(plan.theorem)
    entry = algorithms.find(name_of(kind))
    options = as_options(entry, algorithm_by(plan, kind))
    return _with_numbers(
        experiment,
        algorithm=entry.name,
        clients=plan.clients,
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        options={**experiment.options, **options},
    )
