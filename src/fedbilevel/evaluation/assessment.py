"""How good a shared model is: in numbers, in a sentence, and where it is not.

It is compared, on the same rows, with the base rate, each site alone, and all rows
without tuning, as FedAvg fits them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbilevel.evaluation.linear import base_rate, fit_classes, fit_numbers
from fedbilevel.evaluation.metrics import Judgment, Rows, calibration

_FEW_VALIDATE, _FEW_OF_CLASS = 50, 30
_MOST_NAMED = 5  # sites in a warning
_MOST_COLUMNS, _MOST_CLASSES = 200, 20  # of linear models that take no time
_MOST_SITES = 20  # whose own models are fitted, the largest first
_FEWEST_ROWS = 10  # to fit a model
_TITLES = {"auc": "AUC", "brier_score": "Brier score", "r2": "R2"}
MEANINGS = {
    "log_loss": "the mean surprise at the true class: 0 would be certain and right",
    "auc": "the chance that a row of a class ranks above one of another: 0.5 is luck",
    "balanced_accuracy": "the share of right answers, each class counting alike",
    "accuracy": "the share of right answers",
    "brier_score": "the mean squared error of the probabilities: 0 is perfect",
    "root_mean_squared_error": "the typical error, in the units of what is predicted",
    "mean_absolute_error": "the mean size of an error, in the same units",
    "r2": "the share of the differences between rows that is explained: 1 is perfect",
}


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


@dataclass(frozen=True)
class Judged:
    """The judged predictions for held-out rows.

    `features` of the rows are for linear baselines, None to leave those out. `site` has
    the number of the site of each row, where it is known. `validation` has how many
    rows of each class validate, or how many in all.
    """

    rows: Rows
    predicted: np.ndarray
    classes: Sequence[str]
    features: np.ndarray | None
    site: np.ndarray | None
    validation: Sequence[int]


def is_linear_cheap(columns: int, classes: int) -> bool:
    """Say whether linear models of such rows are fitted in no time."""
    return columns <= _MOST_COLUMNS and classes <= _MOST_CLASSES


def quality(asked: Judged, sites: Sequence[Site]) -> dict[str, Any]:
    """Return metrics with 95 % intervals against the baselines, as plain data."""
    rows = asked.rows
    others = _baselines(sites, rows, asked.features)
    shared = Baseline("shared", "shared model", asked.predicted)
    every = [shared, *others]
    found = Judgment(rows, [one.predicted for one in every])
    models = [
        {
            "kind": one.kind,
            "name": one.name,
            "note": one.note,
            "metrics": found.metrics(place),
            "difference": found.difference(0, place),
        }
        for place, one in enumerate(every)
    ]
    about = {
        "predicts": "class" if rows.classes else "number",
        "rows": len(rows),
        "metric": rows.headline,
        "models": models,
        "sites": list(_by_site(asked, sites, others)),
        "calibration": _calibration(asked),
    }
    return {
        "sentence": sentence(about),
        "warnings": list(_warnings(asked, about)),
        **about,
    }


def _baselines(
    sites: Sequence[Site], rows: Rows, features: np.ndarray | None
) -> list[Baseline]:
    """Return the base rate, each site alone, the largest first, and FedAvg.

    Without `features` of the tested rows it is the base rate only.
    """
    everything = np.concatenate([one.label for one in sites])
    simple = "base rate" if rows.classes else "mean of the training rows"
    made = [Baseline("base_rate", simple, constant(everything, rows))]
    if features is None:
        return made
    held = [one.features() for one in sites]
    order = sorted(range(len(sites)), key=lambda k: -sites[k].rows)
    alone = order[:_MOST_SITES] if len(sites) > 1 else []
    made += [alone_at(sites[k], k, held[k], rows, features) for k in alone]
    if _why_not(everything, rows):
        return made
    untuned = _fitted(np.concatenate(held), everything, rows, features, 1.0)
    return [*made, Baseline("untuned", "all sites, untuned (FedAvg)", untuned)]


def alone_at(
    site: Site, number: int, held: np.ndarray, rows: Rows, features: np.ndarray
) -> Baseline:
    """Return a site's own model, or its base rate where no model can be fitted."""
    why = _why_not(site.label, rows)
    if why:
        predicted = constant(site.label, rows)
    else:
        predicted = _fitted(held, site.label, rows, features)
    note = f"its own base rate, for it has {why}" if why else ""
    return Baseline("alone", f"{site.name} alone", predicted, number, note)


def _why_not(label: np.ndarray, rows: Rows) -> str:
    """Say why no model can be fitted to rows; nothing where one can."""
    if len(label) < _FEWEST_ROWS:
        return f"{len(label)} rows only"
    return "rows of one class only" if rows.classes and np.ptp(label) == 0 else ""


def constant(label: np.ndarray, rows: Rows) -> np.ndarray:
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


