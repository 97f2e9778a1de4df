"""Do corrupted sources lose their weight? The table of docs/reweighting.md.

    python benchmarks/reweighting.py rows.jsonl [--rounds 480] [--seeds 8]
    python benchmarks/reweighting.py rows.jsonl --table    # what the file holds

Generated texts of four sources at 8 sites, two of them corrupted. Every method reads as
many tokens as `fed-f2sa` does in --rounds rounds, all seeds in one program. Beside them
`fedavg` makes as many rounds, on the clean sources alone, on all alike, and on all by
the weights that the worst seed of `fed-f2sa` ended with. A line is added to the file
when its seeds are done, and rows that the file holds are not run again.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel import tasks
from fedbilevel.experiments import Experiment
from fedbilevel.problem import ClientData

CORRUPTED = ("letters", "wrong")
FIRST = "fed-f2sa"
# Steps are the task's, or each method's best of a few: FedBiO's weights leave for one
# source by longer ones, and (FG)^2U unrolls short steps, so that its slopes are short.
METHODS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    FIRST: (FIRST, {}),
    "fed-f2sa-2": ("fed-f2sa-2", {}),
    "fed-f2sa-2, longer upper steps": ("fed-f2sa-2", {"upper_step": "4"}),
    "fedbio-differences": ("fedbio-differences", {"upper_step": "0.5"}),
    "(FG)^2U": (
        "local-bsgm",
        {
            "hypergradient": "forward-gradient",
            "directions": "2",
            "q": "3",
            "theta": "0.02",
            "upper_step": "15",
        },
    ),
}


def method_row(name: str, rounds: int, seeds: int, samples: int) -> dict[str, Any]:
    """Run a method from all seeds until it has read so many samples, or 0 for all."""
    algorithm, options = METHODS[name]
    experiment = Experiment(
        "reweighting",
        algorithm,
        rounds=rounds,
        measure_every=max(rounds // 12, 1),
        options=options,
        max_samples=samples or None,
    )
    results = experiment.run_seeds(seeds)
    weights = {
        one: [result.final[f"weight_{one}"] for result in results]
        for one in ("colors", "letters", "sounds", "wrong")
    }
    return {
        "loss": [result.final["upper_loss"] for result in results],
        "weights": weights,
        "rounds": results[0].final["round"],
        "samples": sum(results[0].counts["samples"].values()),
    }


def fixed_row(x: Any, data: ClientData, rounds: int, seeds: int) -> dict[str, Any]:
    """Train adapters at fixed weights, as many rounds as the methods make."""
    task = tasks.find("reweighting")()
    step = float(task.recommended["lower_step"])
    steps, batch = (int(task.recommended[name]) for name in ("local_steps", "batch"))
    found = fb.compare(
        task.problem,
        data,
        (jnp.asarray(x), task.y),
        {"row": fb.FedAvg(step, local_steps=steps)},
        rounds=rounds,
        seeds=range(seeds),
        sampling=fb.Sampling(batch),
        measure_every=rounds,
    ).results["row"]
    losses = [float(result.columns["upper_loss"][-1]) for result in found]
    return {"loss": losses, "rounds": rounds}


def clean_alone(task: Any) -> tuple[np.ndarray, ClientData]:
    """Return logits and rows of the clean sources, as if there were no others."""
    corrupted = np.isin(task.metrics.sources, CORRUPTED)
    lower, upper = [], []
    for client in range(task.data.clients):
        rows = [
            jax.tree.map(lambda a, k=client, n=size: np.asarray(a[k, :n]), level)
            for level, size in (
                (task.data.lower, int(task.data.lower_sizes[client])),
                (task.data.upper, int(task.data.upper_sizes[client])),
            )
        ]
        keep = ~corrupted[rows[0]["source"]]
        own = {name: leaf[keep] for name, leaf in rows[0].items()}
        own["factor"] = own["factor"] * keep.mean()  # which has the number of rows
        lower.append(own)
        upper.append(rows[1])
    return np.where(corrupted, -1e4, 0.0), ClientData.from_clients(upper, lower)


def fixed_rows(chosen: argparse.Namespace, first: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `fedavg` runs on, by the names of rows."""
    task = tasks.find("reweighting")()
    weights = first["weights"]
    badness = np.sum([weights[one] for one in CORRUPTED], axis=0)
    worst = [weights[one][int(np.argmax(badness))] for one in sorted(weights)]
    return {
        "fedavg, clean sources alone": clean_alone(task),
        "fedavg, all alike": (np.zeros(len(worst)), task.data),
        "fedavg, weights of the worst seed": (np.log(worst), task.data),
    }


def table(path: Path) -> str:
    """Return what a file holds as a table."""
    held = {one["row"]: one for one in map(json.loads, path.read_text().splitlines())}
    clean = held.get("fedavg, clean sources alone", {}).get("loss")
    lines = ["| | validation loss | to clean | largest corrupted weight | rounds |"]
    lines.append("|---" * 5 + "|")
    for name, one in held.items():
        loss = np.mean(one["loss"])
        apart = f"{100 * (loss / np.mean(clean) - 1):+.1f} %" if clean else ""
        weights = one.get("weights")
        most = max(max(weights[c]) for c in CORRUPTED) if weights else None
        told = "" if most is None else f"{most:.4f}"
        spread = f"{loss:.4f} ({min(one['loss']):.4f} to {max(one['loss']):.4f})"
        lines.append(f"| {name} | {spread} | {apart} | {told} | {one['rounds']:g} |")
    return "\n".join(lines)


def main() -> None:
    """Run the rows that the file does not hold yet."""
    chosen = _arguments()
    path: Path = chosen.file
    if not chosen.table:
        fb.configure()
        _run(chosen, path)
    print(table(path))


def _run(chosen: argparse.Namespace, path: Path) -> None:
    held = path.read_text().splitlines() if path.exists() else []
    done = {one["row"]: one for one in map(json.loads, held)}

    def keep(name: str, make: Any) -> None:
        if name in done:
            return
        began = time.process_time()
        done[name] = {"row": name, **make()}
        done[name]["cpu_seconds"] = round(time.process_time() - began)
        with path.open("a") as file:
            file.write(json.dumps(done[name]) + "\n")
        print(name, done[name]["loss"], flush=True)

    sizes = (chosen.rounds, chosen.seeds)
    keep(FIRST, lambda: method_row(FIRST, *sizes, 0))
    for name in METHODS:
        keep(name, lambda n=name: method_row(n, *sizes, done[FIRST]["samples"]))
    for name, (x, data) in fixed_rows(chosen, done[FIRST]).items():
        keep(name, lambda x=x, data=data: fixed_row(x, data, *sizes))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="a line of JSON is added for each row")
    parser.add_argument("--table", action="store_true", help="only show the file")
    parser.add_argument("--rounds", type=int, default=480)
    parser.add_argument("--seeds", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
