"""Commands about theorems: `check-theory`, `plan`, `speedup` and `complexity`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel import _folders
from fedbilevel._schema import option
from fedbilevel.cli import arguments, checks
from fedbilevel.cli.output import Console, print_json
from fedbilevel.cli.progress import status
from fedbilevel.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

CONSTANTS = option(
    None,
    "a known one of l0, l1, l21, l22, mu, sigma, phi0, y0; may be repeated",
    spelled="--constant",
    metavar="KEY=VALUE",
)
THEOREMS = ("local-bsgvrm", "local-bsgm", "fedbioacc", "fednest")
THEOREM = option(None, "1: LocalBSGM; 2, 3: LocalBSGVRM with constant, decaying step")
SEEDS = option(16, "random seeds of every point")
FOLDER = option(None, "folder for table and figure")
_CHECKED = arguments.EXPERIMENT.only(
    *("task", "algorithm", "clients", "rounds", "local_steps", "batch", "data"),
    *(*arguments.TABLE, "settings", "precision"),
).having(algorithm=option("local-bsgvrm", "local-bsgm or local-bsgvrm", typed=str))
# Rows are partitioned for several numbers of clients, so no column names sites.
_MEASURED = arguments.EXPERIMENT.only(
    *("task", "algorithm", "batch", "data"),
    *(name for name in arguments.TABLE if name != "site"),
    "settings",
).having(algorithm=option(THEOREMS[0], ", ".join(THEOREMS), typed=str))
_PLANNED = _MEASURED.having(
    algorithm=option(
        None,
        f"{', '.join(THEOREMS)}, the first if left out; with --memory any, and the "
        "task's own if left out",
        typed=str | None,
    ),
    model_devices=arguments.SETTINGS["model_devices"],
).defaulting(task="quadratic")
PRESETS = ("theory", "practical")
_WRITTEN = ("summary.json", "figure.png")


def _with_theorem(given: checks.Given) -> None:
    """Raise unless there is a theorem of the algorithm."""
    if given["algorithm"] not in (*THEOREMS, None):
        raise unknown_name("algorithm with a theorem", given["algorithm"], THEOREMS)


def _plan_of_one_kind(given: checks.Given) -> None:
    """Raise unless a plan by a theorem has what it needs; one of memory needs less."""
    if not given["memory"]:
        _with_theorem(given)
        if (given["iterations"] is None) == (given["target"] is None):
            raise InvalidInputError(
                "give --target, the value to reach, or --iterations, and not both."
            )
        if given["preset"] not in PRESETS:
            raise unknown_name("preset", given["preset"], PRESETS)
        if given["model_devices"] != 1:
            raise InvalidInputError("--model-devices is for a plan with --memory.")
        return
    for name in ("target", "iterations", "theorem", "constants"):
        if given[name]:
            flag = "constant" if name == "constants" else name
            raise InvalidInputError(
                f"--{flag} is for a plan by a theorem: leave it out, or --memory."
            )


# It may hold an earlier table and figure, and nothing else.
_own_folder = checks.place(
    "out", partial(_folders.require_own, names=_WRITTEN), _folders.check_place
)


@arguments.takes(experiment=_CHECKED)
def check_theory(
    experiment: "Experiment",
    constants: list[str] | None = CONSTANTS,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Say which conditions of its theorem a run satisfies, and what the others need.

    The constants are measured at the start, halfway and the end of the run.
    """
    given = _read_constants(constants)
    from fedbilevel import report
    from fedbilevel.experiments import theory
    from fedbilevel.runtime import configure

    configure(experiment.precision)
    with status("measuring constants"):
        ground, summary = theory.check_theory(experiment, given)
    if as_json:
        print_json({**summary, **ground.plain()})
        return
    console = Console()
    console.print(report.estimates_table(ground.plain()["estimates"]))
    for name, one in ground.estimates.items():
        console.print(f"{name}: {one.how}", markup=False, highlight=False)
    console.print(report.conditions_table(summary))
    limits = ", ".join(f"{n} = {v:.8g}" for n, v in summary["largest"].items())
    console.print(f"The largest steps with which all hold: {limits}", markup=False)


