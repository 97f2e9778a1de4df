"""Measures what the founding paper claims: every command of docs/theory.md, in turn.

    python benchmarks/theory.py [FOLDER]

Each line of COMMANDS is run as a newcomer would type it and leaves summary.json and
figure.png in FOLDER/NAME. A table of all exponents ends it.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typed_command import type_command

METHODS = {
    "local-bsgm": "--algorithm local-bsgm",
    "local-bsgvrm": "--algorithm local-bsgvrm",
    "local-bsgvrm-decaying": "--algorithm local-bsgvrm --theorem 3",
    "fedbioacc": "--algorithm fedbioacc",
    "fednest": "--algorithm fednest",
}
QUESTIONS = {
    "speedup-clients": "speedup quadratic {} --clients 1,4,16",
    "speedup-iterations": "speedup quadratic {} --clients 2 "
    "--iterations 1000,4000,16000",
    "complexity-clients": "complexity quadratic {} --clients 1,2,4,8",
    "complexity-target": "complexity quadratic {} --clients 2",
}
# What happens outside the assumptions.
BEYOND = {
    "local-bsgvrm-differing": "speedup quadratic --algorithm local-bsgvrm "
    "--clients 1,4,16 --set spread=0.5",
    "fedbioacc-differing": "speedup quadratic --algorithm fedbioacc "
    "--clients 1,4,16 --set spread=0.5",
    "local-bsgm-long-periods": "speedup quadratic --algorithm local-bsgm "
    "--clients 1,4,16 --period-factor 32",
    "local-bsgm-long-differing": "speedup quadratic --algorithm local-bsgm "
    "--clients 1,4,16 --period-factor 32 --set spread=0.5",
    "regularization": "speedup regularization --algorithm local-bsgm --target 0.85 "
    "--iterations 2000 --set eta=0.25 --set alpha=0.2 --set beta=0.2 --set rho1=10",
}
COMMANDS = {
    f"{method}-{question}": text.format(options)
    for question, text in QUESTIONS.items()
    for method, options in METHODS.items()
} | BEYOND


def measure(item: tuple[str, str], folder: Path) -> list[tuple[str, ...]]:
    name, text = item
    printed, wrong, seconds = type_command(text, folder / name)
    if wrong:
        return [(name, "failed", wrong, "", seconds)]
    found = json.loads(printed)
    fits = {found["value"]: found}
    if "rounds" in found:
        fits["rounds"] = found["rounds"]
    rows = []
    for what, fit in fits.items():
        span = f"[{fit['low']:.3f}, {fit['high']:.3f}]"
        claimed = "" if fit["claimed"] is None else f"{fit['claimed']:.2f}"
        measured = f"{fit['exponent']:.3f}"
        rows.append((f"{name}: {what}", measured, span, claimed, seconds))
    for row in rows:
        print(*row, flush=True)
    return rows


def main(folder: Path) -> None:
    began = time.perf_counter()
    # XLA runs these small programs on one core each.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = pool.map(lambda item: measure(item, folder), COMMANDS.items())
        rows = [row for rows in found for row in rows]
    print("\n| measured | exponent | 95 % interval | claimed | seconds |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/theory"))