def _by_site(
    asked: Judged, sites: Sequence[Site], others: Sequence[Baseline]
) -> Iterator[dict[str, Any]]:
    """Return every site's own tested rows, predicted by the shared model and alone."""
    if asked.site is None:
        return
    alone = {one.site: one for one in others if one.site is not None}
    for number, site in enumerate(sites):
        places = np.flatnonzero(asked.site == number)
        if not len(places):
            continue
        rows, ours = asked.rows.some(places), asked.predicted[places]
        own = alone.get(number)
        named = {"shared": ours, "base_rate": others[0].predicted[places]}
        if own is not None:
            named["alone"] = own.predicted[places]
        found = Judgment(rows, list(named.values()))
        yield {
            "name": site.name,
            "rows": len(places),
            "held": site.rows,
            "note": "" if own is None else own.note,
            "metrics": {kind: found.metrics(k) for k, kind in enumerate(named)},
            "difference": None if own is None else found.difference(0, 2),
        }


def _calibration(asked: Judged) -> dict[str, Any] | None:
    """Return the curve of the rarer of two classes, or of all classes together."""
    rows = asked.rows
    if not rows.classes:
        return None
    shown = None
    if rows.classes == 2:
        shown = int(np.argmin(np.bincount(rows.label, minlength=2)))
    name = None if shown is None else asked.classes[shown]
    return {"class": name, "bins": calibration(rows, asked.predicted, shown)}


def _warnings(asked: Judged, about: dict[str, Any]) -> Iterator[str]:
    shared, base, *others = about["models"]
    yield from _one_class(asked, shared["metrics"])
    if base["difference"][0] > 0:
        yield "the model is worse than the base rate: do not use it"
    texts = {
        "alone": "the model is worse than that of {}, the largest site",
        "untuned": f"its {title(about['metric'])} is worse than that of {{}}",
    }
    rivals = {one["kind"]: one for one in reversed(others)}  # of sites, the largest
    for kind, text in texts.items():
        if kind in rivals and rivals[kind]["difference"][1] > 0:
            yield f"{text.format(rivals[kind]['name'])}, by more than chance explains"
    yield from worse_off(about)
    yield from _few_rows(asked)


def worse_off(about: dict[str, Any]) -> list[str]:
    """Name the sites whose own model is better by more than chance explains."""
    worse = [
        s["name"] for s in about["sites"] if s["difference"] and s["difference"][1] > 0
    ]
    if not worse:
        return []
    more = f" and {len(worse) - _MOST_NAMED} more" if worse[_MOST_NAMED:] else ""
    named = ", ".join(worse[:_MOST_NAMED])
    return [f"worse off with the shared model than alone: {named}{more}"]


def _one_class(asked: Judged, metrics: dict[str, Any]) -> Iterator[str]:
    if not asked.rows.classes:
        return
    guess = np.argmax(asked.predicted, axis=1)
    if np.ptp(guess) or not np.ptp(asked.rows.label):
        return
    area = metrics["auc"]
    ranks = (
        f"its probabilities still rank rows, with an AUC of {with_interval(area)}: use "
        "a lower threshold than one half"
        if area is not None and area[1] > 0.5
        else "its probabilities do not rank rows better than chance"
    )
    yield f"the model predicts '{asked.classes[guess[0]]}' for every row, and {ranks}"


def _few_rows(asked: Judged) -> Iterator[str]:
    total = sum(asked.validation)
    if total < _FEW_VALIDATE:
        yield f"few rows validate, {total} in all: what was tuned is uncertain"
    elif len(asked.validation) > 1 and min(asked.validation) < _FEW_OF_CLASS:
        rarest = int(np.argmin(asked.validation))
        yield (
            f"few rows of the class '{asked.classes[rarest]}' validate, "
            f"{asked.validation[rarest]} in all: what was tuned is uncertain"
        )


def title(name: str) -> str:
    """Return the name of a metric for people."""
    return _TITLES.get(name, name.replace("_", " "))


def figure(value: float, like: float | None = None) -> str:
    """Write a number with three digits, or with as many decimals as another one has."""
    size = abs(value if like is None else like)
    decimals = 2 - math.floor(math.log10(size)) if size > 0 else 3
    return f"{value:,.{min(max(decimals, 0), 4)}f}"


def with_interval(metric: Sequence[float]) -> str:
    """Write a value with its interval."""
    value, low, high = metric
    return f"{figure(value)} ({figure(low, value)} to {figure(high, value)})"


def sentence(about: Mapping[str, Any]) -> str:
    """Say how good the shared model is, and what else there would be."""
    main = about["metric"]
    named = title(main)
    shared, base, *others = about["models"]
    found = shared["metrics"]
    other = "auc" if about["predicts"] == "class" else "r2"
    more = ""
    if found[other] is not None:
        more = f" and {title(other)} {with_interval(found[other])}"
    each = next((one for one in others if one["kind"] == "each_alone"), None)
    where = f" of {len(about['sites'])} sites" if each is not None else ""
    first = (
        f"{named[:1].upper()}{named[1:]} {with_interval(found[main])}{more} on "
        f"{about['rows']:,} held-out rows{where}."
    )
    value = found[main][0]
    second = f"The {base['name']} has {figure(base['metrics'][main][0], value)}"
    largest = next((one for one in others if one["kind"] == "alone"), None)
    if largest is not None:
        alone = figure(largest["metrics"][main][0], value)
        second += f"; {largest['name']}, the largest site, {alone}"
    if each is not None:
        second += f"; {each['name']} {figure(each['metrics'][main][0], value)}"
    return f"{first} {second} ({named}: lower is better)."
