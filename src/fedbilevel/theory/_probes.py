r"""The compiled measurements behind `estimation`, on flat vectors w = (x, y).

Extreme eigenvalues of a symmetric map that is known by its products only:

    V = [v_1 .. v_m] orthonormal, v_{j+1} = H v_j less its part along v_1 .. v_j
    low, high = extreme eigenvalues of V'HV,   residual = ||H V s - value V s||

Both lie inside the spectrum, and at m = dimension they are its ends. Some eigenvalue
is nearer to either than the residual.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from fedbilevel._types import Key, Pair, Scalar
from fedbilevel.problem import Batch, ClientData, Oracle, Problem

STEPS = 40
# Norms of differences need only the largest eigenvalue, and it only roughly.
_FEW_STEPS = 12
_CLIMBS, _SWEEPS = 4, 16


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

    The first direction is the start. The others continue if the map does not leave a
    subspace, as with the zero map and the identity.
    """
    count = directions.shape[0]
    # Smaller numbers came from rounding, or add their square only to the ends.
    negligible = float(jnp.finfo(directions.dtype).eps) ** 0.5

    def step(carry: tuple[Array, Array], now: tuple[Array, Array]):
        basis, image = carry
        j, direction = now
        ahead = _remove(basis, image)
        spent = jnp.linalg.norm(ahead) <= negligible * jnp.linalg.norm(image)
        v = unit(jnp.where(spent, direction, ahead))
        # Again, as rounding leaves a part along the basis. Twice is enough for any v.
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


def draw_directions(point: Pair, key: Key) -> Float[Array, "m n"]:
    """Draw what all spectra and climbs start from, in the space of (x, y)."""
    w = ravel_pytree((point.x, point.y))[0]
    return jr.normal(key, (min(STEPS, w.size) + 2 * _CLIMBS, w.size), w.dtype)


class _Place(eqx.Module):
    """A point as one vector, with its inverse map, and random directions there."""

    w: Float[Array, " n"]
    restore: Callable[[Array], tuple[Any, Any]]
    dx: int
    directions: Float[Array, "m n"]
    starts: Float[Array, "climbs 2 n"]

    @staticmethod
    def of(point: Pair, directions: Array) -> "_Place":
        w, restore = ravel_pytree((point.x, point.y))
        starts = directions[-2 * _CLIMBS :].reshape(_CLIMBS, 2, w.size)
        dx = ravel_pytree(point.x)[0].size
        return _Place(w, restore, dx, directions[: -2 * _CLIMBS], starts)

    @property
    def in_x(self) -> Bool[Array, " n"]:
        return jnp.arange(self.w.size) < self.dx

    def upper(self, oracle: Oracle, batch: Batch) -> Callable[[Array], Scalar]:
        return lambda w: oracle.upper_loss(*self.restore(w), batch)

    def lower(self, oracle: Oracle, batch: Batch) -> Callable[[Array], Scalar]:
        return lambda w: oracle.lower_loss(*self.restore(w), batch)

    def block_norm(
        self, product: Callable[[Array], Array], rows: Array, columns: Array
    ) -> Scalar:
        """Return the norm of a masked block B of a symmetric map, from B'B."""

        def square(v: Array) -> Array:
            there = jnp.where(rows, product(jnp.where(columns, v, 0)), 0)
            return jnp.where(columns, product(there), 0)

        largest = extremes(square, self.directions[:_FEW_STEPS]).high
        # Rounding may put the zero block just below zero.
        return jnp.sqrt(jnp.maximum(largest, 0))


def _hessian(loss: Callable[[Array], Scalar], w: Array) -> Callable[[Array], Array]:
    # Linearized once: the many products of one Hessian share what depends on w.
    return jax.linearize(jax.grad(loss), w)[1]


def _steepness(loss: Callable[[Array], Scalar], place: _Place) -> Array:
    """Return the largest third derivatives of (cross, yy) Hessians that are found.

    D3 [d, v, u] is linear in each unit vector: the best of one for the others is known,
    so they take turns. Every turn increases it, up to a local maximum. So there are
    several starts.
    """
    in_y = ~place.in_x

    def third(a: Array, b: Array) -> Array:
        def along(w: Array) -> Array:
            return jax.jvp(jax.grad(loss), (w,), (a,))[1]

        return jax.jvp(along, (place.w,), (b,))[1]

    def climb(mask: Array, start: Array) -> Scalar:
        def turn(carry: tuple[Array, Array], _: None):
            u, v = carry
            d = unit(third(u, v))
            u = unit(jnp.where(mask, third(d, v), 0))
            slope = jnp.where(in_y, third(d, u), 0)
            return (u, unit(slope)), jnp.linalg.norm(slope)

        first = (unit(jnp.where(mask, start[0], 0)), unit(jnp.where(in_y, start[1], 0)))
        return jax.lax.scan(turn, first, None, length=_SWEEPS)[1][-1]

    masks = jnp.stack([place.in_x, in_y])
    every = jax.vmap(jax.vmap(climb, (None, 0)), (0, None))(masks, place.starts)
    return jnp.max(every, axis=1)


