"""Commands for federations: `federate` and `replay` here, `serve`, `node` beside."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli._errors import plain_errors
from fedbilevel.cli._federated import (
    Deadline,
    Minimum,
    Patience,
    Tolerance,
    experiment_of,
    terms_of,
)
from fedbilevel.cli._node import node
from fedbilevel.cli._progress import watched
from fedbilevel.cli._serve import serve
from fedbilevel.cli._shared import Command, print_json, show_result
from fedbilevel.cli._theory import follow
from fedbilevel.experiment import Experiment
from fedbilevel.run import DELTA, named_leaves, open_folder
from fedbilevel.runtime import configure

__all__ = ["COMMANDS"]


def federate(
    task: arguments.Task,
    algorithm: arguments.Algorithm = None,
    clients: Annotated[int, typer.Option(help="number of nodes, K")] = 4,
    participants: arguments.Participants = None,
    rounds: arguments.Rounds = None,
    local_steps: arguments.LocalSteps = None,
    batch: arguments.Batch = None,
    seed: arguments.Seed = 0,
    data: arguments.Data = None,
    settings: arguments.Settings = None,
    precision: arguments.Precision = "float32",
    clip: arguments.Clip = None,
    noise: arguments.Noise = 0.0,
    delta: arguments.Delta = DELTA,
    compress: arguments.Compress = None,
    aggregate: arguments.Aggregate = "mean",
    measure_every: arguments.MeasureEvery = 1,
    plan: Annotated[
        Path | None, typer.Option(help="file made by `fedbilevel plan --out`")
    ] = None,
    nodes: Annotated[str, typer.Option(help="persistent or stock")] = "persistent",
    deadline: Deadline = 60.0,
    minimum: Minimum = 1,
    patience: Patience = 600.0,
    tolerance: Tolerance = 1e3,
    out: Annotated[
        Path | None, typer.Option(help="new folder for checkpoints and result")
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Run a whole federation on this machine, with real processes, to try it out."""
    with plain_errors():
        terms = terms_of(deadline, minimum, patience, tolerance)
        experiment = experiment_of(
            task=task,
            algorithm=algorithm,
            clients=clients,
            participants=participants,
            rounds=rounds,
            local_steps=local_steps,
            batch=batch,
            seed=seed,
            data=data,
            settings=settings,
            precision=precision,
            clip=clip,
            noise=noise,
            delta=delta,
            compress=compress,
            aggregate=aggregate,
            measure_every=measure_every,
        )
        if plan is not None:
            experiment = follow(plan, experiment)
        if out is not None:
            open_folder(out, resume=False)
            _federate(experiment, out, terms, nodes, as_json, kept=True)
            return
        with tempfile.TemporaryDirectory() as folder:
            _federate(experiment, Path(folder), terms, nodes, as_json, kept=False)


def _federate(
    experiment: Experiment,
    folder: Path,
    terms: Any,
    nodes: str,
    as_json: bool,
    *,
    kept: bool,
) -> None:
    from fedbilevel.deployment import trial

    experiment.save(folder)
    if not as_json:
        lines = trial.deployment_of(experiment)
        text = (
            "In a real deployment, on the server, behind the proxy of "
            "docs/deployment.md, and at every site:\n  "
        )
        Console(stderr=True).print(
            text + "\n  ".join(lines), markup=False, soft_wrap=True
        )
    with watched(experiment.task, quiet=as_json) as watch:
        result = trial.federate(experiment, folder, terms, nodes=nodes, watch=watch)
    show_result(result, folder if kept else None, as_json)


def replay(
    folder: Annotated[Path, typer.Argument(help="folder of a finished federation")],
    as_json: arguments.AsJson = False,
) -> None:
    """Repeat a federation in the simulator, with the clients that took part."""
    with plain_errors():
        from fedbilevel.deployment.server import replay as again

        configure(Experiment.load(folder).precision)
        deployed, outcome, algorithm = again(folder)
        point = algorithm.point(outcome.state.server)
        simulated = {**named_leaves("x", point.x), **named_leaves("y", point.y)}
        apart = max(
            float(np.max(np.abs(deployed.point[name] - leaf), initial=0.0))
            for name, leaf in simulated.items()
        )
        if as_json:
            print_json({"largest_difference": apart})
        else:
            Console().print(f"Largest difference of the final points: {apart:.3g}")


COMMANDS: dict[str, Command] = {
    "federate": Command(
        federate,
        "Example: fedbilevel federate regularization --clients 4 --rounds 20",
    ),
    "serve": Command(
        serve,
        "Example: fedbilevel serve regularization --clients 3 --certificates "
        "certificates --node-key node0.pub --out run",
    ),
    "node": Command(
        node,
        "Example: fedbilevel node regularization --clients 3 --client 0 --superlink "
        "server:8000 --root-certificates ca.crt --private-key node0 --data rows "
        "--state state",
    ),
    "replay": Command(replay, "Example: fedbilevel replay runs/federation"),
}
