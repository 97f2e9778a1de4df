"""Commands that run a task: `run`, `resume`, `tune` and `compare`."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel import _folders
from fedbilevel._schema import Tuning, option
from fedbilevel.cli import arguments, checks
from fedbilevel.cli.checks import TRUST_CODE, require_trust
from fedbilevel.cli.output import (
    Console,
    only_ours_on_stdout,
    print_json,
    show_data,
    show_result,
    write_report,
)
from fedbilevel.cli.progress import watched
from fedbilevel.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment
    from fedbilevel.experiments.comparison import NamedComparison
    from fedbilevel.experiments.tuning import NamedTuned
    from fedbilevel.report import Standing


def _new_or_finished(given: checks.Given) -> None:
    """Raise unless --out is left out, new, or holds a finished run to extend."""
    out = given["out"]
    if out is None:
        return
    if given["tune"] and (out / _folders.TUNING / _folders.SEARCH).exists():
        _folders.require_own(out, (_folders.TUNING,))
    elif not all(
        (out / name).exists() for name in (_folders.RESULT, _folders.EXPERIMENT)
    ):
        checks.folder_to_make(given)


TUNE = option(False, "tune steps and weights first; what --set gives stays as it is")


@arguments.takes(
    *(checks.data, checks.client_states, _new_or_finished),
    experiment=arguments.EXPERIMENT,
    hosts=arguments.HOSTS,
    tuning=arguments.TUNING,
)
def run(
    experiment: "Experiment",
    hosts: arguments.Hosts,
    tuning: Tuning,
    plan: Path | None = arguments.PLAN_FILE,
    tune: bool = TUNE,
    out: Path | None = option(
        None,
        "folder for checkpoints and result: a new one, or that of the same experiment "
        "with fewer --rounds, to extend it",
    ),
    track: str | None = arguments.TRACK,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Run an algorithm on a task.

    Sizes that are left out are those the task recommends. Several processes, each
    started with the same arguments but its own number, compute one run together.
    """
    if tune and hosts.processes is not None:
        raise InvalidInputError(
            "--tune runs on one machine. Tune there first, by `fedbilevel tune`, and "
            "give what it finds to every process."
        )
    hosts.join_if_asked()
    if plan is not None:
        from fedbilevel.experiments.theory import follow_file

        experiment = follow_file(plan, experiment)
    resumes = out is not None and (out / _folders.RESULT).exists()
    if out is not None and resumes:
        from fedbilevel.experiments.run_folder import require_extension

        require_extension(experiment, out)
    if tune:
        folder = None if out is None else out / _folders.TUNING
        found = _search(experiment, tuning, folder, quiet=as_json)
        experiment = found.experiment
        if not as_json:
            _show_tuned(found, Console(stderr=True))
        if out is not None:
            experiment.save(out)
            resumes = True
    _execute(experiment, out, track, resume=resumes, as_json=as_json)


def _search(
    experiment: "Experiment", tuning: Tuning, folder: Path | None, *, quiet: bool
) -> "NamedTuned":
    from fedbilevel.experiments import tuning as searches
    from fedbilevel.runtime import configure, reporting

    configure(experiment.precision)
    with (
        only_ours_on_stdout(),
        watched(f"tuning {experiment.label}", quiet=quiet) as watch,
        reporting(watch.stage),
    ):
        return searches.tune(experiment, tuning, folder=folder, watch=watch)


def _show_tuned(found: "NamedTuned", console: Console) -> None:
    from fedbilevel.report import trials_table

    name = str(found.experiment.algorithm)
    console.print(trials_table({name: found.trials}, found.found.judged_by))
    cost, unit = found.found.cost, found.found.unit
    console.print(f"They took {cost:,} {unit}. To run with the best:")
    console.print(found.command, markup=False, highlight=False, soft_wrap=True)


def _new_search(given: checks.Given) -> None:
    """Raise unless --out is left out, can be made, or holds a search to continue."""
    if given["out"] is None or not (given["out"] / _folders.SEARCH).exists():
        checks.folder_to_make(given)


