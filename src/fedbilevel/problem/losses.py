r"""The two losses of a problem and how a batch of samples is scored by them.

    min_x  mean_k f_k(x, y*(x))   with   y*(x) = argmin_y mean_k g_k(x, y)

    f_k(x, y) = mean_i upper(x, y, row_i),   g_k(x, y) = mean_i lower(x, y, row_i)

`upper` and `lower` take a batch: a pytree whose leaves have one row per sample, and
return the mean over its rows. Terms without data (a regularizer) belong inside.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbilevel._types import Loss, Lower, Noise, Rows, Scalar, Upper

__all__ = ["Batch", "Problem", "lower_loss", "upper_loss"]


class Problem(eqx.Module):
    """Two plain functions of pytrees: `upper(x, y, batch)` and `lower(x, y, batch)`.

    `upper_noise(key, batch)` and `lower_noise(key, batch)` may perturb a drawn batch
    (noisy oracles, augmentation). They see the bundle's key, so that two points of one
    bundle meet the same perturbation; evaluations over all data leave them out.
    """

    upper: Loss = eqx.field(static=True)
    lower: Loss = eqx.field(static=True)
    upper_noise: Noise | None = eqx.field(static=True, default=None)
    lower_noise: Noise | None = eqx.field(static=True, default=None)


class Batch(eqx.Module):
    """Samples, and weights that sum to one where rows may be padding."""

    rows: Rows
    weights: Float[Array, " rows"] | None = None


def _score(loss: Loss, x: Upper, y: Lower, batch: Batch) -> Scalar:
    if batch.weights is None:
        return loss(x, y, batch.rows)

    def score_row(row: Rows) -> Scalar:
        return loss(x, y, jax.tree.map(lambda leaf: leaf[None], row))

    return jnp.vdot(batch.weights, jax.vmap(score_row)(batch.rows))


def upper_loss(problem: Problem, x: Upper, y: Lower, batch: Batch) -> Scalar:
    """Return f on a batch."""
    return _score(problem.upper, x, y, batch)


def lower_loss(problem: Problem, x: Upper, y: Lower, batch: Batch) -> Scalar:
    """Return g on a batch."""
    return _score(problem.lower, x, y, batch)
