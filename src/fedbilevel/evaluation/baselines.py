"""Alternatives to the shared model, predicted for the same rows.

The base rate, each site alone, and all rows without tuning, as FedAvg fits them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbilevel.evaluation.linear import base_rate, fit_classes, fit_numbers
from fedbilevel.evaluation.metrics import Rows

_MOST_COLUMNS, _MOST_CLASSES = 200, 20  # of linear models that take no time
_MOST_SITES = 20  # whose own models are fitted, the largest first
_FEWEST_ROWS = 10  # to fit a model


@dataclass(frozen=True)
class Site:
    """A site's name, how many rows it has, its labels, and how to get the features."""

    name: str
    label: np.ndarray
    features: Callable[[], np.ndarray]

    @property
    def rows(self) -> int:
        """How many rows it trains and validates with."""
        return len(self.label)


@dataclass(frozen=True)
class Baseline:
    """A baseline's predictions; `site` is the number of a site's own model.

    `note` says in what it differs from a tuned linear model.
    """

    kind: str
    name: str
    predicted: np.ndarray
    site: int | None = None
    note: str = ""


def is_linear_cheap(columns: int, classes: int) -> bool:
    """Say whether linear models of such rows are fitted in no time."""
    return columns <= _MOST_COLUMNS and classes <= _MOST_CLASSES


def baselines(
    sites: Sequence[Site], rows: Rows, features: np.ndarray | None
) -> list[Baseline]:
    """Return the base rate, each site alone, the largest first, and FedAvg.

    Without `features` of the tested rows it is the base rate only.
    """
    everything = np.concatenate([one.label for one in sites])
    simple = "base rate" if rows.classes else "mean of the training rows"
    made = [Baseline("base_rate", simple, _constant(everything, rows))]
    if features is None:
        return made
    held = [one.features() for one in sites]
    order = sorted(range(len(sites)), key=lambda k: -sites[k].rows)
    alone = order[:_MOST_SITES] if len(sites) > 1 else []
    made += [_alone(sites[k], k, held[k], rows, features) for k in alone]
    if _why_not(everything, rows):
        return made
    untuned = _fitted(np.concatenate(held), everything, rows, features, 1.0)
    return [*made, Baseline("untuned", "all sites, untuned (FedAvg)", untuned)]


def of_one_site(site: Site, rows: Rows, features: np.ndarray) -> list[Baseline]:
    """Return what a site has without others: its base rate, and its own model."""
    base = Baseline("base_rate", "base rate", _constant(site.label, rows))
    return [base, _alone(site, 0, site.features(), rows, features)]


def _alone(
    site: Site, number: int, held: np.ndarray, rows: Rows, features: np.ndarray
) -> Baseline:
    why = _why_not(site.label, rows)
    if why:
        predicted = _constant(site.label, rows)
    else:
        predicted = _fitted(held, site.label, rows, features)
    note = f"its own base rate, for it has {why}" if why else ""
    return Baseline("alone", f"{site.name} alone", predicted, number, note)


def _why_not(label: np.ndarray, rows: Rows) -> str:
    """Say why no model can be fitted to rows; nothing where one can."""
    if len(label) < _FEWEST_ROWS:
        return f"{len(label)} rows only"
    return "rows of one class only" if rows.classes and np.ptp(label) == 0 else ""


def _constant(label: np.ndarray, rows: Rows) -> np.ndarray:
    """Return the same for every row: the shares of the classes, or the mean."""
    if rows.classes:
        return np.tile(base_rate(label, rows.classes), (len(rows), 1))
    return np.full(len(rows), label.mean())


def _fitted(
    held: np.ndarray,
    label: np.ndarray,
    rows: Rows,
    features: np.ndarray,
    strength: float | None = None,
) -> np.ndarray:
    if rows.classes:
        return fit_classes(held, label, rows.classes, strength)(features)
    return fit_numbers(held, label, strength)(features)