_SEARCHED = arguments.EXPERIMENT.without(
    *("runtime", "client_states", "measure_every", "force"),
    *("checkpoint_rounds", "checkpoint_seconds"),
    *("target", "patience", "max_bytes", "max_samples", "max_seconds"),
)


@arguments.takes(
    checks.data, _new_search, experiment=_SEARCHED, tuning=arguments.TUNING
)
def tune(
    experiment: "Experiment",
    tuning: Tuning,
    out: Path | None = option(
        None,
        "folder for what was tried: a new one, or that of the same search, "
        "interrupted, to continue it",
    ),
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Tune an algorithm on a task: many short trials, of which the best continue.

    Searched are the upper step, the lower step and the weight of momentum, or what
    --set gives as a range or list. Trials are judged on validation rows that are held
    out, never on test rows.
    """
    found = _search(experiment, tuning, out, quiet=as_json)
    if as_json:
        print_json(found.summary())
        return
    _show_tuned(found, Console())
    if out is not None:
        Console().print(f"Saved in {out}")


@arguments.takes(hosts=arguments.HOSTS)
def resume(
    hosts: arguments.Hosts,
    folder: Path = option(MISSING, "run folder made by --out", spelled=""),
    trust_code: bool = TRUST_CODE,
    track: str | None = arguments.TRACK,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Continue an interrupted run; the result is that of the run never interrupted."""
    del trust_code  # was heard before
    if (folder / _folders.FEDERATION).exists():
        how = _folders.how_to_continue(folder) or "It has finished."
        raise CheckpointError(f"{folder} holds a federation. {how}")
    from fedbilevel.experiments import Experiment

    experiment = Experiment.load(folder)
    require_trust(experiment)
    hosts.join_if_asked()
    _execute(experiment, folder, track, resume=True, as_json=as_json)


def _execute(
    experiment: "Experiment",
    folder: Path | None,
    track: str | None,
    *,
    resume: bool,
    as_json: bool,
) -> None:
    from fedbilevel.runtime import configure, mesh
    from fedbilevel.tracking import check_tracking, tracker

    # Before the first question to JAX, which settles how many cores it uses.
    configure(experiment.precision)
    tracked = nullcontext(None)
    if track is not None and mesh.is_first():
        check_tracking(track, resume=resume)
        tracked = tracker(track, about=experiment.chosen(), resume=resume)
    with (
        only_ours_on_stdout(),
        tracked as on_round,
        watched(experiment.label, quiet=as_json) as watch,
    ):
        result = experiment.run(
            folder,
            resume=resume,
            watch=watch,
            on_round=on_round,
            built=None if as_json else show_data,
            about=watch.stage,
            say=watch.say,
        )
    if mesh.is_first():
        show_result(result, folder, as_json)


_COMPARED = arguments.EXPERIMENT.only(
    *("task", "clients", "participants", "rounds", "local_steps", "batch", "data"),
    *arguments.TABLE,
    *("settings", "precision", "measure_every", "weights"),
    *("dropout", "participation"),
)


def _new_comparison(given: checks.Given) -> None:
    """Raise unless --out is left out, can be made, or is to be continued."""
    if not given["resume"]:
        checks.folder_to_make(given)
    elif given["out"] is None:
        raise InvalidInputError("--resume needs --out, the folder to continue in.")


@arguments.takes(
    checks.data, _new_comparison, experiment=_COMPARED, tuning=arguments.TUNING
)
def compare(
    experiment: "Experiment",
    tuning: Tuning,
    names: str | None = option(
        None,
        "names, separated by commas; without them the recommended ones",
        spelled="--algorithms",
    ),
    seeds: int = option(5, "random seeds per algorithm"),
    target: float | None = option(
        None, "value whose cost is reported; nine tenths of the progress if left out"
    ),
    tune: bool = TUNE,
    equal: str = option(
        "trials",
        "alike for all: trials; or samples, bytes or seconds, in the ranking, too",
    ),
    out: Path | None = option(None, "new folder for results and curves"),
    resume: bool = option(
        False,
        "continue the comparison in the folder of --out, given the same settings; "
        "what is finished there is not run again",
    ),
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Compare algorithms on a task: same data, start and cohorts for all.

    Without --algorithms they are those that `fedbilevel recommend` names. Options go to
    every algorithm that knows them, --set NAME.KEY=VALUE to one alone. With --tune each
    is tuned first, all with as many trials, or at one cost (--equal).
    """
    from fedbilevel._files import write_atomically
    from fedbilevel.experiments import comparison as comparisons
    from fedbilevel.experiments.recommendation import Situation, recommend
    from fedbilevel.experiments.run_folder import write_json
    from fedbilevel.report import draw_curves
    from fedbilevel.runtime import configure, reporting

    configure(experiment.precision)
    chosen = [one.strip() for one in (names or "").split(",")]
    if names is None:
        asked = Situation(participants=experiment.participants)
        chosen = [one.name for one in recommend(experiment, asked)]
        if not as_json:
            Console().print(f"Comparing what is recommended here: {', '.join(chosen)}")
    with watched(experiment.task, quiet=as_json) as watch, reporting(watch.stage):
        made = comparisons.compare(
            experiment,
            chosen,
            seeds,
            tuning=tuning if tune else None,
            equal=equal,
            folder=out,
            resume=resume,
            about=lambda name: watch.begin(f"{name}, {seeds} seeds"),
            watch=watch,
        )
    standings, summary = _ranked(experiment.label, made, target, equal)
    if out is not None:
        write_json(out / _folders.COMPARED, summary)
        aim = (summary["metric"], summary["target"])
        write_atomically(out / "curves.png", draw_curves(made.found.results, *aim))
        write_report(out)
    if as_json:
        print_json(summary)
        return
    _show_ranked(made, standings, summary)
    if out is not None:
        Console().print(f"Saved in {out}: results, comparison.json, curves.png, report")


def _ranked(
    task: str, made: "NamedComparison", target: float | None, equal: str
) -> tuple[list["Standing"], dict[str, Any]]:
    """Rank what was compared; return the ranking, and all of it as plain data."""
    from fedbilevel.experiments.traits import reconstructed
    from fedbilevel.report import default_target, equal_cost, ranking

    results, metric = made.found.results, made.found.headline
    value = default_target(results, metric) if target is None else target
    standings = ranking(results, metric, value, equal)
    most = equal_cost(results, equal)
    names = [one.algorithm for one in standings]
    return standings, {
        "task": task,
        "metric": metric,
        "target": value,
        "ranking": [asdict(one) for one in standings],
        "equal": equal,
        "equal_cost": most if math.isfinite(most) else None,
        "tuning": {name: one.spent() for name, one in made.found.tuned.items()},
        "trials": made.trials,
        "diverged": {name: str(error) for name, error in made.found.diverged.items()},
        # The listings of these are unverified.
        "reconstructed": [name for name in names if reconstructed(name)],
    }


def _show_ranked(
    made: "NamedComparison", standings: Sequence["Standing"], summary: dict[str, Any]
) -> None:
    from fedbilevel.report import ranking_table, trials_table
    from fedbilevel.standings import cost_said, tuning_said

    console = Console()
    if made.trials:
        judged = next(iter(made.found.tuned.values())).judged_by
        console.print(trials_table(made.trials, judged))
    for name, spent in summary["tuning"].items():
        console.print(f"{name}: {tuning_said(spent)}.", highlight=False)
    when, cost = {}, cost_said(made.found.results, summary["equal"])
    if cost:
        when["when"] = f"{cost} each"
    goal = (summary["metric"], summary["target"])
    console.print(ranking_table(standings, *goal, **when))
    if summary["reconstructed"]:
        names = ", ".join(summary["reconstructed"])
        console.print(f"Reconstructed from an abstract, unverified: {names}.")
    for name, error in summary["diverged"].items():
        console.print(f"{name} diverged: {error}", markup=False)
