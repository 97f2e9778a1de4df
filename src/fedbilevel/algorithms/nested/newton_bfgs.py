r"""NewtonBFGS: Newton's method below by summed Hessians, BFGS above; both exact.

One exchange a round. At the point (x, y, z) that the server sends, every client returns
f, g, fy, gy, hvp as a matrix H (its lower triangle), and h = fx - jvp[z], over all of
its rows. With the means of these over all clients,

    until y = y*(x):   y -= H^-1 gy,   z = H^-1 fy            (Newton, IRLS)
    then  F = f - <fy, H^-1 gy>,   h = dF/dx:
        if F <= F_a + 1e-4 t <h_a, d>:  x_a = x,  B by BFGS,  d = -B h,  t = 1
        else t is that of the parabola through F_a, <h_a, d>, F
        x = x_a + t d

    s = x - x_a,  q = h - h_a,  V = I - s q^T / <s, q>
    B = V B V^T + s s^T / <s, q>

y counts as y*(x) if the decrement <gy, H^-1 gy> is 1 % of the expected descent of F and
z is H^-1 fy to 3 %. F is corrected for the rest to first order, so its error is of
second order. From a y at which g is larger than before, y returns halfway. H is damped
only where it is not positive definite. The first d moves no entry of x by more than
`first_step`, the others by three times that. If <h, B h> <= tolerance F, x stays, two
more Newton steps make y exact to rounding, and the run ends. If `exchanges` were not
enough, it ends so at x_a. The method is unbiased for any clients and deterministic, and
has no step to choose. It needs sums only, which are those of pooled rows.

Where `Problem(separate=True)` says that g is a sum over the first axis of y, over the
folds of a cross-validation for example, H is a block for each, of D parameters.

Floats a client and round: up dx + 2 dy + 2, and D (D + 1)/2 for each block; down
dx + 2 dy.

References: the lower level is distributed IRLS (Wolfson et al. 2010, DataSHIELD,
doi 10.1093/ije/dyq111; Wu et al. 2012, GLORE, doi 10.1136/amiajnl-2012-000862). B is
the inverse update of Nocedal, Wright 2006, (6.17), t that of their (3.57). z is by the
implicit function theorem, as in every method here.
Deviations: none published joins them, as far as is known.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Pair, Scalar
from fedbilevel.algorithms.base import AbstractAlgorithm, Phase, Pointed, Turn
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import count, number

__all__ = ["NewtonBFGS"]

_SOLVED, _SHARE = 1e-6, 0.01  # decrement of g: of F, and of the expected descent of F
_NEAR = 1e-3  # squared relative error of z
_NEWTON = 20  # steps of y at one x, at most
_POLISH = 2  # more of them at the last x
_SHORTEST = 1e-6  # of a step of x
_FARTHEST = 3.0  # first steps that an entry of x moves at once
_UNKNOWN = 2.0**100  # a value that nothing has; a server's state is finite
_AT_ONCE = 2**20  # numbers in the products of rows with columns of H
_LARGEST = 2000  # parameters in a block


class Sums(eqx.Module):
    """The clients' answers: both losses, fy, gy, h, and H, packed, by blocks."""

    upper: Scalar
    lower: Scalar
    fy: Lower
    gy: Lower
    h: Any
    hessian: Float[Array, "blocks packed"]


class Search(Pointed):
    """The server's state: the accepted point, the trial, and the search along x.

    `value`, `h`, `inverse` are F, its gradient and B at the accepted point; the trial
    is `length` along the direction from there. `before` is the y before the trial's,
    and `lowest` the g there. `spent` counts exchanges, `solves` Newton steps at a
    trial, `updates` those of B, and `left` the Newton steps until the end.
    """

    point: Pair
    trial: Pair
    z: Lower
    before: Lower
    lowest: Scalar
    value: Scalar
    h: Float[Array, " dx"]
    inverse: Float[Array, "dx dx"]
    direction: Float[Array, " dx"]
    length: Scalar
    spent: Int[Array, ""]
    solves: Int[Array, ""]
    updates: Int[Array, ""]
    left: Int[Array, ""]


