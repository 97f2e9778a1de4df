"""`fedbilevel check-theory` and `fedbilevel plan`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedbilevel import planning, report
from fedbilevel.calibration import with_plan
from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli._arguments import read_settings
from fedbilevel.cli._errors import plain_errors
from fedbilevel.cli._shared import (
    Algorithm,
    Command,
    Seeds,
    Theorem,
    experiment_of,
    print_json,
    status,
    write_text,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment
from fedbilevel.result import to_plain
from fedbilevel.runtime import configure
from fedbilevel.theory.plan import Plan

__all__ = ["COMMANDS", "follow"]

Constants = Annotated[
    list[str] | None,
    typer.Option(
        "--constant",
        metavar="KEY=VALUE",
        help="a known one of l0, l1, l21, l22, mu, sigma, phi0, y0; may be repeated",
    ),
]


def check_theory(
    task: arguments.Task,
    algorithm: Annotated[str, typer.Option(help="local-bsgm or local-bsgvrm")] = (
        "local-bsgvrm"
    ),
    clients: arguments.Clients = None,
    rounds: arguments.Rounds = None,
    local_steps: arguments.LocalSteps = None,
    batch: arguments.Batch = None,
    settings: arguments.Settings = None,
    constants: Constants = None,
    precision: arguments.Precision = "float32",
    as_json: arguments.AsJson = False,
) -> None:
    """Say which conditions of its theorem a run satisfies, and what the others need.

    The constants are measured at the start, half way and the end of the run.
    """
    with plain_errors():
        sizes = arguments.read_sizes(
            clients=clients, rounds=rounds, local_steps=local_steps, batch=batch
        )
        experiment = Experiment(
            task,
            algorithm,
            **sizes,
            precision=precision,
            options=read_settings(settings or []),
        )
        configure(precision)
        with status("measuring constants"):
            ground, summary = planning.check_theory(experiment, _read(constants))
        if as_json:
            print_json({**summary, **ground.plain()})
            return
        console = Console()
        console.print(report.estimates_table(ground.plain()["estimates"]))
        for name, one in ground.estimates.items():
            console.print(f"{name}: {one.how}", markup=False, highlight=False)
        console.print(report.conditions_table(summary))
        limits = ", ".join(f"{n} = {v:.4g}" for n, v in summary["largest"].items())
        console.print(f"The largest steps with which all hold: {limits}", markup=False)


def make_plan(
    task: Annotated[
        str, typer.Argument(help="see `fedbilevel list tasks`")
    ] = "quadratic",
    clients: Annotated[int, typer.Option(help="number of clients, K")] = 8,
    target: Annotated[
        float | None, typer.Option(help="epsilon: the mean of the metric to reach")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="local iterations in all, T")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(help="theory: literal constants; practical: calibrated, scaled"),
    ] = "practical",
    algorithm: Algorithm = "local-bsgvrm",
    theorem: Theorem = None,
    batch: arguments.Batch = None,
    settings: arguments.Settings = None,
    constants: Constants = None,
    seeds: Seeds = 16,
    out: Annotated[
        Path | None, typer.Option(help="file for the plan, for `run --plan`")
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Plan a run: all parameters, its cost, its bound, from K and epsilon or T."""
    with plain_errors():
        experiment = experiment_of(task, algorithm, batch, settings)
        arguments.read_sizes(clients=clients, seeds=seeds)
        with status("measuring"):
            plan = planning.planned(
                experiment,
                clients,
                preset=preset,
                theorem=planning.theorem_for(algorithm, theorem),
                iterations=iterations,
                target=target,
                given=_read(constants),
                seeds=seeds,
            )
        summary = plan.plain()
        if out is not None:
            write_text(out, json.dumps(to_plain(summary), indent=2) + "\n")
        if as_json:
            print_json(summary)
            return
        console = Console()
        console.print(report.plan_table(summary))
        if plan.terms:
            console.print(report.terms_table(plan.terms))
        for note in plan.notes:
            console.print(f"Note: {note}", markup=False)
        if out is not None:
            console.print(f"Run it: fedbilevel run {task} --plan {out}")


def follow(path: Path, experiment: Experiment) -> Experiment:
    """Return the experiment with a plan's algorithm and numbers."""
    try:
        plan = Plan.from_plain(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"--plan {path}: not a plan of `fedbilevel plan --out` ({error})."
        ) from error
    configure(experiment.precision)
    return with_plan(replace(experiment, algorithm=plan.algorithm), plan)


COMMANDS = {
    "check-theory": Command(
        check_theory,
        "Example: fedbilevel check-theory quadratic --algorithm local-bsgm",
    ),
    "plan": Command(
        make_plan,
        "Example: fedbilevel plan quadratic --clients 8 --target 0.05 --out plan.json",
    ),
}


def _read(constants: list[str] | None) -> dict[str, float]:
    given = read_settings(constants or [])
    try:
        return {name: float(value) for name, value in given.items()}
    except ValueError as error:
        raise InvalidInputError(f"--constant: {error}.") from None
