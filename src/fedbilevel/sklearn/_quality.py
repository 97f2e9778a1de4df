"""How good an estimator is on rows that it was not fitted to, against what else is."""

from functools import partial
from typing import Any

import numpy as np
from sklearn.utils import check_consistent_length, column_or_1d

from fedbilevel.errors import InvalidInputError
from fedbilevel.evaluation import Judged, Rows, Site, is_linear_cheap, quality
from fedbilevel.sklearn._rows import as_column

ONE_PLACE = "all rows"


def quality_of(
    predicted: np.ndarray,
    classes: np.ndarray | None,
    tested: tuple[np.ndarray, Any, Any],
    training: tuple[np.ndarray, Any, Any],
    validation: float,
) -> dict[str, Any]:
    """Judge predictions; `tested` and `training` are rows, labels and sites or None."""
    features, label, where = tested
    rows, known, sites = training
    held = _codes("training", known, classes, rows)
    column = np.full(len(rows), ONE_PLACE)
    if sites is not None:
        column = as_column("sites of training", sites, len(rows))
    names = np.unique(column)
    count = 0 if classes is None else len(classes)
    places = None
    if where is not None:
        found = as_column("sites", where, len(features))
        places = np.asarray([_place(names, one) for one in found])
    shares = np.bincount(held, minlength=count) if count else np.asarray([len(held)])
    asked = Judged(
        Rows(_codes("y", label, classes, features), count),
        predicted,
        [] if classes is None else [str(one) for one in classes],
        features if is_linear_cheap(features.shape[1], count) else None,
        places,
        np.round(validation * shares).astype(int).tolist(),
    )
    parts = {str(name): column == name for name in names}
    return quality(
        asked,
        [
            Site(name, held[own], partial(rows.__getitem__, own))
            for name, own in parts.items()
        ],
    )


def _place(names: np.ndarray, name: str) -> int:
    """Return the number of a site; -1 is one that nothing was fitted to."""
    found = np.flatnonzero(names == name)
    return int(found[0]) if len(found) else -1


def _codes(
    what: str, label: Any, classes: np.ndarray | None, rows: np.ndarray
) -> np.ndarray:
    """Return labels as numbers of classes; where numbers are predicted, as they are."""
    values = column_or_1d(label)
    check_consistent_length(rows, values)
    if classes is None:
        return np.asarray(values, float)
    for value in values[~np.isin(values, classes)]:
        raise InvalidInputError(
            f"{what}: the label '{value}' is none of those that were fitted. Leave its "
            "rows out."
        )
    return np.searchsorted(classes, values)
