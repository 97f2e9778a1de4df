"""Measures what the tasks show on real data: every command of docs/results.md, in turn.

    python benchmarks/results.py [--out FOLDER] [NAME ...]

Each line of COMMANDS is run as a newcomer would type it and leaves its comparison in
FOLDER/NAME: results of all seeds, comparison.json, curves.png. A table ends it.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typed_command import type_command

CLEANING = (
    "compare cleaning --clients 10 --data fashion-mnist --set rows=25000 "
    "--set train=0.8 --seeds 3 --measure-every 20"
)
LINEAR_STEPS = "--set lower_step=1,2,4,8,16,32"
MLP = f"{CLEANING} --set model=mlp --rounds 400"
MLP_STEPS = "--set lower_step=0.02,0.05,0.1,0.2,0.4,0.8"
FEDNEST = (
    "compare representation --data fashion-mnist --set setting=fednest "
    "--participants 10 --seeds 3"
)
# Every point of a grid runs to the end, from as many seeds as are compared.
GRID = "--tune --rungs 1 --tuning-seeds 3"
ALL_FIVE = "--algorithms local-bsgvrm,local-bsgm,fednest,lfednest,fedbioacc"
# Longer local work needs shorter steps.
PERIODS = {
    "p5": "--local-steps 5 --set upper_step=0.01,0.03,0.1 "
    "--set lower_step=0.01,0.03,0.1",
    "p25": "--local-steps 25 --set theta=0.003 --set upper_step=0.03,0.06,0.1 "
    "--set lower_step=0.003,0.006,0.01",
}
# FedNest has 6.9 exchanges in a round, LocalBSGVRM one.
SPANS = {
    "50-exchanges": "--algorithms local-bsgvrm --rounds 50",
    "500-exchanges": "--algorithms fednest --rounds 73",
}
A9A = (
    "compare regularization --data a9a --clients 8 --rounds 1000 --measure-every 50 "
    "--seeds 3"
)
SINGLE_STRENGTHS = [f"{-9 + 9 * number / 19:.2f}" for number in range(20)]
COMMANDS = {
    "representation": f"{FEDNEST} {ALL_FIVE} --rounds 200 --measure-every 4 "
    "--local-steps 25 --set theta=0.003 --set upper_step=0.01,0.03 "
    "--set lower_step=0.003,0.01",
    "representation-shards": f"{FEDNEST} {ALL_FIVE} --set partition=shards:2 "
    "--rounds 500 --measure-every 10 --set upper_step=0.01,0.03 "
    "--set lower_step=0.01,0.03",
    "loss-tuning": "compare loss-tuning --clients 10 --data fashion-mnist "
    "--set train=0.5 --algorithms local-bsgvrm,fedavg --rounds 500 --seeds 3 "
    "--measure-every 20 --set local-bsgvrm.upper_step=0.25,0.5,1 "
    "--set local-bsgvrm.lower_step=8,16 --set fedavg.lower_step=2,4,8,16,32,64",
    "cleaning-linear": f"{CLEANING} --algorithms fedbio "
    "--set upper_step=30,100,300 --set lower_step=4,16",
    "cleaning-linear-corrupted": f"{CLEANING} --algorithms fedavg {LINEAR_STEPS}",
    "cleaning-linear-clean": f"{CLEANING} --algorithms fedavg --set kept=clean "
    f"{LINEAR_STEPS}",
    "cleaning-mlp": f"{MLP} --algorithms fedbio --set upper_step=10,30,100 "
    "--set lower_step=0.2,0.4",
    "cleaning-mlp-corrupted": f"{MLP} --algorithms fedavg {MLP_STEPS}",
    "cleaning-mlp-clean": f"{MLP} --algorithms fedavg --set kept=clean {MLP_STEPS}",
}
COMMANDS |= {
    f"representation-{period}-{span}": f"{FEDNEST} {SPANS[span]} {PERIODS[period]}"
    for span in SPANS
    for period in PERIODS
}
COMMANDS["regularization"] = (
    f"{A9A} --algorithms local-bsgvrm --set upper_step=50,200,800 "
    "--set lower_step=0.5,1"
)
COMMANDS |= {
    f"regularization-strength{start}": f"{A9A} --algorithms fedavg "
    f"--set start={start} --set lower_step=0.5,1,2"
    for start in SINGLE_STRENGTHS
}


def measure(name: str, text: str, folder: Path) -> list[tuple[str, ...]]:
    printed, wrong, seconds = type_command(f"{text} {GRID}", folder / name)
    if wrong:
        return [(name, "failed", wrong, "", seconds)]
    found = json.loads(printed)
    rows = [
        (f"{name}: {algorithm}", "diverged", told, "", seconds)
        for algorithm, told in found["diverged"].items()
    ]
    for one in found["ranking"]:
        algorithm = one["algorithm"]
        tried = found["trials"].get(algorithm, [])
        finite = [trial for trial in tried if trial[1] is not None]
        chosen = min(finite, key=lambda trial: trial[1])[0] if finite else {}
        told = " ".join(f"{key}={value}" for key, value in chosen.items())
        value = f"{one['mean']:.4f} +- {one['spread']:.4f}"
        rows.append((f"{name}: {algorithm}", found["metric"], value, told, seconds))
    for row in rows:
        print(*row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("names", nargs="*", default=[""], help="beginnings of names")
    asked = parser.parse_args()
    names = [name for name in COMMANDS if name.startswith(tuple(asked.names))]
    with ThreadPoolExecutor(max_workers=asked.workers) as pool:
        many = pool.map(lambda name: measure(name, COMMANDS[name], asked.out), names)
        rows = [row for rows in many for row in rows]
    print("\n| measured | metric | mean and deviation | chosen | seconds |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
