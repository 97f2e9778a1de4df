r"""Cross-validation as a lower level: a block of y for each fold, one for all rows.

Of R folds, which every site makes of its own rows by class, row i validates in one,
b(i), and trains in the others. y has a model W_b for every fold, and W_R for all rows:

    g_k(x, W) = mean_i [ sum_{b<R, b != b(i)} R/(R-1) l(W_b a_i) + l(W_R a_i) ]
                + 1/2 sum_b sum_j exp(x_j) ||W_b:j||^2
    f_k(x, W) = mean_i l(W_b(i) a_i) + p(x)/n

So x is tuned by all rows, and W_R, on which f does not depend, is the model refitted to
all of them at the strengths of x, in the same exchanges. The last column of W is the
intercept, and free; of several classes the intercepts of a block sum to 0, which
changes no probability. With two classes W has one row, the score of the second class.

There is a strength for every column of a table, shared by the values of a text column:
x_j = common + own_j, and p pulls them together, without which many strengths fit the
validation rows by chance,

    p(x) = 1/2 sum_j (own_j / log 2)^2 + 1/8 (common + log(n d))^2

that is, n f + p is the negative logarithm of a posterior density: own strengths are
lognormal around the common one, two of three within a factor of 2, and that one, with
deviation 2, around 1/(n d), which is scikit-learn's C = 1 for d columns of variance
1/d, and where a search starts. A site with n_k of the rows counts n_k/n among K and so
adds p/(K n_k): the sum is p/n, and no site need know n.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Rows, Scalar
from fedbilevel.datasets import Preparation
from fedbilevel.models import Layer
from fedbilevel.problem import Problem
from fedbilevel.tasks._networks import linear_layers

USUAL = 5
_LOWEST, _HIGHEST = -18.0, 6.0  # logarithms; beyond them nothing changes any more
_OWN, _COMMON = float(np.log(2)), 2.0  # standard deviations of logarithms
START = -7.0  # where the number of rows is unknown
_AT_ONCE, _FEW = 1024, 200  # rows, of a model with so many parameters or fewer


class Folded(eqx.Module):
    """A linear model over folds; 0 classes predict numbers.

    `columns` has, for every feature, the number of its column.
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

    def start(self, common: float = START) -> tuple[Any, Array]:
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
        each = jnp.exp(jnp.clip(x["common"] + x["own"], _LOWEST, _HIGHEST))
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
    """Return the strength of every column."""
    logarithms = np.asarray(x["common"]) + np.asarray(x["own"])
    return np.exp(np.clip(logarithms, _LOWEST, _HIGHEST))


def columns_of(made: Preparation | None, width: int) -> tuple[int, ...]:
    """Return the number of the column that each feature was made of."""
    if made is None:
        return tuple(range(width))
    sizes = [len(one.feature_names) for one in made.columns]
    return tuple(np.repeat(np.arange(len(sizes)), sizes).tolist())
