"""Measures which correction helps where clients differ and few of them take part.

    python benchmarks/drift.py                        # digits, minutes on a CPU
    python benchmarks/drift.py --data fashion-mnist --clients 100 --participants 10 \
        --rounds 200 --seeds 16 --upper-step 0.01 --lower-step 0.01 --width 200 \
        --theta 0.001                                 # on a GPU

Every method of one loop, with every way of correcting drift (`drift`) and, where it has
STORM's memory, with every way of those who missed rounds (`absent`). A line has the
accuracy after the last round, its mean and its worst over the seeds, how far it wanders
over the second half of the measurements (root mean square of what the error moves
between two), and the floats that a client sends in a round.
"""

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel import tasks
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import NonFiniteError
from fedbilevel.hypergradient import Neumann

DRIFT, ABSENT = (None, "controls", "anchor"), ("keep", "correct", "forget")


def variants(chosen: argparse.Namespace) -> Iterator[tuple[str, AbstractAlgorithm]]:
    """Yield every method with every correction, by name."""
    upper, lower, weight = chosen.upper_step, chosen.lower_step, chosen.weight
    series = Neumann(chosen.q, chosen.theta)
    founding: dict[str, Any] = {"upper_step": upper, "lower_step": lower}
    founding |= {"upper_weight": weight, "lower_weight": weight}
    p: dict[str, Any] = {"local_steps": chosen.local_steps}
    for drift in DRIFT:
        more = {**p, "drift": drift}
        yield f"fedbio | {drift} | -", fb.FedBiO(upper, lower, lower, **more)
        plain = fb.LocalBSGM.effective(series, **founding, **more)
        yield f"local-bsgm | {drift} | -", plain
    for drift, absent in itertools.product(DRIFT, ABSENT):
        more = {**p, "drift": drift, "absent": absent}
        steps, weights = (1.0, upper, lower, lower), [weight] * 3
        name = f"{drift} | {absent}"
        yield f"fedbioacc | {name}", fb.FedBiOAcc(*steps, *weights, **more)
        reduced = fb.LocalBSGVRM.effective(series, **founding, **more)
        yield f"local-bsgvrm | {name}", reduced


def line(name: str, results: list[fb.Result], headline: str) -> str:
    """Return a row of the table."""
    ends = np.asarray([1 - result.final[headline] for result in results])
    curves = np.asarray([result.columns[headline] for result in results])
    moves = np.diff(curves[:, curves.shape[1] // 2 :], axis=1)
    wanders = np.sqrt(np.mean(moves**2))
    floats = results[0].counts["per_client_and_round"]["floats_up"]
    told = f"{100 * ends.mean():.1f} | {100 * ends.min():.1f} | {100 * wanders:.1f}"
    return f"| {name} | {told} | {floats} |"


def main() -> None:
    """Run all variants and print the table as it grows."""
    chosen = _arguments()
    fb.configure()
    task = tasks.find("representation")(
        clients=chosen.clients,
        data=chosen.data,
        partition=chosen.partition,
        width=chosen.width,
    )
    print(f"{vars(chosen)}\n")
    print("| method | drift | absent | accuracy % | worst seed | wanders | floats up |")
    print("|---" * 7 + "|")
    for name, algorithm in variants(chosen):
        if not any(name.startswith(f"{method} ") for method in chosen.methods):
            continue
        try:
            found = fb.compare(
                task.problem,
                task.data,
                (task.x, task.y),
                {name: algorithm},
                rounds=chosen.rounds,
                seeds=range(chosen.seeds),
                headline=task.headline,
                sampling=fb.Sampling(chosen.batch, chosen.participants),
                metrics=task.metrics,
                measure_every=max(chosen.rounds // 40, 1),
            )
            print(line(name, found.results[name], task.headline), flush=True)
        except NonFiniteError as error:
            print(f"| {name} | {error} | | | |", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    every = ["fedbio", "local-bsgm", "fedbioacc", "local-bsgvrm"]
    parser.add_argument("methods", nargs="*", default=every, metavar="METHOD")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--partition", default="shards:2")
    defaults = {"clients": 40, "participants": 4, "rounds": 200, "seeds": 3}
    defaults |= {"local-steps": 5, "batch": 16, "width": 32, "q": 5}
    for name, count in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    steps = {"upper-step": 0.1, "lower-step": 0.1, "weight": 0.1, "theta": 0.05}
    for name, number in steps.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    return parser.parse_args()


if __name__ == "__main__":
    main()
