"""The command `recommend`: which methods fit, why, and how they did."""

from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding

from fedbilevel.cli import checks
from fedbilevel.cli.arguments import AsJson
from fedbilevel.cli.output import print_json
from fedbilevel.cli.progress import status

__all__ = ["recommend"]


def recommend(
    task: Annotated[
        str | None, typer.Argument(help="a task; any problem if left out")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="how many there are")] = None,
    participants: Annotated[
        int | None, typer.Option(help="clients that take part in an exchange")
    ] = None,
    differ: Annotated[
        bool | None,
        typer.Option("--differ/--alike", help="what clients hold; they may differ"),
    ] = None,
    no_hessian: Annotated[
        bool, typer.Option("--no-hessian", help="gradients are all that can be had")
    ] = False,
    few_rounds: Annotated[
        bool, typer.Option("--few-rounds", help="what is reached early counts")
    ] = False,
    question: Annotated[
        str | None,
        typer.Option(help="shared-y, own-y, single-level or single-machine"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name the two or three methods that fit, with the reason and what was measured."""
    checks.names({"task": task})
    from fedbilevel.experiments.recommendation import Situation
    from fedbilevel.experiments.recommendation import recommend as found_for

    situation = Situation(
        clients, participants, differ, not no_hessian, few_rounds, question
    )
    with status("tracing what algorithms need"):
        found = found_for(task, situation)
    if as_json:
        print_json({"recommended": [one._asdict() for one in found]})
        return
    console = Console()
    for number, one in enumerate(found, 1):
        _say(console, f"{number}. {one.name}: {one.summary}", 0)
        _say(console, f"Why: it {'; '.join(one.reasons)}.", 3)
        _say(console, f"How known: {one.known}.", 3)
        _say(console, f"Measured: {one.measured}.", 3)
        if task is not None:
            _say(console, f"Try: fedbilevel run {task} --algorithm {one.name}", 3)


def _say(console: Console, text: str, indent: int) -> None:
    console.print(
        Padding(
            console.render_str(text, markup=False, highlight=False),
            (0, 0, 0, indent),
            expand=False,
        )
    )
