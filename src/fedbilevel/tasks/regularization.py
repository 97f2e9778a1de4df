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
pulled toward their mean, and the model is refitted to all rows (`Folded`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Rows, Scalar
from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Layer, Pixels
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _parts, _rows
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
# Of folds.
_USUAL_FOLDS = 5
_RANGE = -18.0, 6.0  # of logarithms; beyond them nothing changes any more
_OWN, _COMMON = float(np.log(2)), 2.0  # standard deviations of logarithms
_UNKNOWN = -7.0  # where strengths start if the number of rows is unknown
_AT_ONCE, _FEW = 1024, 200  # rows, of a model with so many parameters or fewer


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


class Folded(eqx.Module):
    r"""Cross-validation as a lower level: a block of y for each fold, one for all rows.

    Of R folds, which every site makes of its own rows by class, row i validates in one,
    b(i), and trains in the others. y has a model W_b for every fold, and W_R for all
    rows:

        g_k(x, W) = mean_i [ sum_{b<R, b != b(i)} R/(R-1) l(W_b a_i) + l(W_R a_i) ]
                    + 1/2 sum_b sum_j exp(x_j) ||W_b:j||^2
        f_k(x, W) = mean_i l(W_b(i) a_i) + p(x)/n

    So x is tuned by all rows, and W_R, on which f does not depend, is the model
    refitted to all of them at the strengths of x, in the same exchanges. The last
    column of W is the intercept, and free; of several classes the intercepts of a block
    sum to 0, which changes no probability. With two classes W has one row, the score of
    the second class.

    There is a strength for every column of a table, shared by the values of a text
    column: x_j = common + own_j, and p pulls them together, without which many
    strengths fit the validation rows by chance,

        p(x) = 1/2 sum_j (own_j / log 2)^2 + 1/8 (common + log(n d))^2

    that is, n f + p is the negative logarithm of a posterior density: own strengths are
    lognormal around the common one, two of three within a factor of 2, and that one,
    with deviation 2, around 1/(n d), which is scikit-learn's C = 1 for d columns of
    variance 1/d, and where a search starts. A site with n_k of the rows counts n_k/n
    among K and so adds p/(K n_k): the sum is p/n, and no site need know n.

    0 classes predict numbers. `columns` has, for every feature, the number of its
    column.
    """

    folds: int
    classes: int
    columns: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """The parameters of one model."""
        return self.scores * (len(self.columns) + 1)

    @property
    def scores(self) -> int:
        """The rows of W."""
        return self.classes if self.classes > 2 else 1

    def problem(self, largest: int) -> Problem:
        """Return the two levels, for sites of which the largest has so many rows.

        Of many, some at a time stay in the cache of a processor, and small sites need
        not take the time of the largest: 0.12 s in place of 0.45 for the sums of 16,000
        rows at five sites.
        """
        few = _AT_ONCE if self.parameters <= _FEW else _AT_ONCE // 4
        return Problem(
            self.upper,
            self.lower,
            separate=True,
            rows_at_once=few if largest > few else None,
            lower_hessian=self.lower_hessian,
        )

    def usual(self, rows: int) -> float:
        """Return the logarithm of the strength that is likeliest before a search."""
        return float(-np.log(rows * len(self.columns)))

    def start(self, common: float = _UNKNOWN) -> tuple[Any, Array]:
        """Return where both levels begin: at one strength, and at nothing."""
        own = _tree.filled(max(self.columns) + 1)
        shape = (self.folds + 1, self.scores, len(self.columns) + 1)
        return {"common": _tree.filled((), common), "own": own}, _tree.filled(shape)

    def row_fields(self, labels: Sequence[np.ndarray], sites: int) -> list[Rows]:
        """Return what rows need besides features and label, for each of some sites."""
        found, kind = [], jax.dtypes.canonicalize_dtype(float)
        for label in labels:
            size = len(label)
            alike = label if self.classes else np.zeros(size, np.int32)
            fold = np.zeros(size, np.int32)
            fold[np.argsort(alike, kind="stable")] = np.arange(size) % self.folds
            pull = np.full(size, 1 / (size * sites), kind)
            usual = np.full(size, self.usual(size * sites), kind)
            found.append({"fold": fold, "pull": pull, "usual": usual})
        return found

    def layers(self, x: Any, W: Any) -> tuple[Layer, ...]:
        """Return the model of all rows as layers."""
        last = np.asarray(W)[-1]
        return linear_layers(x, last[0] if self.classes == 2 else last)

    def predicted(self, x: Any, W: Array, features: Array) -> Array:
        """Return the scores of the model of all rows."""
        del x
        scores = features @ W[-1].T
        if self.classes != 2:
            return scores
        return jnp.hstack([jnp.zeros_like(scores), scores])

    def scored(self, W: Array, rows: Rows) -> Array:
        """Return the scores of every row under every block."""
        flat = rows["features"] @ W.reshape(-1, W.shape[-1]).T
        return flat.reshape(-1, *W.shape[:2])

    def shares(self, W: Array, rows: Rows) -> Array:
        """Return how much a row counts in the training of every block."""
        own = jax.nn.one_hot(rows["fold"], self.folds + 1, dtype=W.dtype)
        share = [self.folds / (self.folds - 1)] * self.folds + [1.0]
        return (1 - own) * jnp.asarray(share, W.dtype)

    def strengths(self, x: Any) -> Array:
        """Return the strength of every feature."""
        each = jnp.exp(jnp.clip(x["common"] + x["own"], *_RANGE))
        return each[np.asarray(self.columns)]

    def losses(self, W: Array, rows: Rows) -> Array:
        """Return the loss of every row under every block."""
        scores = self.scored(W, rows)
        if not self.classes:
            apart = scores[..., 0] - rows["label"][:, None].astype(scores.dtype)
            return 0.5 * apart**2
        # A product in place of a look-up, whose derivatives take ten times as long.
        member = jax.nn.one_hot(rows["label"], max(self.classes, 2), dtype=W.dtype)
        if self.classes == 2:
            return jax.nn.softplus(scores[..., 0]) - member[:, 1:] * scores[..., 0]
        chosen = jnp.sum(member[:, None] * scores, axis=-1)
        return jax.nn.logsumexp(scores, axis=-1) - chosen

    def upper(self, x: Any, W: Array, rows: Rows) -> Scalar:
        """Return f: every row under the block that did not see it, and the pull."""
        own = jax.nn.one_hot(rows["fold"], self.folds, dtype=W.dtype)
        held_out = jnp.sum(own * self.losses(W[:-1], rows), axis=1)
        apart = jnp.sum((x["own"] / _OWN) ** 2)
        apart += ((x["common"] - rows["usual"]) / _COMMON) ** 2
        return jnp.mean(held_out + 0.5 * rows["pull"] * apart)

    def lower(self, x: Any, W: Array, rows: Rows) -> Scalar:
        """Return g: every block on the rows that it trains on."""
        penalty = self.strengths(x) * W[..., :-1] ** 2
        losses = self.shares(W, rows) * self.losses(W, rows)
        data = jnp.mean(jnp.sum(losses, axis=1))
        # Of several classes, only differences of intercepts mean anything.
        gauge = jnp.sum(W[..., -1], axis=1) if self.classes > 2 else 0 * data
        return data + 0.5 * jnp.sum(penalty) + 0.5 * jnp.sum(gauge**2)

    def lower_hessian(self, x: Any, W: Array, rows: Rows, weights: Array) -> Array:
        """Return d2 g / dW dW of every block, in sums over rows by their weights.

        With chances p of the classes, that of a row is (diag(p) - p p^T) x a a^T: a
        product a class for the first part, and one of all p_c a for the second.
        """
        (blocks, scores, width), a = W.shape, rows["features"]
        weight = weights[:, None] * self.shares(W, rows)
        found = self.scored(W, rows)
        several = self.classes > 2
        if several:
            chance = jax.nn.softmax(found, axis=-1)
        elif self.classes:
            chance = jax.nn.sigmoid(found) * jax.nn.sigmoid(-found)
        else:
            chance = jnp.ones_like(found)
        by_row = (weight[..., None] * chance).reshape(len(a), -1).T
        diagonal = ((by_row[..., None] * a).swapaxes(1, 2) @ a).reshape(
            blocks, scores, width, width
        )
        same = jnp.eye(scores, dtype=W.dtype)
        H = jnp.einsum("bcij,cd->bcidj", diagonal, same)
        penalty = jnp.append(self.strengths(x), 0) * jnp.sum(weights)
        H += jnp.einsum("cd,ij->cidj", same, jnp.diag(penalty))
        H = H.reshape(blocks, scores * width, scores * width)
        if not several:
            return H
        chance = jnp.sqrt(weight)[..., None] * chance
        both = (chance[..., None] * a[:, None, None]).transpose(1, 0, 2, 3)
        both = both.reshape(blocks, len(a), -1)
        gauge = jnp.tile(jnp.zeros(width, W.dtype).at[-1].set(1), scores)
        return (
            H - both.swapaxes(1, 2) @ both + jnp.sum(weights) * gauge[:, None] * gauge
        )


def strengths(x: Any) -> np.ndarray:
    """Return the strengths that x stands for.

    Those of columns, or of all features where they are not tuned by folds; that of the
    constant feature is last then.
    """
    if isinstance(x, Mapping):
        logarithms = np.asarray(x["common"]) + np.asarray(x["own"])
        return np.exp(np.clip(logarithms, *_RANGE))
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
    usual = _USUAL_FOLDS if pool.is_own and tabular and not train else 1
    return folds or usual


def _folded_task(
    pool: _rows.Pool, folds: int, dealt: tuple[int, str], start: float, sites: int
) -> Task:
    """Return the task in which rows take turns in validating."""
    pool = _rows.with_constant(pool)
    features = pool.held.features.shape[1] - 1
    made = pool.held.preparation
    # The number of the column that each feature was made of.
    sizes = [len(one.feature_names) for one in made.columns] if made else [1] * features
    columns = tuple(np.repeat(np.arange(len(sizes)), sizes).tolist())
    folded = Folded(folds, pool.classes, columns)
    parts = _parts.partition_rows(pool, *dealt, 0.0, folds=folds)
    labels = [one["label"] for one in parts.lower]
    fields = folded.row_fields(labels, sites or len(labels))
    every = [{**one, **more} for one, more in zip(parts.lower, fields, strict=True)]
    parts = replace(parts, upper=every, lower=every)
    exact = folded.parameters <= _MOST_EXACT
    # Sites of a federation start alike: they know what the preparation counted.
    counted = made.sites if sites and made else tuple(map(len, labels))
    usual = folded.usual(sum(counted)) if counted else _UNKNOWN
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
