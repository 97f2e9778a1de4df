"""The command that repeats what a folder holds."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from fedbilevel.errors import CheckpointError
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.searching import Tuning

__all__ = ["arguments_of", "comparison_command", "run_command"]

# Of these a command has no option of the same name, or `options` has one of its own.
_ELSEWHERE = ("task", "options", "weights")


def run_command(settings: Mapping[str, Any], runtime: str) -> str:
    """Return what to type for a run; `runtime` is the one that it was made by."""
    experiment = _experiment(settings)
    if runtime in ("simulator", "reference"):
        return _joined(["run", *arguments_of(experiment)])
    # Of a federation: `serve` needs the keys of its sites, a trial needs nothing.
    words = arguments_of(experiment, renamed={"patience": "stop-patience"})
    return _joined(["federate", *words])


def comparison_command(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return what to type for a comparison of these algorithms."""
    try:
        experiment = _experiment(settings["experiment"])
        seeds, tuning = int(settings["seeds"]), settings.get("tuning")
        tuned = [] if tuning is None else ["--tune", *_tuning(tuning)]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"settings.json is damaged: {error}.") from error
    words = [*arguments_of(experiment), "--algorithms", ",".join(names)]
    words += ["--seeds", str(seeds)]
    return _joined(["compare", *words, *tuned])


def _tuning(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a search that are not as if they were left out."""
    words = []
    for name, default in asdict(Tuning()).items():
        if given.get(name, default) != default:
            option = "tuning-seeds" if name == "seeds" else name
            words += [f"--{option}", str(given[name])]
    return words


def _experiment(settings: Mapping[str, Any]) -> Experiment:
    try:
        return Experiment(**settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the saved settings are damaged: {error}.") from error


def arguments_of(
    experiment: Experiment,
    renamed: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> list[str]:
    """Return all that is not as if it was left out, as it is typed.

    `renamed` are options of the command that have other names; those `without` are not
    the command's.
    """
    words = [experiment.task]
    for one in fields(experiment):
        value = getattr(experiment, one.name)
        if one.name in (*_ELSEWHERE, *without) or value == one.default:
            continue
        name = (renamed or {}).get(one.name, one.name.replace("_", "-"))
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    if experiment.weights:
        words += ["--weights", ",".join(map(repr, experiment.weights))]
    for name, value in experiment.options.items():
        words += ["--data", value] if name == "data" else ["--set", f"{name}={value}"]
    return words


def _joined(words: Sequence[str]) -> str:
    return shlex.join(["fedbilevel", *words])
