"""The program `fedbilevel`: its commands, each with an example."""

from collections.abc import Callable
from typing import Annotated

import typer

from fedbilevel import __version__
from fedbilevel.cli.checks import only_typed
from fedbilevel.cli.data import label_counts, prepare
from fedbilevel.cli.federation import federate, replay, serve
from fedbilevel.cli.listing import list_entries, recommend
from fedbilevel.cli.node import node
from fedbilevel.cli.output import plain_errors
from fedbilevel.cli.results import dashboard, export, predict, report
from fedbilevel.cli.running import compare, resume, run, tune
from fedbilevel.cli.theory import check_theory, complexity, plan, speedup

app = typer.Typer(
    help="Federated bilevel optimization: tune, clean, re-weight across sites whose "
    "data stay where they are.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "list": (list_entries, "algorithms --question shared-y --without alike-clients"),
    "recommend": (recommend, "regularization --differ --few-rounds"),
    "run": (
        run,
        "regularization --algorithm local-bsgvrm --clients 8 --rounds 100 "
        "--set theta=0.2 --out runs/first",
    ),
    "resume": (resume, "runs/first"),
    "tune": (tune, "regularization --clients 8 --set lower_step=0.1..1 --out tuned"),
    "predict": (predict, "runs/first rows.csv --out predictions.csv"),
    "export": (export, "runs/first --to npz --out model.npz"),
    "compare": (
        compare,
        "two-client --algorithms local-bsgvrm,fedbioacc,fednest,fedavg,pooled "
        "--seeds 16 --set length=full --out runs/comparison",
    ),
    "report": (report, "runs/first"),
    "dashboard": (dashboard, "runs"),
    "label-counts": (
        label_counts,
        "representation --clients 20 --set partition=dirichlet:0.3 "
        "--out label-counts.png",
    ),
    "prepare": (prepare, "rows.csv --label sick --sums north.json"),
    "check-theory": (check_theory, "quadratic --algorithm local-bsgm"),
    "plan": (plan, "quadratic --clients 8 --target 0.05 --out plan.json"),
    "speedup": (
        speedup,
        "quadratic --algorithm local-bsgm --clients 4 --iterations 1000,4000,16000 "
        "--out runs/speedup",
    ),
    "complexity": (complexity, "quadratic --algorithm local-bsgm --clients 2"),
    "federate": (federate, "regularization --clients 4 --rounds 20"),
    "serve": (
        serve,
        "regularization --clients 2 --certificates certificates --private-key server "
        "--node-key node0.pub --node-key node1.pub --out run",
    ),
    "node": (
        node,
        "regularization --clients 3 --client 0 --superlink server:8000 "
        "--root-certificates ca.crt --private-key node0 --server-key server.pub "
        "--data rows --state state",
    ),
    "replay": (replay, "runs/federation"),
}


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedbilevel {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="print the version, and end",
            is_eager=True,
            callback=_tell_version,
        ),
    ] = False,
) -> None:
    del version


for _name, (_function, _example) in _COMMANDS.items():
    _epilog = f"Example: fedbilevel {_name} {_example}"
    app.command(_name, epilog=_epilog)(plain_errors()(only_typed(_function)))
