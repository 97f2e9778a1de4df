"""What a round of every method costs, as the package counts it, into docs/costs.json.

Counting traces the program of each method, which takes minutes for all of them: the
pages read the file, and the tests count again.
"""

import json
import sys
from pathlib import Path

from fedbilevel import algorithms
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.runtime.counts import Ledger

PAGE = Path(__file__).parent / "costs.json"
TASK, CLIENTS, STEPS, ROUNDS = "quadratic", 8, 5, 100
# Methods that have to be told that they are wanted.
ASKED = {"pbgd-free": {"flat": "yes"}}
# What is counted, and what it is called on the pages.
COUNTS = {
    "exchanges": "exchanges",
    "floats_down": "numbers down",
    "floats_up": "numbers up",
    "upper_samples": "upper samples",
    "lower_samples": "lower samples",
    "upper_gradients": "upper gradients",
    "lower_gradient": "lower gradients in y",
    "lower_gradient_upper": "lower gradients in x",
    "lower_gradients": "lower gradients in both",
    "hessian_product": "Hessian products",
    "cross_product": "cross products",
    "unrolled_gradient": "gradients through unrolled steps",
    "unrolled_derivative": "derivatives through unrolled steps",
}


def counted(name: str) -> dict[str, float]:
    """Return the mean cost of a later round to a client, by the names of `COUNTS`."""
    options = ASKED.get(name, {})
    one = Experiment(
        TASK, name, clients=CLIENTS, local_steps=STEPS, safeguard=False, options=options
    )
    made = one.build()
    job = made.setting.job(made.algorithm)
    _, rounds = Ledger(job).each(job.key, ROUNDS + 1)
    found = {}
    for kind in COUNTS:
        each = [
            one.total[kind] if kind == "exchanges" else one.each[kind]
            for one in rounds[1:]
        ]
        mean = round(sum(each) / ROUNDS, 1)
        if mean:
            found[kind] = int(mean) if mean == int(mean) else mean
    return found


def known() -> dict[str, dict[str, float]]:
    """Return what was counted, by the names of methods."""
    return json.loads(PAGE.read_text())


def cost_of(name: str) -> str:
    """Return what a round of a method costs, as Markdown."""
    lines = ["| a client and round | |", "|---|---|"]
    lines += [f"| {COUNTS[kind]} | {many:,} |" for kind, many in known()[name].items()]
    return (
        f"One round of `{TASK}`, whose x has 5 numbers and y 6, with {CLIENTS} clients "
        f"and {STEPS} local steps, as the package counts it "
        "([all methods](../costs.md)):\n\n" + "\n".join(lines) + "\n"
    )


def costs_page() -> str:
    """Return what a round of every method costs, in one table."""
    found = known()
    kinds = [one for one in COUNTS if any(one in row for row in found.values())]
    lines = [
        f"| method | {' | '.join(COUNTS[kind] for kind in kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for name, row in found.items():
        cells = " | ".join(f"{row[kind]:,}" if kind in row else "" for kind in kinds)
        lines.append(f"| [{name}](algorithms/{name}.md) | {cells} |")
    return (
        "# What a round costs\n\n"
        f"For readers who compare methods. Each client's share of a round of `{TASK}`, "
        f"whose x has 5 numbers and y 6, with {CLIENTS} clients, {STEPS} local steps "
        f"and the defaults of the task: the mean of {ROUNDS} rounds after the first. "
        "Methods without exchanges have all rows on one machine. A run prints and "
        "stores its own counts.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    names = sys.argv[1:] or algorithms.names()
    rows = {**(known() if PAGE.exists() else {}), **{n: counted(n) for n in names}}
    rows = {name: rows[name] for name in algorithms.names()}
    text = ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in rows.items())
    PAGE.write_text(f"{{\n{text}\n}}\n")
