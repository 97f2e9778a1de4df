r"""The two losses of a problem and how a batch of samples is scored by them.

    min_x  mean_k f_k(x, y*(x))   with   y*(x) = argmin_y mean_k g_k(x, y)

    f_k(x, y) = mean_i upper(x, y, row_i),   g_k(x, y) = mean_i lower(x, y, row_i)

`upper` and `lower` take a batch: a pytree whose leaves have one row per sample, and
return the mean over its rows. Terms without data (a regularizer) belong inside.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedbilevel._blocks import NOTHING
from fedbilevel._types import Loss, Lower, Noise, Pair, Rows, Scalar, Upper
from fedbilevel.errors import InvalidInputError

__all__ = ["Batch", "Fixed", "Problem", "lower_loss", "upper_loss"]


@dataclass(frozen=True)
class Fixed:
    """What of a level is no number, such as the activation function of a model."""

    leaves: tuple[Any, ...]
    structure: Any

    def completing(self, level: PyTree) -> PyTree:
        """Return a level of numbers with the rest put back."""
        return eqx.combine(level, jax.tree.unflatten(self.structure, self.leaves))


def _as_arrays(frozen: PyTree) -> PyTree:
    for leaf in jax.tree.leaves(frozen):
        if not eqx.is_array_like(leaf):
            raise InvalidInputError(
                f"`Problem(frozen=...)` holds a leaf of type {type(leaf).__name__}. "
                "Give arrays alone: of an Equinox module, `eqx.filter(module, "
                "eqx.is_array)`, and put it together inside the losses."
            )
    return jax.tree.map(jnp.asarray, frozen)


class Problem(eqx.Module):
    """Two plain functions of pytrees: `upper(x, y, batch)` and `lower(x, y, batch)`.

    `upper` judges and `lower` trains: both return the mean loss over the rows of a
    batch. `upper_noise` and `lower_noise`, functions of (key, batch), may perturb a
    drawn batch (noisy oracles, augmentation). They see the bundle's key, so that two
    points of one bundle meet the same perturbation; evaluations over all data leave
    them out.

    `private` flags blocks of x and y that each client keeps to itself: True, False, or
    a tree of them, for each level; `Pair(False, True)` keeps all of y. `frozen` are
    arrays that are input and never optimized, such as a backbone: the losses, and the
    metrics of a run, get them as one more argument. All clients share one copy. `fixed`
    is what a start holds besides its numbers, for x and for y; whoever runs a problem
    fills it in from the start.
    """

    upper: Loss = eqx.field(static=True)
    lower: Loss = eqx.field(static=True)
    upper_noise: Noise | None = eqx.field(static=True, default=None)
    lower_noise: Noise | None = eqx.field(static=True, default=None)
    private: Pair = eqx.field(static=True, default=NOTHING)
    frozen: PyTree = eqx.field(converter=_as_arrays, default=None)
    fixed: tuple[Fixed, Fixed] | None = eqx.field(static=True, default=None)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What losses and metrics are given beyond their usual arguments."""
        return () if self.frozen is None else (self.frozen,)

    @property
    def coarse_type(self) -> str:
        """The type of frozen numbers that are shorter than float32, or nothing."""
        for leaf in jax.tree.leaves(self.frozen):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
                return str(leaf.dtype)
        return ""

    def whole(self, x: Upper, y: Lower) -> tuple[Any, Any]:
        """Return x and y as they were given at the start: models, not numbers alone."""
        if self.fixed is None:
            return x, y
        return self.fixed[0].completing(x), self.fixed[1].completing(y)

    def scored(self, loss: Loss, x: Upper, y: Lower, rows: Rows) -> Any:
        """Return one of the losses on rows."""
        return loss(*self.whole(x, y), rows, *self.inputs)

    def functions(self) -> tuple[Any, ...]:
        """Return what tells this problem from others, but for the frozen arrays."""
        own = (self.upper, self.lower, self.upper_noise, self.lower_noise)
        return own if self.fixed is None else (*own, *self.fixed)


class Batch(eqx.Module):
    """Samples, and weights where rows may be padding; over all rows they sum to one."""

    rows: Rows
    weights: Float[Array, " rows"] | None = None


def _score(problem: Problem, loss: Loss, x: Upper, y: Lower, batch: Batch) -> Scalar:
    if batch.weights is None:
        return problem.scored(loss, x, y, batch.rows)

    def score_row(row: Rows) -> Scalar:
        one = jax.tree.map(lambda leaf: leaf[None], row)
        return problem.scored(loss, x, y, one)

    return jnp.vdot(batch.weights, jax.vmap(score_row)(batch.rows))


def upper_loss(problem: Problem, x: Upper, y: Lower, batch: Batch) -> Scalar:
    """Return f on a batch."""
    return _score(problem, problem.upper, x, y, batch)


def lower_loss(problem: Problem, x: Upper, y: Lower, batch: Batch) -> Scalar:
    """Return g on a batch."""
    return _score(problem, problem.lower, x, y, batch)