class NewtonBFGS(AbstractAlgorithm):
    """Newton below by summed Hessians, BFGS above: the answer of pooled rows."""

    reference = "Wolfson et al. 2010, doi 10.1093/ije/dyq111; BFGS"
    provenance = "two standard methods, joined here"
    allows_private = False
    finishes = True
    bears_noise = False
    sends_hessian = True

    tolerance: Number = number(
        "ends where <h, B h> is so much of the upper loss", default=1e-4, above=0.0
    )
    first_step: Number = number(
        "no entry of x moves more in the first step", default=1.0, above=0.0
    )

    exchanges: int = count("exchanges after which x stays", default=57)

    def init_server(self, x, y):
        """Start the first trial at (x, y)."""
        flat, size = ravel_pytree(x)[0], sum(leaf.size for leaf in jax.tree.leaves(x))
        zero, none = _tree.zeros_like(y), jnp.zeros((), jnp.int32)
        far, one = jnp.full((), _UNKNOWN, flat.dtype), jnp.ones((), flat.dtype)
        slope, eye = jnp.zeros_like(flat), jnp.eye(size, dtype=flat.dtype)
        counts = (none, none, none, none - 1)
        start = (Pair(x, y), Pair(x, y), zero, y, far, far)
        return Search(*start, slope, eye, slope, one, *counts)

    def phases(self):
        """Return the one exchange of a round, in which all clients take part."""
        down = lambda server: (server.trial, server.z)  # noqa: E731
        return (Phase("sums", down, local_sums, self.taken_in, everyone=True),)

    def finished(self, server):
        """Say whether the tolerance is reached and y is exact."""
        return server.left == 0

    def taken_in(self, server: Search, sums: Sums) -> Search:
        """Take a Newton step of y, or one of x if y is solved."""
        slack = 10 * jnp.finfo(sums.lower.dtype).eps * jnp.abs(sums.lower)
        rose = ~(sums.lower <= server.lowest + slack) & (server.solves < _NEWTON)
        half = _tree.scale(0.5, _tree.add(server.trial.y, server.before))
        trial = Pair(server.trial.x, half)
        halved = replace(server, trial=trial, solves=server.solves + 1)
        after = _tree.select(rose, halved, self._newton(server, sums))
        after = replace(after, spent=server.spent + 1)
        known = (after.left < 0) & (after.value != _UNKNOWN)
        most = jnp.full_like(after.lowest, _UNKNOWN)
        left = jnp.full_like(after.left, _POLISH)
        back = replace(after, trial=after.point, lowest=most, left=left)
        return _tree.select(known & (after.spent >= self.exchanges), back, after)

    def _newton(self, server: Search, sums: Sums) -> Search:
        """Return the state after a Newton step, which may have solved for y."""
        by_inverse = Inverse(sums.hessian)
        (step, decrement), (z, size) = by_inverse(sums.gy), by_inverse(sums.fy)
        apart = by_inverse.product(_tree.subtract(z, server.z))
        expected = -server.length * jnp.vdot(server.h, server.direction)
        enough = jnp.maximum(_SOLVED * jnp.abs(sums.upper), _SHARE * expected)
        solved = (decrement <= enough) & (apart <= _NEAR * size)
        first = server.value == _UNKNOWN
        trial = Pair(server.trial.x, _tree.add_scaled(server.trial.y, -1, step))
        again = replace(
            server,
            # As long as none is accepted, the trial is the best that is known.
            point=_tree.select(first, trial, server.point),
            trial=trial,
            z=z,
            before=server.trial.y,
            lowest=sums.lower,
            solves=server.solves + 1,
        )
        most = jnp.full_like(server.lowest, _UNKNOWN)
        here = replace(again, solves=jnp.zeros_like(server.solves), lowest=most)
        value = sums.upper - _tree.dot(sums.fy, step)
        # A y that cannot be solved for is no place to go to, but there is no other one
        # at the start.
        value = jnp.where(solved | first, value, jnp.inf)
        moved = self._moved(here, value, ravel_pytree(sums.h)[0])
        searching = _tree.select(solved | (server.solves >= _NEWTON), moved, again)
        left = jnp.maximum(server.left - 1, 0)
        polished = replace(here, point=again.trial, left=left)
        return _tree.select(server.left >= 0, polished, searching)

    def _moved(self, server: Search, value: Array, h: Array) -> Search:
        """Accept the trial where F fell enough, else try a shorter step."""
        slope = server.length * jnp.vdot(server.h, server.direction)
        enough = value <= server.value + 1e-4 * slope
        return _tree.select(
            enough, self._accepted(server, value, h), _shorter(server, value)
        )

    def _accepted(self, server: Search, value: Array, h: Array) -> Search:
        """Move the point to the trial, and look for the next one from there."""
        x, unravel = ravel_pytree(server.trial.x)
        s, q = x - ravel_pytree(server.point.x)[0], h - server.h
        first = server.value == _UNKNOWN
        largest = jnp.max(jnp.abs(h))
        plain = self.first_step / jnp.where(largest > 0, largest, 1)
        eye = jnp.eye(x.size, dtype=x.dtype)
        inverse = _updated(server.inverse, s, q, server.updates == 0)
        inverse = jnp.where(first, plain * eye, inverse)
        direction = -inverse @ h
        uphill = ~(jnp.vdot(direction, h) < 0)
        inverse = jnp.where(uphill, plain * eye, inverse)
        direction = jnp.where(uphill, -plain * h, direction)
        farthest = jnp.maximum(jnp.max(jnp.abs(direction)), 1e-30)
        most = _FARTHEST * self.first_step / farthest
        ends = -jnp.vdot(direction, h) <= self.tolerance * jnp.abs(value)
        direction = jnp.minimum(most, 1) * direction
        at = unravel(jnp.where(ends, x, x + direction))
        return replace(
            server,
            point=server.trial,
            trial=Pair(at, server.trial.y),
            value=value,
            h=h,
            inverse=inverse,
            direction=direction,
            length=jnp.ones_like(server.length),
            updates=jnp.where(first, 0, server.updates + 1),
            left=jnp.where(ends, _POLISH, server.left),
        )


