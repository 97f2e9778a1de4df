"""Texts of a page about numbers and a folder's results."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedbilevel.report.tables import show
from fedbilevel.saved import Saved
from fedbilevel.standings import Standing, default_target, ranking

MEANINGS = {
    "upper_loss": "loss on the validation rows, which tuning lowers",
    "lower_gradient_norm": "slope of the training loss: 0 where training is finished",
    "z_norm": "size of z, which solves the linear system of the hypergradient",
    "test_loss": "mean loss on held-out rows",
    "test_accuracy": "share of the tested rows whose class was found",
    "test_error": "share of the tested rows whose class was not found",
    "test_root_mean_squared_error": "typical error on tested rows",
    "test_explained_variance": "R2 on tested rows: 1 is perfect, 0 is the mean",
    "exchanges": "how often the sites sent something",
    "bytes": "sent by all sites and to them",
    "samples": "rows that were read, repetitions included",
}


def meaning(name: str) -> str:
    """Return what a metric is, to follow its name in a sentence."""
    return f", the {MEANINGS[name]}," if name in MEANINGS else ","


def title_of(saved: Saved) -> str:
    """Return what the page is about, in a line."""
    task, config = saved.every[0].task, saved.every[0].config
    if not saved.compared:
        about = config.get("data")
        label = about.get("label") if isinstance(about, dict) else None
        if isinstance(label, str) and saved.every[0].quality:
            sites = config.get("clients")
            whose = f": a model of {sites} sites" if isinstance(sites, int) else ""
            return f"Predicting {label}{whose}"
        return f"{next(iter(saved.results))} on {task}"
    count = len(saved.results)
    return f"{count} algorithm{'s' * (count > 1)} compared on {task}"


def standings_of(saved: Saved) -> tuple[list[Standing], float | None]:
    """Return the ranking and the target that its costs are about."""
    if not saved.compared:
        return [], saved.target
    target = saved.target
    if target is None:
        target = default_target(saved.results, saved.headline)
    return ranking(saved.results, saved.headline, target, saved.equal), target


def lowest(values: np.ndarray) -> int | None:
    """Return where values are lowest, unless that is at their end or nowhere."""
    if not np.isfinite(values).any():
        return None
    best = int(np.nanargmin(values))
    return best if values[best] < values[-1] else None


def still(saved: Saved) -> list[str]:
    """Return results without traffic; uncounted traffic is not none."""
    sent = {
        name: [one.columns.get("bytes", np.ones(1))[-1] for one in many]
        for name, many in saved.results.items()
    }
    return [name for name, many in sent.items() if not max(many)]


def mean_and_margin(one: Standing) -> str:
    """Return a mean with half of its interval, where there are seeds enough for one."""
    if one.margin is None:
        return amount(one.mean)
    return f"{amount(one.mean)} \u00b1 {one.margin:.2g}"


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence has them: a, b and c."""
    *rest, last = names
    return " and ".join(filter(None, [", ".join(rest), last]))


def amount(value: Any) -> str:
    """Write a number with four digits, whole numbers with their thousands."""
    if value is None or isinstance(value, str):
        return show(value)
    number = float(value)
    if not np.isfinite(number):
        return str(number)
    if number.is_integer() or abs(number) >= 10_000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def short(text: str, most: int = 60) -> str:
    """Cut what comes from a file down to what a cell can hold."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"