@arguments.takes(_plan_of_one_kind, checks.new_file, experiment=_PLANNED)
def plan(
    experiment: "Experiment",
    clients: int | None = option(None, "number of clients, K; 8 by a theorem"),
    memory: bool = option(
        False, "say what the run takes of the device's memory; nothing is run"
    ),
    target: float | None = option(None, "epsilon: the mean of the metric to reach"),
    iterations: int | None = option(None, "local iterations in all, T"),
    preset: str = option(
        "practical", "theory: literal constants; practical: calibrated, scaled"
    ),
    theorem: int | None = THEOREM,
    constants: list[str] | None = CONSTANTS,
    seeds: int = SEEDS,
    out: Path | None = option(None, "file for the plan, for `run --plan`"),
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Plan a run: all parameters, its cost, its bound, from K and epsilon or T.

    With --memory: what it takes of the device, whether it fits, and what takes less.
    """
    arguments.at_least_one(clients=clients, seeds=seeds)
    if memory:
        _show_memory(replace(experiment, clients=clients), out, as_json)
        return
    clients = clients or 8
    experiment = replace(experiment, algorithm=experiment.algorithm or THEOREMS[0])
    given = _read_constants(constants)
    from fedbilevel import report
    from fedbilevel.experiments import theory
    from fedbilevel.experiments.run_folder import write_json
    from fedbilevel.runtime import configure
    from fedbilevel.theory.claims import subject_of

    configure(experiment.precision)
    with status("measuring"):
        found = theory.planned(
            experiment,
            clients,
            preset=preset,
            theorem=theorem,
            iterations=iterations,
            target=target,
            given=given,
            seeds=seeds,
        )
    subject = theory.name_of(subject_of(found.theorem))
    summary = {"algorithm": subject, **found.plain()}
    if out is not None:
        write_json(out, summary)
    if as_json:
        print_json(summary)
        return
    console = Console()
    console.print(report.plan_table(summary))
    if found.terms:
        console.print(report.terms_table(found.terms))
    for note in found.notes:
        console.print(f"Note: {note}", markup=False)
    if out is not None:
        console.print(f"Run it: fedbilevel run {experiment.task} --plan {out}")


def _show_memory(experiment: "Experiment", out: Path | None, as_json: bool) -> None:
    """Plan the memory of an experiment, and print it; write it to a file, too."""
    from fedbilevel.experiments.memory import planned_memory
    from fedbilevel.experiments.run_folder import write_json
    from fedbilevel.runtime import configure

    configure(experiment.precision)
    with status("compiling"):
        summary = planned_memory(experiment)
    if out is not None:
        write_json(out, summary)
    if as_json:
        print_json(summary)
        return
    console = Console()
    for line in memory_lines(summary):
        console.print(line, markup=False, highlight=False)


def memory_lines(summary: dict[str, Any]) -> list[str]:
    """Say what is large, whether it fits, and what takes less."""
    from fedbilevel.experiments.memory import PARTS

    devices = summary["model_devices"]
    shared = f", one of {devices} that share the model" if devices > 1 else ""
    shown = [
        f"{summary['algorithm']} on {summary['task']}, {summary['clients']} clients, "
        f"{summary['clients_at_once']} at a time, on {summary['device']}{shared}:"
    ]
    shown += [f"{_size(summary[name]):>10}  {text}" for name, text in PARTS.items()]
    total = _size(summary["total"])
    shown.append(f"{total:>10}  in all, with small inputs and outputs")
    limit = summary["limit"]
    if limit is None:
        shown.append("The device does not say how much it has.")
    else:
        ending = "it fits" if summary["fits"] else "it does not fit"
        shown.append(f"{_size(limit):>10}  on the device: {ending}.")
    if summary["advice"]:
        shown.append(f"Less: {', or '.join(summary['advice'])}.")
    return shown


def _size(count: int) -> str:
    """Return a number of bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= 0.9995 * size:  # of three digits
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


@arguments.takes(_with_theorem, _own_folder, experiment=_MEASURED)
def speedup(
    experiment: "Experiment",
    theorem: int | None = THEOREM,
    clients: str = option("1,2,4,8,16", "numbers of clients"),
    iterations: str | None = option(None, "local iterations, T; the calibration's"),
    target: float | None = option(None, "count the iterations to this value instead"),
    period_factor: float = option(1.0, "times the corollary's local steps, p"),
    seeds: int = SEEDS,
    out: Path | None = FOLDER,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Measure how the error falls with K at fixed T, or with T at fixed K.

    Several values of --clients or of --iterations make the axis.
    """
    many = arguments.read_counts("clients", clients)
    lengths = iterations and arguments.read_counts("iterations", iterations)
    how = {"period_factor": period_factor, "target": target}

    def measured(scaling: Any, base: Any, *given: Any, **more: Any) -> dict[str, Any]:
        values = lengths or [base.iterations]
        return scaling.measure_speedup(*given, base, many, values, **how, **more)

    _scale(experiment, theorem, seeds, measured, out, as_json)


@arguments.takes(_with_theorem, _own_folder, experiment=_MEASURED)
def complexity(
    experiment: "Experiment",
    theorem: int | None = THEOREM,
    clients: str = option("1,2,4,8", "numbers of clients"),
    targets: str | None = option(
        None, "values of epsilon; those with whole local steps, p"
    ),
    seeds: int = SEEDS,
    out: Path | None = FOLDER,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Measure iterations and rounds to epsilon, against K or against epsilon.

    Several values of --clients or of --targets make the axis; with one of --clients
    alone, epsilon is.
    """
    many = arguments.read_counts("clients", clients)
    epsilons = targets and arguments.read_numbers("targets", targets)

    def measured(scaling: Any, base: Any, *given: Any, **more: Any) -> dict[str, Any]:
        periods = (1,) if len(many) > 1 else (3, 4, 6)
        values = epsilons or scaling.default_targets(base, max(many), periods)
        return scaling.measure_complexity(*given, base, many, values, **more)

    _scale(experiment, theorem, seeds, measured, out, as_json)


def _scale(
    experiment: "Experiment",
    theorem: int | None,
    seeds: int,
    measured: Callable[..., dict[str, Any]],
    folder: Path | None,
    as_json: bool,
) -> None:
    """Calibrate, measure what a theorem says, and show it."""
    arguments.at_least_one(seeds=seeds)
    from fedbilevel import algorithms, report
    from fedbilevel._files import write_atomically
    from fedbilevel.experiments import theory
    from fedbilevel.experiments.run_folder import write_json
    from fedbilevel.runtime import configure
    from fedbilevel.studies import scaling

    configure(experiment.precision)
    with status("calibrating") as watch:
        base = theory.calibrate(experiment, theorem, seeds)
        made = theory.setting_of(experiment)
        kind = algorithms.find(str(experiment.algorithm)).kind
        found = measured(scaling, base, made, kind, seeds=seeds, watch=watch)
    summary = {**found, "task": experiment.label, "algorithm": experiment.algorithm}
    if folder is not None:
        write_json(folder / _WRITTEN[0], summary)
        write_atomically(folder / _WRITTEN[1], report.draw_scaling(summary))
    if as_json:
        print_json(summary)
        return
    console = Console()
    console.print(report.scaling_table(summary))
    for note in dict.fromkeys(n for point in summary["points"] for n in point["notes"]):
        console.print(f"Note: {note}", markup=False)
    if folder is not None:
        console.print(f"Saved in {folder}: summary.json, figure.png")


def _read_constants(constants: list[str] | None) -> dict[str, float]:
    given = arguments.read_settings(constants or [])
    try:
        return {name: float(value) for name, value in given.items()}
    except ValueError as error:
        raise InvalidInputError(f"--constant: {error}.") from None