def _updated(B: Array, s: Array, q: Array, first: Bool[Array, ""]) -> Array:
    """Return B after BFGS's update, or twice as much where F does not curve up."""
    curves = jnp.vdot(s, q)
    sound = curves > 1e-10 * jnp.linalg.norm(s) * jnp.linalg.norm(q)
    safe = jnp.where(sound, curves, 1)
    scaled = safe / jnp.where(sound, jnp.vdot(q, q), 1) * jnp.eye(s.size, dtype=s.dtype)
    B = jnp.where(sound & first, scaled, B)
    V = jnp.eye(s.size, dtype=s.dtype) - jnp.outer(s, q) / safe
    return jnp.where(sound, V @ B @ V.T + jnp.outer(s, s) / safe, 2 * B)


def _shorter(server: Search, value: Array) -> Search:
    """Return to the accepted point, and try a shorter step from there."""
    x, unravel = ravel_pytree(server.point.x)
    t, slope = server.length, jnp.vdot(server.h, server.direction)
    bend = 2 * (value - server.value - slope * t)
    share = jnp.clip(-slope * t / jnp.where(bend > 0, bend, 1), 0.1, 0.5)
    share = jnp.where(jnp.isfinite(value), share, 0.1)
    ends = share * t < _SHORTEST
    at = unravel(jnp.where(ends, x, x + share * t * server.direction))
    y = jax.tree.map(
        lambda a, b: jnp.where(jnp.isfinite(b), a + share * (b - a), a),
        server.point.y,
        server.trial.y,
    )
    y = _tree.select(ends, server.point.y, y)
    left = jnp.where(ends, _POLISH, server.left)
    return replace(server, trial=Pair(at, y), length=share * t, left=left)


def local_sums(message: Any, client: Any, oracle: Oracle, turn: Turn):
    """Return a client's sums over all of its rows."""
    (x, y), z = (message[0].x, message[0].y), message[1]
    xi, zeta = oracle.part_upper(0, 1), oracle.part_lower(0, 1)
    fx, fy = oracle.upper_gradients(x, y, xi)
    return client, Sums(
        oracle.upper_loss(x, y, xi),
        oracle.lower_loss(x, y, zeta),
        fy,
        oracle.lower_gradient(x, y, zeta),
        _tree.subtract(fx, oracle.cross_product(x, y, z, zeta)),
        packed_hessian(oracle, message[0], zeta),
    )


