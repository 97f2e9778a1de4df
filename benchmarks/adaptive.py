"""Measures Adam-type steps of the server and of clients beside plain ones.

    python benchmarks/adaptive.py rows.jsonl               # digits, minutes on a CPU
    python benchmarks/adaptive.py rows.jsonl --data fashion-mnist --clients 100 \
        --participants 10 --rounds 200 --seeds 16 --width 200 --theta 0.001   # on a GPU
    python benchmarks/adaptive.py rows.jsonl --table       # what the file holds

Hidden layers above, a linear head below, clients of two classes each. A row is a method
with one kind of step:

    plain         the method's own steps, --step for x, y and z
    server adam   ServerOptimizer(method, optax.adam(rate)): FedAdam's server
    server x      the same for x alone; y and z move as the method says
    local adam    LocalOptimizer(method, optax.adam(rate)): every local step is Adam's
    clip          --clip quantile on the command line, with the method's own steps
    norm          AdaFBiO's own, y scaled by the norm of its direction
    coordinates   the same by coordinate; gamma = lam = rate, and r = rate / --step, so
                  that no step is longer than a plain one

each of the last with all --rates. A line is added to the file when its seeds are done,
and rows that the file holds are not run again: what was interrupted goes on.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax

import fedbilevel as fb
from fedbilevel import tasks
from fedbilevel._types import Pair, Triple
from fedbilevel.algorithms import AbstractAlgorithm, quantile_clipped
from fedbilevel.errors import NonFiniteError
from fedbilevel.hypergradient import Neumann

Rows = Iterator[tuple[str, AbstractAlgorithm]]


def methods(chosen: argparse.Namespace, p: int) -> dict[str, AbstractAlgorithm]:
    """Return the methods with plain steps, p of them between two averages."""
    step, weight = chosen.step, chosen.weight
    founding: dict[str, Any] = {"upper_step": step, "lower_step": step}
    founding |= {"upper_weight": weight, "lower_weight": weight}
    series, plain = Neumann(chosen.q, chosen.theta), (step, step, step)
    storm = (1.0, *plain, weight, weight, weight)
    return {
        "fedbio": fb.FedBiO(*plain, local_steps=p),
        "fedbio-controls": fb.FedBiOControls(*plain, local_steps=p),
        "simfbo": fb.SimFBO(*plain, *plain, local_steps=p),
        "fedbioacc": fb.FedBiOAcc(*storm, local_steps=p),
        "local-bsgvrm": fb.LocalBSGVRM.effective(series, **founding, local_steps=p),
    }


def rows(chosen: argparse.Namespace) -> Rows:
    """Yield every row by its name."""
    p = chosen.local_steps
    many, one = methods(chosen, p), methods(chosen, 1)
    for name, method in many.items():
        yield f"{name} | plain | {chosen.step:g}", method
        yield f"{name} | clip | {chosen.step:g}", quantile_clipped(method, 0.5)
    # The server of SimFBO steps for itself: with its clients' steps it is FedBiO.
    for name in (name for name in many if name != "simfbo"):
        for rate in chosen.rates:
            adam = optax.adam(rate)
            alone = Pair if name == "local-bsgvrm" else Triple
            upper = alone(adam, *[None] * (1 if alone is Pair else 2))
            server = fb.ServerOptimizer(many[name], adam)
            yield f"{name} | server adam | {rate:g}", server
            yield (
                f"{name} | server x | {rate:g}",
                fb.ServerOptimizer(many[name], upper),
            )
            if name != "fedbio-controls":  # a corrected step needs its exchange
                local = fb.LocalOptimizer(one[name], adam, local_steps=p)
                yield f"{name} | local adam | {rate:g}", local
    for rate in chosen.rates:
        yield f"adafbio | norm | {rate:g}", adafbio(chosen, rate, False)
        yield f"adafbio | coordinates | {rate:g}", adafbio(chosen, rate, True)


def adafbio(
    chosen: argparse.Namespace, rate: float, coordinatewise: bool
) -> AbstractAlgorithm:
    """Return AdaFBiO with steps of this size where directions are long."""
    return fb.AdaFBiO(
        Neumann(chosen.q, chosen.theta),
        1.0,
        gamma=rate,
        lam=rate,
        c1=chosen.weight,
        c2=chosen.weight,
        r=rate / chosen.step,
        coordinatewise=coordinatewise,
        local_steps=chosen.local_steps,
    )


def measured(task: Any, chosen: argparse.Namespace, method: Any) -> dict[str, Any]:
    """Return what a row has to tell, of all seeds."""
    began = time.perf_counter()
    try:
        found = fb.compare(
            task.problem,
            task.data,
            (task.x, task.y),
            {"row": method},
            rounds=chosen.rounds,
            seeds=range(chosen.seeds),
            headline=task.headline,
            sampling=fb.Sampling(chosen.batch, chosen.participants),
            metrics=task.metrics,
            measure_every=max(chosen.rounds // 20, 1),
        ).results["row"]
    except NonFiniteError as error:
        return {"diverged": str(error)}
    errors = np.asarray([result.columns[task.headline] for result in found])
    return {
        "accuracy": [float(100 * (1 - row[-1])) for row in errors],
        "curve": (100 * (1 - errors.mean(axis=0))).tolist(),
        "floats_up": found[0].counts["per_client_and_round"]["floats_up"],
        "seconds": round(time.perf_counter() - began, 1),
    }


def table(path: Path) -> str:
    """Return what a file holds as a table."""
    lines = ["| method | steps | rate | accuracy % | worst seed | floats up |"]
    lines.append("|---" * 6 + "|")
    for one in map(json.loads, path.read_text().splitlines()):
        told = "diverged | | |"
        if "accuracy" in one:
            ends = one["accuracy"]
            told = f"{np.mean(ends):.1f} | {min(ends):.1f} | {one['floats_up']} |"
        lines.append(f"| {one['row']} | {told}")
    return "\n".join(lines)


def main() -> None:
    """Run the rows that the file does not hold yet."""
    chosen = _arguments()
    path: Path = chosen.file
    if chosen.table:
        print(table(path))
        return
    fb.configure()
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.read_text().splitlines() if path.exists() else []
    done = {json.loads(line)["row"] for line in held}
    task = tasks.find("representation")(
        clients=chosen.clients,
        data=chosen.data,
        partition=chosen.partition,
        width=chosen.width,
    )
    settings = {n: v for n, v in vars(chosen).items() if n not in ("file", "table")}
    for name, method in rows(chosen):
        if name in done or chosen.only not in name:
            continue
        told = {"row": name, **measured(task, chosen, method), "settings": settings}
        with path.open("a") as file:
            file.write(json.dumps(told) + "\n")
        print(name, told.get("accuracy") or told["diverged"], flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="a line of JSON is added for each row")
    parser.add_argument("--table", action="store_true", help="only show the file")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--partition", default="shards:2")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.01])
    defaults = {"clients": 40, "participants": 4, "rounds": 100, "seeds": 3}
    defaults |= {"local-steps": 5, "batch": 16, "width": 32, "q": 5}
    for name, count in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    for name, number in {"step": 0.1, "weight": 0.5, "theta": 0.05}.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    return parser.parse_args()


if __name__ == "__main__":
    main()
