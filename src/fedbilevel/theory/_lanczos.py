r"""Extreme eigenvalues of a symmetric map that is known by its products only.

    V = [v_1 .. v_m] orthonormal, v_{j+1} = H v_j less its part along v_1 .. v_j
    low, high = extreme eigenvalues of V'HV,   residual = ||H V s - value V s||

Both lie inside the spectrum, and at m = dimension they are its ends. Some eigenvalue
is nearer to either than the residual.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbilevel._types import Scalar

STEPS = 40


class Extremes(eqx.Module):
    """The ends of a spectrum, and how far each is from being an eigenvalue."""

    low: Scalar
    high: Scalar
    low_residual: Scalar
    high_residual: Scalar

    def norm(self) -> tuple[Scalar, Scalar]:
        """Return the larger magnitude of the two ends, and its residual."""
        upper = self.high >= -self.low
        residual = jnp.where(upper, self.high_residual, self.low_residual)
        return jnp.maximum(self.high, -self.low), residual


def unit(v: Array) -> Array:
    """Return v / ||v||, and zero for zero."""
    size = jnp.linalg.norm(v)
    return v / jnp.where(size == 0, 1, size)


def _remove(basis: Float[Array, "m n"], v: Float[Array, " n"]) -> Array:
    return v - (basis @ v) @ basis


def extremes(
    product: Callable[[Array], Array], directions: Float[Array, "m n"]
) -> Extremes:
    """Run Lanczos with full reorthogonalization, one step per random direction.

    The first direction is the start; the others continue from a subspace that the map
    does not leave, as the zero map and the identity never do.
    """
    count = directions.shape[0]
    # Smaller values come from rounding, or add only their square to the ends.
    negligible = float(jnp.finfo(directions.dtype).eps) ** 0.5

    def step(carry: tuple[Array, Array], now: tuple[Array, Array]):
        basis, image = carry
        j, direction = now
        ahead = _remove(basis, image)
        spent = jnp.linalg.norm(ahead) <= negligible * jnp.linalg.norm(image)
        v = unit(jnp.where(spent, direction, ahead))
        # Again, as rounding leaves a part along the basis; twice is enough for any v.
        v = unit(_remove(basis, _remove(basis, v)))
        image = product(v)
        return (basis.at[j].set(v), image), image

    start = (jnp.zeros_like(directions), jnp.zeros_like(directions[0]))
    (basis, _), images = jax.lax.scan(step, start, (jnp.arange(count), directions))
    small = basis @ images.T
    values, vectors = jnp.linalg.eigh((small + small.T) / 2)
    ends = jnp.stack([values[0], values[-1]])
    weights = jnp.stack([vectors[:, 0], vectors[:, -1]])
    off = weights @ images - ends[:, None] * (weights @ basis)
    residuals = jnp.linalg.norm(off, axis=1)
    return Extremes(ends[0], ends[1], residuals[0], residuals[1])
