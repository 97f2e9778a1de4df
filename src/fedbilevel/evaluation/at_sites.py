"""How good a shared model is where rows stay apart: numbers of sites, put together.

A site judges the model on its own tested rows, and reports `NUMBERS` in place of rows.
Means over rows are those of all rows together. An area under a curve and R2 are means
over sites, because the ranks of rows at unlike sites are not compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.evaluation import assessment
from fedbilevel.evaluation.metrics import Judgment

FEWEST = 10  # tested rows of a site that reports
_METRICS = {"class": ("log_loss", "auc"), "number": ("root_mean_squared_error", "r2")}
_KINDS = {
    "shared": "shared model",
    "base_rate": "base rate of each site",
    "alone": "each site alone",
}
_ENDS = ("", "_low", "_high")  # a value, and its interval
_PREFIX = "quality_"
_SQUARED = {"root_mean_squared_error"}  # whose mean is taken of the squares
_WIDTH = 2 * 1.959964  # of a 95 % interval, in standard deviations

_EVERY = [metric for metrics in _METRICS.values() for metric in metrics]
_INTERVALS = ["difference", *(f"{of}_{metric}" for of in _KINDS for metric in _EVERY)]
NUMBERS: tuple[str, ...] = (
    f"{_PREFIX}rows",
    f"{_PREFIX}held",
    *(f"{_PREFIX}{name}{end}" for name in _INTERVALS for end in _ENDS),
)


def reported(asked: assessment.Judged, site: assessment.Site) -> dict[str, float]:
    """Return what a site reports of the model; nothing of few tested rows."""
    rows = asked.rows
    if len(rows) < FEWEST or asked.features is None:
        return {}
    base = assessment.constant(site.label, rows)
    alone = assessment.alone_at(site, 0, site.features(), rows, asked.features)
    found = Judgment(rows, [asked.predicted, base, alone.predicted])
    made: dict[str, float] = {"rows": len(rows), "held": site.rows}
    made |= _ended("difference", found.difference(0, 2))
    for place, kind in enumerate(_KINDS):
        metrics = found.metrics(place)
        for metric in _METRICS["class" if rows.classes else "number"]:
            made |= _ended(f"{kind}_{metric}", metrics[metric])
    return {f"{_PREFIX}{name}": value for name, value in made.items()}


def split(
    concluded: Mapping[int, Mapping[str, Any]], counts: Sequence[int] = ()
) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Take what sites report of the model out of what they concluded with.

    `counts` are the rows of every site, where sites agreed on them.
    """
    own = {
        client: {name: v for name, v in one.items() if name not in NUMBERS}
        for client, one in concluded.items()
    }
    return own, joined(concluded, counts)


def joined(
    concluded: Mapping[int, Mapping[str, Any]], counts: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the quality of the model over the sites that reported it, by client.

    What a site reports may be wrong or hostile: one with numbers missing, with an
    interval that does not hold its value, or with more rows than it has, is left out.
    """
    most = dict(enumerate(counts))
    whole = {
        kind: {k: v for k, v in concluded.items() if _is_whole(v, kind, most.get(k))}
        for kind in _METRICS
    }
    kind, known = max(whole.items(), key=lambda one: len(one[1]))
    if not known:
        return {}
    reports = list(known.values())
    held = np.array([one[f"{_PREFIX}rows"] for one in reports], float)

    def mean(name: str, squared: bool = False) -> list[float] | None:
        return _mean([_triple(one, name) for one in reports], held, squared)

    models = [
        {
            "kind": "each_alone" if one == "alone" else one,
            "name": name,
            "note": "",
            "metrics": {m: mean(f"{one}_{m}", m in _SQUARED) for m in _METRICS[kind]},
            "difference": mean("difference") if one == "alone" else [0.0, 0.0, 0.0],
        }
        for one, name in _KINDS.items()
    ]
    about = {
        "predicts": kind,
        "rows": int(held.sum()),
        "metric": _METRICS[kind][0],
        "models": models,
        "sites": [_site(client, one, kind) for client, one in known.items()],
        "calibration": None,
    }
    return {
        "sentence": assessment.sentence(about),
        "warnings": assessment.worse_off(about),
        **about,
    }


def _site(client: int, one: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "name": f"client {client}",
        "rows": one[f"{_PREFIX}rows"],
        "held": one[f"{_PREFIX}held"],
        "note": "",
        "metrics": {
            of: {metric: _triple(one, f"{of}_{metric}") for metric in _METRICS[kind]}
            for of in _KINDS
        },
        "difference": _triple(one, "difference"),
    }


def _ended(name: str, metric: list[float] | None) -> dict[str, float]:
    """Name a value and the ends of its interval; nothing where it is undefined."""
    if metric is None or not np.isfinite(metric).all():
        return {}
    value, low, high = metric
    # Resamples are in single precision, and a constant has an interval of no width.
    held = (value, min(low, value), max(high, value))
    return {f"{name}{end}": value for end, value in zip(_ENDS, held, strict=True)}


def _triple(one: Mapping[str, Any], name: str) -> list[float] | None:
    """Return a value with its interval; None unless that holds the value."""
    value, low, high = (one.get(f"{_PREFIX}{name}{end}") for end in _ENDS)
    if value is None or low is None or high is None or not low <= value <= high:
        return None
    return [float(value), float(low), float(high)]


def _is_whole(one: Mapping[str, Any], kind: str, most: int | None) -> bool:
    """Say whether a site reports counts, and the first metric of every model."""
    rows, held = (one.get(f"{_PREFIX}{name}") for name in ("rows", "held"))
    if type(rows) is not int or type(held) is not int or rows < FEWEST or held < 0:
        return False
    if most is not None and rows + held > most:
        return False
    first = _METRICS[kind][0]
    losses = [_triple(one, f"{of}_{first}") for of in _KINDS]
    right = all(loss is not None and loss[1] >= 0 for loss in losses)
    return right and _triple(one, "difference") is not None


def _mean(
    triples: list[list[float] | None], rows: np.ndarray, squared: bool
) -> list[float] | None:
    """Return the mean over rows, with the interval of independent sites."""
    if any(three is None for three in triples):
        return None
    power = 2 if squared else 1
    values = np.array(triples, float) ** power
    share = rows / rows.sum()
    value, spread = share @ values[:, 0], share * (values[:, 2] - values[:, 1]) / _WIDTH
    half = _WIDTH / 2 * np.sqrt((spread**2).sum())
    low = value - half if power == 1 else max(value - half, 0.0)
    return [float(one ** (1 / power)) for one in (value, low, value + half)]
