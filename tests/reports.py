"""Folders of runs that were made up, and what their pages hold."""

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.cli.dashboard import page_of
from fedbilevel.experiments import Experiment
from fedbilevel.result import Result

HOSTILE = '</script><script>window.taken=1</script><img src=x onerror="window.taken=1">'


def made_up(
    name: str, seed: int = 0, rounds: int = 12, price: int = 1000, **changes: Any
) -> Result:
    draw = np.random.default_rng((seed, len(name)))
    at = np.arange(1, rounds + 1)
    loss = 30.0 / at**2 + 0.01 * draw.random(rounds)
    columns = {
        "round": at,
        "exchanges": 2 * at,
        "bytes": price * at,
        "samples": 10 * at,
        "upper_loss": loss.astype(np.float32),
        "test_accuracy": 1 - 0.9 / at + 1e-3 * draw.random(rounds),
    }
    calls = {"hessian_product": 7}
    per = {"floats_up": 5, "floats_down": 6}
    counts = {
        "rounds": rounds,
        "exchanges": 2 * rounds,
        "bytes_up": price * rounds // 2,
        "bytes_down": price * rounds // 2,
        "samples": {"upper_samples": 4 * rounds, "lower_samples": 6 * rounds},
        "calls": calls,
        "per_client_and_round": per,
    }
    about: dict[str, Any] = {
        "task": "numbers",
        "algorithm": name,
        "config": {
            "clients": 3,
            "participants": 2,
            "seed": seed,
            "headline": "upper_loss",
            "runtime": "simulator",
        },
        "versions": {"fedbilevel": "0"},
        "columns": columns,
        "point": {"x": np.linspace(-3, 0, 4), "y": np.zeros(2)},
        "final": {n: float(columns[n][-1]) for n in ("upper_loss", "test_accuracy")},
        "counts": counts,
        "seconds": {"compile": 2.0, "run": 3.0},
        "ended": f"after all {rounds} rounds",
    }
    return Result(**{**about, **changes})


def made_up_quality(site: str = "North", metric: str = "log_loss") -> dict[str, Any]:
    """Return how good a model is at a site that is worse off with it."""
    names = ("log_loss", "auc", "balanced_accuracy", "brier_score")

    def metrics(value: float) -> dict[str, Any]:
        return {name: [value, value - 0.1, value + 0.1] for name in names}

    models = [
        {"kind": kind, "name": name, "note": "", "metrics": metrics(value)}
        for kind, name, value in (
            ("shared", "shared model", 0.5),
            ("base_rate", "base rate", 0.7),
            ("alone", f"{site} alone", 0.4),
        )
    ]
    own = {"shared": metrics(0.6), "alone": metrics(0.3), "base_rate": metrics(0.7)}
    bins = [
        {"predicted": p, "observed": p / 2, "interval": [0.0, p], "rows": 40}
        for p in (0.1, 0.4)
    ]
    one = {"name": site, "rows": 80, "held": 400, "note": "", "metrics": own}
    return {
        "sentence": f"Log loss 0.5 on 80 rows; {site} alone 0.4.",
        "warnings": [f"worse off: {site}"],
        "predicts": "class",
        "rows": 80,
        "metric": metric,
        "models": models,
        "sites": [one],
        "calibration": {"class": site, "bins": bins},
    }


def save_run(folder: Path, result: Result, experiment: Experiment | None = None):
    result.save(folder)
    if experiment is not None:
        experiment.save(folder)
    return folder


def save_comparison(
    folder: Path, names: dict[str, int], seeds: int = 3, rounds: int = 12
) -> Path:
    """Save results of algorithms, each with its price of a round in bytes."""
    for name, price in names.items():
        for seed in range(seeds):
            result = made_up(name, seed, rounds, price)
            result.save(folder / name / f"seed-{seed}")
    experiment = asdict(Experiment("numbers", rounds=rounds))
    settings = {"experiment": experiment, "seeds": seeds, "grid": {}}
    about = {"metric": "upper_loss", "target": 0.5, "diverged": {}}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "comparison.json").write_text(json.dumps(about))
    return folder


class Read(HTMLParser):
    """What a browser would find in a page: elements, attributes, texts."""

    def __init__(self, folder: Path | None = None, page: str | None = None) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.page = page_of(folder) if page is None and folder else page or ""
        self.feed(self.page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("id") or "program"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None

    def handle_data(self, data):
        if self._script is None:
            self.texts.append(data)
        else:
            self.scripts[self._script] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts["data"])