def _curvatures(oracle: Oracle, place: _Place, upper: Batch, lower: Batch):
    w, in_y = place.w, ~place.in_x
    of_f, of_g = place.upper(oracle, upper), place.lower(oracle, lower)
    hessian = _hessian(of_g, w)
    start = unit(jnp.where(in_y, place.directions[0], 0))
    inside = jnp.vdot(start, hessian(start))

    def lower_block(v: Array) -> Array:
        # On x the block is a number between the ends of its spectrum, which stay.
        return jnp.where(in_y, hessian(jnp.where(in_y, v, 0)), inside * v)

    products = (_hessian(of_f, w), hessian, lower_block)

    def spectrum(case: Array) -> Extremes:
        # One program for all three: it takes longer to compile than to run.
        return extremes(lambda v: jax.lax.switch(case, products, v), place.directions)

    found = jax.lax.map(spectrum, jnp.arange(len(products)))
    norms, residuals = found.norm()
    l21, l22 = _steepness(of_g, place)
    return {
        "mu": found.low[2],
        # With the block, whose norm is no larger: rounding must not put L1 below mu.
        "L1": jnp.max(norms),
        "L0": jnp.linalg.norm(jax.grad(of_f)(w)),
        "L21": l21,
        "L22": l22,
        "mu residual": found.low_residual[2],
        "L1 residual": jnp.max(residuals),
    }


@eqx.filter_jit
def at_point(
    problem: Problem,
    data: ClientData,
    point: Pair,
    directions: Float[Array, "m n"],
    key: Key,
    upper_batch: int | None,
    lower_batch: int | None,
    samples: int,
) -> dict[str, Any]:
    """Measure at one point: per client over `all` rows, and per drawn batch."""
    place = _Place.of(point, directions)

    def of_client(client: Array):
        own = Oracle(problem, data, client, upper_batch, lower_batch)
        whole = _curvatures(own, place, own.all_upper(), own.all_lower())
        slope = jax.grad(place.lower(own, own.all_lower()))(place.w)[place.dx :]
        if upper_batch is None and lower_batch is None:
            # Every draw is the whole again.
            drawn = jax.tree.map(lambda leaf: leaf[None], whole)
            return whole, drawn, (jnp.zeros(()),) * 2, slope

        def of_sample(drawn: Key):
            for_upper, for_lower = jr.split(drawn)
            upper, lower = own.draw_upper(for_upper), own.draw_lower(for_lower)
            return _curvatures(own, place, upper, lower), _noise(own, place, lower)

        keys = jr.split(jr.fold_in(key, client), samples)
        drawn, squares = jax.lax.map(of_sample, keys)
        return whole, drawn, tuple(jnp.sqrt(jnp.mean(one)) for one in squares), slope

    whole, drawn, noise, slopes = jax.lax.map(of_client, jnp.arange(data.clients))
    share = (data.weights / jnp.sum(data.weights)).astype(slopes.dtype)
    off = slopes - share @ slopes
    return {
        "all": whole,
        "drawn": drawn,
        "noise_gradient": noise[0],
        "noise_hessian": noise[1],
        "heterogeneity_gradient": jnp.sqrt(share @ jnp.sum(off**2, axis=1)),
        "heterogeneity_hessian": _disagreement(problem, data, place),
    }


def _noise(own: Oracle, place: _Place, lower: Batch) -> tuple[Scalar, Scalar]:
    """Return by how much a batch is off, squared: all of grad g, and its Hessian.

    Of the Hessian it is the columns in y, which hold the yy-block and the cross block:
    nothing else of it enters a hypergradient.
    """
    drawn, every = place.lower(own, lower), place.lower(own, own.all_lower())
    off = jax.grad(drawn)(place.w) - jax.grad(every)(place.w)
    this, mean = _hessian(drawn, place.w), _hessian(every, place.w)
    anywhere = jnp.ones_like(place.in_x)
    size = place.block_norm(lambda v: this(v) - mean(v), anywhere, ~place.in_x)
    return jnp.vdot(off, off), size**2


def _disagreement(problem: Problem, data: ClientData, place: _Place) -> Array:
    in_y = ~place.in_x

    def product_of(oracle: Oracle) -> Callable[[Array], Array]:
        return _hessian(place.lower(oracle, oracle.all_lower()), place.w)

    mean = product_of(Oracle(problem, data.pooled(), 0))

    def of_client(client: Array) -> Scalar:
        own = product_of(Oracle(problem, data, client))
        return place.block_norm(lambda v: own(v) - mean(v), in_y, in_y)

    return jax.lax.map(of_client, jnp.arange(data.clients))


@eqx.filter_jit
def between(
    problem: Problem, data: ClientData, start: Pair, end: Pair, directions: Array
) -> dict[str, Float[Array, " clients"]]:
    """Return what the cross and yy-Hessians change between two points, per distance."""
    place, other = _Place.of(start, directions), ravel_pytree((end.x, end.y))[0]
    distance = jnp.linalg.norm(other - place.w)
    masks = jnp.stack([place.in_x, ~place.in_x])

    def of_client(client: Array) -> Array:
        oracle = Oracle(problem, data, client)
        loss = place.lower(oracle, oracle.all_lower())
        here, there = _hessian(loss, place.w), _hessian(loss, other)

        def change(mask: Array) -> Scalar:
            return place.block_norm(lambda v: there(v) - here(v), mask, masks[1])

        return jax.lax.map(change, masks)

    changes = jax.lax.map(of_client, jnp.arange(data.clients))
    # A run that stands still changes nothing, over no distance.
    rates = changes / jnp.where(distance == 0, 1, distance)
    return {"L21": rates[:, 0], "L22": rates[:, 1]}
