"""Draws the pictures of docs/which-question.md: `python docs/pictures.py`."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plots
import numpy as np

import fedbilevel as fb
from fedbilevel.experiments import Experiment

FIGURES = Path(__file__).parent / "figures"
WIDTH, HEIGHT = 6.4, 3.4
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fedbilevel", "font.size": 11}
# What a method of each kind ends at, and what it is called there.
KINDS = {
    "fedavg": ("tab:gray", "fedavg: x untouched"),
    "fedbioacc-local": ("tab:green", "fedbioacc-local: own y per client"),
    "fedbio": ("tab:blue", "fedbio: shared y"),
    "local-bsgvrm": ("tab:red", "local-bsgvrm: neither"),
}
LIMITS = {0.0: "0", 24 / 29: "24/29", 1.0: "1", 8 / 7: "8/7"}


def path_of(method: str, rounds: int, local_steps: int, **options: str) -> np.ndarray:
    """Return x after every round on the task `two-client`."""
    settings = Experiment(
        "two-client", method, local_steps=local_steps, options=options
    )
    built = settings.build()
    task = built.task
    found = fb.run(
        task.problem,
        task.data,
        (task.x, task.y),
        built.algorithm,
        rounds=rounds,
        measure_every=1,
        sampling=fb.Sampling(1),
        metrics=lambda x, y: {"x": x[0]},
    )
    return found.columns["x"]


def framed(title: str, across: str, up: str) -> tuple[Any, Any]:
    """Return an empty picture."""
    figure, axes = plots.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def who_converges_where() -> Any:
    """Draw x of one method of each kind, and the closed forms they end at."""
    title = "Two clients: who converges where"
    figure, axes = framed(title, "round", "x")
    for limit in LIMITS:
        axes.axhline(limit, color="lightgray", linewidth=1, zorder=0)
    for method, (color, text) in KINDS.items():
        x = path_of(method, 150, 1)
        axes.plot(np.arange(1, len(x) + 1), x, color=color, label=text)
    axes.set_yticks(list(LIMITS), list(LIMITS.values()))
    axes.legend(frameon=False, loc="center right", fontsize=10)
    return figure


def drift_and_controls() -> Any:
    """Draw how far x is off, with ten local steps, with and without controls."""
    title = "Ten local steps: controls take out the drift"
    figure, axes = framed(title, "round", "distance of x from the answer")
    steps = {"upper_step": "0.02", "lower_step": "0.02"}
    methods = {"fedbio": "tab:red", "fedbio-controls": "tab:blue"}
    for method, color in methods.items():
        x = path_of(method, 300, 10, **steps)
        away = np.maximum(np.abs(x - 1), 1e-7)
        axes.semilogy(np.arange(1, len(x) + 1), away, color=color, label=method)
    axes.legend(frameon=False)
    return figure


def exact_and_local_inverse() -> Any:
    """Draw the mean of the inverses, and the inverse of the mean, of two curvatures."""
    title = "Averaged local inverses are too large when clients differ"
    figure, axes = framed(title, "curvature of client 2 (client 1 has 1)", "inverse")
    curvature = np.linspace(1, 8, 141)
    local, exact = (1 + 1 / curvature) / 2, 2 / (1 + curvature)
    axes.plot(curvature, local, color="tab:red", label="mean of the local inverses")
    axes.plot(curvature, exact, color="tab:blue", label="exact: inverse of the mean")
    axes.fill_between(curvature, exact, local, color="tab:red", alpha=0.1)
    axes.annotate(
        "two-client: 2/3\nin place of 1/2",
        xy=(3, 2 / 3),
        xytext=(3.4, 0.84),
        arrowprops={"arrowstyle": "-", "color": "gray"},
        fontsize=10,
    )
    axes.plot([3, 3], [1 / 2, 2 / 3], "o", color="black", markersize=4)
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, loc="lower left")
    return figure


PICTURES = {
    "inverses": exact_and_local_inverse,
    "two-clients": who_converges_where,
    "drift": drift_and_controls,
}


def main(folder: Path = FIGURES) -> None:
    """Write every picture."""
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            place = folder / f"{name}.svg"
            draw().savefig(place, metadata={"Date": None})
            plots.close()
            # Matplotlib ends lines of SVG with blanks.
            lines = place.read_text().splitlines()
            place.write_text("".join(f"{line.rstrip()}\n" for line in lines))


if __name__ == "__main__":
    main()