def packed_hessian(oracle: Oracle, point: Pair, zeta: Batch) -> Array:
    """Return the lower triangles of H, row by row, one for each block."""
    blocks = jax.tree.leaves(point.y)[0].shape[0] if oracle.problem.separate else 1
    _, size = (flat := _as_matrix(point.y, blocks)).shape
    if size > _LARGEST:
        raise InvalidInputError(
            f"`NewtonBFGS` sends the Hessian of y: of {size:,} parameters that is "
            f"{size * (size + 1) // 2:,} numbers. It is for {_LARGEST:,} parameters at "
            "most. Use a method of one loop, such as FedBiOControls."
        )

    matrix = oracle.lower_hessian(point.x, point.y, zeta)
    if matrix is None:
        matrix = _by_products(oracle, point, zeta, flat)
    down, across = np.tril_indices(size)
    return matrix[:, down, across]


def _by_products(oracle: Oracle, point: Pair, zeta: Batch, flat: Array) -> Array:
    """Return the blocks of H, column by column."""
    blocks, size = flat.shape

    def column(place: Array) -> Array:
        along = jnp.zeros_like(flat).at[:, place].set(1)
        v = _like(point.y, along)
        return _as_matrix(oracle.hessian_product(point.x, point.y, v, zeta), blocks)

    rows = jax.tree.leaves(zeta.rows)[0].shape[0]
    some = min(size, max(1, _AT_ONCE // (rows * blocks)))
    columns = jax.lax.map(column, jnp.arange(size, dtype=jnp.int32), batch_size=some)
    return jnp.transpose(columns, (1, 2, 0))


class Inverse:
    """H^-1, from its packed lower triangles, damped until it is positive definite."""

    def __init__(self, packed: Array) -> None:
        size = int((2 * packed.shape[1] + 0.25) ** 0.5 - 0.5)
        # Entry (i, j) of a lower triangle is number i (i + 1)/2 + j, row by row.
        place = jnp.arange(size, dtype=jnp.int32)
        down = jnp.maximum(place[:, None], place)
        across = jnp.minimum(place[:, None], place)
        self.matrix = packed[:, down * (down + 1) // 2 + across]
        scale = jnp.mean(jnp.abs(jax.vmap(jnp.diag)(self.matrix)))
        least = 10 * jnp.finfo(packed.dtype).eps * scale
        eye = jnp.eye(size, dtype=packed.dtype)

        def factor(damping: Array) -> Array:
            return jnp.linalg.cholesky(self.matrix + damping * eye)

        def fails(now: tuple[Array, Array]) -> Array:
            return ~jnp.all(jnp.isfinite(now[1])) & (now[0] < 1e6 * scale)

        def more(now: tuple[Array, Array]) -> tuple[Array, Array]:
            return 10 * now[0], factor(10 * now[0])

        _, self.root = jax.lax.while_loop(fails, more, (least, factor(least)))

    def __call__(self, b: Lower) -> tuple[Lower, Scalar]:
        """Return H^-1 b and <b, H^-1 b>."""
        flat = _as_matrix(b, len(self.root))
        solved = jax.vmap(lambda L, v: jax.scipy.linalg.cho_solve((L, True), v))(
            self.root, flat
        )
        return _like(b, solved), jnp.vdot(flat, solved)

    def product(self, v: Lower) -> Scalar:
        """Return <v, H v>."""
        flat = _as_matrix(v, len(self.root))
        return jnp.einsum("bi,bij,bj->", flat, self.matrix, flat)


def _as_matrix(y: Lower, blocks: int) -> Float[Array, "blocks size"]:
    return jnp.concatenate(
        [leaf.reshape(blocks, -1) for leaf in jax.tree.leaves(y)], axis=1
    )


def _like(y: Lower, flat: Float[Array, "blocks size"]) -> Lower:
    block = jax.tree.map(lambda leaf: leaf.reshape(len(flat), -1)[0], y)
    blocks = jax.vmap(ravel_pytree(block)[1])(flat)
    return jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), blocks, y)
