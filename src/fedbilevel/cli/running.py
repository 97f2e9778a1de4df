"""Commands that run a task: `run`, `resume`, `tune` and `compare`."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel import _folders
from fedbilevel._folders import EXPERIMENT as EXPERIMENT_FILE
from fedbilevel._folders import RESULT
from fedbilevel.cli import checks
from fedbilevel.cli.arguments import (
    EXPERIMENT,
    TABLE,
    TUNING,
    AsJson,
    PlanFile,
    Track,
    takes,
)
from fedbilevel.cli.console import Console
from fedbilevel.cli.hosts import HOSTS, Hosts, only_ours_on_stdout
from fedbilevel.cli.output import print_json, show_data, show_result
from fedbilevel.cli.progress import watched
from fedbilevel.cli.reporting import write_report
from fedbilevel.cli.trust import TrustCode, require_trust
from fedbilevel.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment
    from fedbilevel.experiments.comparison import NamedComparison
    from fedbilevel.experiments.tuning import NamedTuned, Tuning
    from fedbilevel.report import Standing


def _new_or_finished(given: checks.Given) -> None:
    """Raise unless --out is left out, new, or holds a finished run to extend."""
    out = given["out"]
    if out is None:
        return
    if given["tune"] and (out / _folders.TUNING / _folders.SEARCH).exists():
        _folders.require_own(out, (_folders.TUNING,))
    elif not (out / RESULT).exists() or not (out / EXPERIMENT_FILE).exists():
        checks.folder_to_make(given)


_TUNE = "tune steps and weights first; what --set gives stays as it is"
Tune = Annotated[bool, typer.Option("--tune", help=_TUNE)]


@takes(
    *(checks.data, checks.client_states, _new_or_finished),
    experiment=EXPERIMENT,
    hosts=HOSTS,
    tuning=TUNING,
)
def run(
    experiment: "Experiment",
    hosts: Hosts,
    tuning: "Tuning",
    plan: PlanFile = None,
    tune: Tune = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for checkpoints and result: a new one, or that of the same "
            "experiment with fewer --rounds, to extend it"
        ),
    ] = None,
    track: Track = None,
    as_json: AsJson = False,
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
    extends = _extends(experiment, out)
    if tune:
        experiment = _tuned(experiment, tuning, out, quiet=as_json)
        if out is not None:
            experiment.save(out)
    resumes = extends or (tune and out is not None)
    _execute(experiment, out, track, resume=resumes, as_json=as_json)


def _tuned(
    experiment: "Experiment", tuning: "Tuning", out: Path | None, *, quiet: bool
) -> "Experiment":
    """Tune before a run; return the experiment with what was found."""
    folder = None if out is None else out / _folders.TUNING
    found = _search(experiment, tuning, folder, quiet=quiet)
    if not quiet:
        _show_tuned(found, Console(stderr=True))
    return found.experiment


def _search(
    experiment: "Experiment", tuning: "Tuning", folder: Path | None, *, quiet: bool
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
    out = given["out"]
    if out is not None and not (out / _folders.SEARCH).exists():
        _folders.require_new(out)
        _folders.check_place(out)


_SEARCHED = EXPERIMENT.without(
    *("runtime", "client_states", "measure_every", "force"),
    *("checkpoint_rounds", "checkpoint_seconds"),
    *("target", "patience", "max_bytes", "max_samples", "max_seconds"),
)


@takes(checks.data, _new_search, experiment=_SEARCHED, tuning=TUNING)
def tune(
    experiment: "Experiment",
    tuning: "Tuning",
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for what was tried: a new one, or that of the same search, "
            "interrupted, to continue it"
        ),
    ] = None,
    as_json: AsJson = False,
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


def _extends(experiment: "Experiment", out: Path | None) -> bool:
    """Say whether a finished run is extended; raise if it is another experiment's."""
    if out is None or not (out / RESULT).exists():
        return False
    from fedbilevel.experiments.run_folder import require_extension

    require_extension(experiment, out)
    return True


@takes(hosts=HOSTS)
def resume(
    hosts: Hosts,
    folder: Annotated[Path, typer.Argument(help="run folder made by --out")],
    trust_code: TrustCode = False,
    track: Track = None,
    as_json: AsJson = False,
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


_COMPARED = EXPERIMENT.only(
    *("task", "clients", "participants", "rounds", "local_steps", "batch", "data"),
    *TABLE,
    *("settings", "precision", "measure_every", "weights"),
    *("dropout", "participation"),
)
_EQUAL = "alike for all: trials; or samples, bytes or seconds, in the ranking, too"
_TARGET = "value whose cost is reported; nine tenths of the progress if left out"


def _new_comparison(given: checks.Given) -> None:
    """Raise unless --out is left out, can be made, or is to be continued."""
    out, resume = given["out"], given["resume"]
    if resume and out is None:
        raise InvalidInputError("--resume needs --out, the folder to continue in.")
    if out is not None and not resume:
        _folders.require_new(out)
        _folders.check_place(out)


@takes(checks.data, _new_comparison, experiment=_COMPARED, tuning=TUNING)
def compare(
    experiment: "Experiment",
    tuning: "Tuning",
    names: Annotated[
        str | None,
        typer.Option(
            "--algorithms",
            help="names, separated by commas; without them the recommended ones",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="random seeds per algorithm")] = 5,
    target: Annotated[float | None, typer.Option(help=_TARGET)] = None,
    tune: Tune = False,
    equal: Annotated[str, typer.Option(help=_EQUAL)] = "trials",
    out: Annotated[
        Path | None, typer.Option(help="new folder for results and curves")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="continue the comparison in the folder of --out, given the same "
            "settings; what is finished there is not run again",
        ),
    ] = False,
    as_json: AsJson = False,
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
        curves = draw_curves(made.found.results, *aim)
        write_atomically(out / "curves.png", curves)
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
