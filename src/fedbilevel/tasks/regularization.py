r"""Per-feature l2 strengths exp(x_j) of softmax regression, tuned on validation data.

    g_k(x, W) = mean of CE(W a_i, l_i) over training + 0.5 sum_j exp(x_j) ||W_:j||^2
    f_k(x, W) = mean of CE(W a_i, l_i) over validation

W has one row per class and one column per feature; rows a_i are scaled to a length of
about 1 and end with a constant feature. x is kept in [-9, 0] where it is used, so the
lower level is exp(-9)-strongly convex wherever x goes; a strength at the border feels
no more pull outwards. Where the label is a number, W has one row, and half the squared
error of the target, scaled to variance 1, takes the place of CE.

This is the problem for built-in sets. On your own table x is tuned by cross-validation:
`folds` of the rows of every site take turns, the intercept is free, strengths are
pulled toward their mean, and the model is refitted to all rows (`tasks/_folds.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Rows, Scalar
from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Pixels
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _folds, _parts, _rows
from fedbilevel.tasks._base import MEASURED, Task, settings
from fedbilevel.tasks._labeled import HeldOut, HeldOutNumbers, as_numbers, cross_entropy
from fedbilevel.tasks._networks import linear_layers

_LOWEST, _HIGHEST = -9.0, 0.0
_START = -5.0
_RECOMMENDED = MEASURED | {
    "auto:fedbio-controls": "lower_step=1/L auxiliary_step=0.5/L",
    **settings("rounds=200 local_steps=10 batch=32 q=10 theta=0.2 upper_step=20"),
    **settings("lower_step=0.5 upper_weight=0.1 lower_weight=0.1"),
}
# With many rows small strengths are right, and the slopes along x are small, too.
_MANY = 500
_MOST_EXACT = 1000  # parameters of a model whose Hessian travels
_RECOMMENDED_FOR_MANY = settings("rounds=600 upper_step=200 lower_step=1")


class _Losses(eqx.Module):
    """Both levels; 0 classes predict numbers."""

    pixels: Pixels | None
    classes: int

    def scores(self, x: Array, W: Array, features: Array) -> Array:
        """Return a score for every class, or the number."""
        del x
        if self.pixels is not None:
            flat = as_numbers(features, self.pixels).reshape(len(features), -1)
            flat = flat / flat.shape[1] ** 0.5
            features = jnp.hstack([flat, jnp.ones_like(flat[:, :1])])
        # W @ a with features contiguous in both: XLA's fastest product on the CPU.
        return features @ W.T

    def upper(self, x: Array, W: Array, rows: Rows) -> Scalar:
        """Return the mean loss of rows."""
        scores, label = self.scores(x, W, rows["features"]), rows["label"]
        if self.classes:
            return cross_entropy(scores, label)
        return 0.5 * jnp.mean((scores[:, 0] - label.astype(scores.dtype)) ** 2)

    def lower(self, x: Array, W: Array, rows: Rows) -> Scalar:
        """Return the same with the penalty."""
        strength = jnp.exp(jnp.clip(x, _LOWEST, _HIGHEST))
        return self.upper(x, W, rows) + 0.5 * jnp.sum(strength * W**2)


def strengths(x: Any) -> np.ndarray:
    """Return the strengths that x stands for.

    Those of columns, or of all features where they are not tuned by folds; that of the
    constant feature is last then.
    """
    if isinstance(x, Mapping):
        return _folds.strengths(x)
    return np.exp(np.clip(np.asarray(x), _LOWEST, _HIGHEST))


def make(
    clients: int = 0,
    *,
    data: _rows.Source = "digits",
    partition: _rows.PartitionText = "iid",
    train: _rows.TrainShare = 0.0,
    split: _rows.SplitSeed = 0,
    rows: _rows.RowLimit = 0,
    start: Annotated[
        float,
        "all strengths begin at exp(start); what does not tune x leaves them there; 0 "
        "is usual: -5, or scikit-learn's C = 1 for your own table",
    ] = 0.0,
    folds: Annotated[
        int,
        "folds in which rows take turns in validating; 1 puts some aside for it; 0 is "
        "usual: 5 for your own table, 1 for a built-in set",
    ] = 0,
    sites: Annotated[int, "of how many sites this is one; a node says it itself"] = 0,
    **table: _rows.TableOptions,
) -> Task:
    """Build the task; 8 clients, and a fifth of a built-in set for training.

    Tested is an official test part, or else a fifth; the other rows validate.
    """
    pool = _rows.load(data, split, rows, table)
    count = _fold_count(pool, folds, train)
    if count > 1:
        return _folded_task(pool, count, (clients, partition), start, sites)
    start = start or _START
    width = int(np.prod(pool.held.features.shape[1:])) + 1
    if pool.pixels is None:  # images are scaled where they are used
        pool = _rows.with_constant(pool)
    parts = _parts.partition_rows(pool, clients, partition, train, usual_train=0.2)
    losses = _Losses(pool.pixels, pool.classes)
    held = ClientData.from_clients(parts.upper, parts.lower)
    many = int(np.asarray(held.lower_sizes).max()) > _MANY
    return Task(
        Problem(losses.upper, losses.lower),
        held,
        _tree.filled(width, start),
        _tree.filled((pool.classes or 1, width)),
        _tested(pool, losses.scores),
        headline="upper_loss",
        recommended=_RECOMMENDED | (_RECOMMENDED_FOR_MANY if many else {}),
        **parts.about(linear_layers),
    )


def _fold_count(pool: _rows.Pool, folds: int, train: float) -> int:
    """Return the number of folds; 1 where some rows are put aside to validate."""
    if folds < 0 or (folds > 1 and pool.held.validation is not None):
        raise InvalidInputError(
            f"folds={folds}: give 2 or more, 1, or 0 for what is usual. Where rows are "
            "marked for validation, they are what validates, and folds is 1."
        )
    if folds > 1 and train:
        raise InvalidInputError(
            f"folds={folds} and train={train}: with folds all rows train. Leave one of "
            "them out."
        )
    tabular = pool.pixels is None and pool.held.validation is None
    usual = _folds.USUAL if pool.is_own and tabular and not train else 1
    return folds or usual


def _folded_task(
    pool: _rows.Pool, folds: int, dealt: tuple[int, str], start: float, sites: int
) -> Task:
    """Return the task in which rows take turns in validating."""
    pool = _rows.with_constant(pool)
    features = pool.held.features.shape[1] - 1
    columns = _folds.columns_of(pool.held.preparation, features)
    folded = _folds.Folded(folds, pool.classes, columns)
    parts = _parts.partition_rows(pool, *dealt, 0.0, folds=folds)
    labels = [one["label"] for one in parts.lower]
    fields = folded.row_fields(labels, sites or len(labels))
    every = [{**one, **more} for one, more in zip(parts.lower, fields, strict=True)]
    parts = replace(parts, upper=every, lower=every)
    exact = folded.parameters <= _MOST_EXACT
    # Sites of a federation start alike: they know what the preparation counted.
    made = pool.held.preparation
    counted = made.sites if sites and made else tuple(map(len, labels))
    usual = folded.usual(sum(counted)) if counted else _folds.START
    return Task(
        folded.problem(max(map(len, labels))),
        ClientData.from_clients(every, every),
        *folded.start(start or usual),
        _tested(pool, folded.predicted),
        headline="upper_loss",
        recommended=_RECOMMENDED | _RECOMMENDED_FOR_MANY,
        algorithm="newton-bfgs" if exact else "fedbio-controls",
        **parts.about(folded.layers),
    )


def _tested(pool: _rows.Pool, scores: Any) -> HeldOut:
    """Hold rows for testing; numbers have a scale."""
    if pool.classes:
        return HeldOut.of(pool.test, scores)
    label = pool.held.preparation and pool.held.preparation.label
    if not isinstance(label, TargetLabel):
        raise InvalidInputError(
            "the label holds numbers, and nothing says how they were scaled. Give a "
            "table, or a label of classes."
        )
    spread = _tree.filled((), label.spread)
    return HeldOutNumbers.of(pool.test, scores, spread=spread)
