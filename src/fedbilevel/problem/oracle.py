r"""One client's view of the problem: the only place that samples and differentiates.

    fx, fy = grad f_k(x, y; xi)          upper_gradients
    gy     = grad_y g_k(x, y; zeta)      lower_gradient
    gx, gy = grad g_k(x, y; zeta)        lower_gradients
    hvp[v] = (d2 g_k / dy dy) v          hessian_product
    jvp[v] = (d2 g_k / dx dy) v          cross_product, shaped like x

A key stands for its sample: the same key drawn at two points is the same batch. Every
call is a named inner `jit`, by which `runtime.counts` finds it in the traced program.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PyTree

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Noise, Rows, Scalar, Upper
from fedbilevel.problem import losses
from fedbilevel.problem.data import Data, part_places
from fedbilevel.problem.losses import Batch, Problem, lower_loss, upper_loss
from fedbilevel.problem.stored_rows import fetched


class Oracle(eqx.Module):
    """A problem bound to one client's samples.

    `upper_batch` and `lower_batch` are rows per draw; None means all rows, without
    noise, so that every oracle is deterministic. With a `radius` the two products are
    central differences of gradients, at the distance radius / ||v||. With a `damping`
    the Hessian product is that of g + damping/2 ||y||^2.
    """

    problem: Problem
    data: Data
    client: Int[Array, ""] | int
    upper_batch: int | None = eqx.field(static=True, default=1)
    lower_batch: int | None = eqx.field(static=True, default=1)
    radius: Float[Array, ""] | None = None
    damping: Float[Array, ""] | None = None

    def draw_upper(self, key: Key) -> Batch:
        """Draw xi: rows uniform and independent over the client's real ones."""
        if self.upper_batch is None:
            return self.all_upper()
        noise = self.problem.upper_noise
        return Batch(_draw_upper(self.data, self.client, key, self.upper_batch, noise))

    def draw_lower(self, key: Key) -> Batch:
        """Draw zeta, likewise."""
        if self.lower_batch is None:
            return self.all_lower()
        noise = self.problem.lower_noise
        return Batch(_draw_lower(self.data, self.client, key, self.lower_batch, noise))

    def all_upper(self) -> Batch:
        """Return all of the client's upper rows, weighted by 1/size."""
        return self.part_upper(0, 1)

    def all_lower(self) -> Batch:
        """Return all of the client's lower rows, weighted by 1/size."""
        return self.part_lower(0, 1)

    def parts(self, most: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return the number of parts of the upper and of the lower rows: `most`.

        There are as many as rows, where those are fewer.
        """
        data = self.data
        sizes = (data.upper_sizes, data.lower_sizes)
        upper, lower = (jnp.max(n[data.owners(n, self.client)[0]]) for n in sizes)
        return jnp.minimum(upper, most), jnp.minimum(lower, most)

    def part_upper(self, part: Int[Array, ""] | int, most: int) -> Batch:
        """Return one part of the upper rows, the same rows every time.

        The mean over the parts, which weigh alike, is that over all rows.
        """
        return Batch(*part_rows("upper", most)(self.data, self.client, part))

    def part_lower(self, part: Int[Array, ""] | int, most: int) -> Batch:
        """Return one part of the lower rows, likewise."""
        return Batch(*part_rows("lower", most)(self.data, self.client, part))

    def upper_loss(self, x: Upper, y: Lower, batch: Batch) -> Scalar:
        """Return f_k on a batch."""
        return losses.over_pieces(upper_loss, self.problem, x, y, batch)

    def lower_loss(self, x: Upper, y: Lower, batch: Batch) -> Scalar:
        """Return g_k on a batch."""
        return losses.over_pieces(lower_loss, self.problem, x, y, batch)

    def upper_gradients(self, x: Upper, y: Lower, batch: Batch) -> tuple[Upper, Lower]:
        """Return (fx, fy)."""
        return _upper_gradients(self.problem, x, y, batch)

    def lower_gradient(self, x: Upper, y: Lower, batch: Batch) -> Lower:
        """Return gy."""
        return _lower_gradient(self.problem, x, y, batch)

    def lower_gradients(self, x: Upper, y: Lower, batch: Batch) -> tuple[Upper, Lower]:
        """Return (gx, gy)."""
        return _lower_gradients(self.problem, x, y, batch)

    def hessian_product(self, x: Upper, y: Lower, v: Lower, batch: Batch) -> Lower:
        """Return (d2 g / dy dy) v, damped where that is asked for."""
        if self.radius is None:
            product = _hessian_product(self.problem, x, y, v, batch)
        else:
            product = self._difference(_lower_gradient, x, y, v, batch)
        if self.damping is None:
            return product
        return _tree.add_scaled(product, self.damping, v)

    def lower_hessian(self, x: Upper, y: Lower, batch: Batch) -> Array | None:
        """Return d2 g / dy dy, where it has a closed form and nothing changes it."""
        if self.radius is not None or self.damping is not None:
            return None
        return losses.lower_hessian(self.problem, x, y, batch)

    def cross_product(self, x: Upper, y: Lower, v: Lower, batch: Batch) -> Upper:
        """Return (d2 g / dx dy) v = d/dx <gy(x, y), v>."""
        if self.radius is None:
            return _cross_product(self.problem, x, y, v, batch)
        return self._difference(_lower_gradient_upper, x, y, v, batch)

    def unrolled_gradient(
        self, x: Upper, y: Lower, upper: Batch, lowers: Batch, step: Scalar
    ) -> Upper:
        """Return d/dx f(x, y^N(x)), y^N being N lower steps from the fixed start y."""
        return _unrolled_gradient(self.problem, x, y, upper, lowers, step)

    def unrolled_derivative(
        self,
        x: Upper,
        y: Lower,
        direction: Upper,
        upper: Batch,
        lowers: Batch,
        step: Scalar,
    ) -> Scalar:
        """Return the derivative of the same along a direction of x, by one tangent."""
        return _unrolled_derivative(self.problem, x, y, direction, upper, lowers, step)

    def _difference(self, gradient: Any, x: Upper, y: Lower, v: Lower, batch: Batch):
        size = _tree.norm(v)
        # v = 0 has the product 0 at every distance; any finite one avoids 0/0.
        distance = jnp.asarray(self.radius, size.dtype) / jnp.where(size > 0, size, 1)

        # Both places in one loop: the gradient is compiled once.
        def side(sum_: PyTree, sign: Array) -> tuple[PyTree, None]:
            at = _tree.add_scaled(y, sign * distance, v)
            slope = gradient(self.problem, x, at, batch)
            return _tree.add_scaled(sum_, sign, slope), None

        like = x if gradient is _lower_gradient_upper else y
        signs = jnp.asarray([1, -1], distance.dtype)
        difference, _ = jax.lax.scan(side, _tree.zeros_like(like), signs)
        return _tree.scale(1 / (2 * distance), difference)


def _drawing(level: str) -> Callable[..., Rows]:
    def draw(data: Data, client: Any, key: Key, count: int, noise: Noise | None):
        choose, perturb = (key, key) if noise is None else jr.split(key)
        rows, sizes = getattr(data, level), getattr(data, f"{level}_sizes")
        places = data.drawn(sizes, client, choose, count)
        drawn = fetched(jax.tree.map(lambda leaf: leaf[places], rows))
        return drawn if noise is None else noise(perturb, drawn)

    draw.__name__ = f"_draw_{level}"
    return jax.jit(draw, static_argnums=(3, 4))


_draw_upper, _draw_lower = _drawing("upper"), _drawing("lower")


@cache
def part_rows(level: str, most: int) -> Callable[..., tuple[Rows, Array]]:
    """Return what reads one of `most` parts: all rows, if that is 1.

    The name says of which level, and how many there are.
    """

    def read(data: Data, client: Any, part: Any) -> tuple[Rows, Array]:
        rows, sizes = getattr(data, level), getattr(data, f"{level}_sizes")
        width = jax.tree.leaves(rows)[0].shape[1]
        places, weights = part_places(data, sizes, client, width, part, most)

        def flat(leaf: Array) -> Array:
            return leaf[places].reshape(-1, *leaf.shape[2:])

        return fetched(jax.tree.map(flat, rows)), weights.reshape(-1)

    read.__name__ = f"_part_{level}_{most}"
    return jax.jit(read)


def _gradient_of(name: str, loss: Callable, argnums: Any) -> Callable[..., Any]:
    def gradient(problem: Problem, x: Upper, y: Lower, batch: Batch):
        return losses.over_pieces(jax.grad(loss, argnums), problem, x, y, batch)

    gradient.__name__ = name
    return jax.jit(gradient)


_upper_gradients = _gradient_of("_upper_gradients", upper_loss, (1, 2))
_lower_gradient = _gradient_of("_lower_gradient", lower_loss, 2)
_lower_gradients = _gradient_of("_lower_gradients", lower_loss, (1, 2))
_lower_gradient_upper = _gradient_of("_lower_gradient_upper", lower_loss, 1)


def _product_of(name: str, argnum: int) -> Callable[..., Any]:
    # Forward over reverse: the derivative of gx along v is (d2 g / dx dy) v.
    slope = jax.grad(lower_loss, argnum)

    def product(problem: Problem, x: Upper, y: Lower, v: Lower, batch: Batch):
        def gradient(at: Lower) -> Any:
            return losses.over_pieces(slope, problem, x, at, batch)

        return jax.jvp(gradient, (y,), (v,))[1]

    product.__name__ = name
    return jax.jit(product)


_hessian_product = _product_of("_hessian_product", 2)
_cross_product = _product_of("_cross_product", 1)


@jax.jit
def _unrolled_gradient(
    problem: Problem, x: Upper, y: Lower, upper: Batch, lowers: Batch, step: Scalar
):
    return jax.grad(_unrolled_loss, argnums=1)(problem, x, y, upper, lowers, step)


@jax.jit
def _unrolled_derivative(problem, x, y, direction, upper, lowers, step):
    def outer(at: Upper) -> Scalar:
        return _unrolled_loss(problem, at, y, upper, lowers, step)

    return jax.jvp(outer, (x,), (direction,))[1]


def _unrolled_loss(
    problem: Problem, x: Upper, y: Lower, upper: Batch, lowers: Batch, step: Scalar
) -> Scalar:
    def descend(current: Lower, batch: Batch):
        slope = jax.grad(lower_loss, argnums=2)(problem, x, current, batch)
        return _tree.add_scaled(current, -step, slope), None

    last, _ = jax.lax.scan(descend, y, lowers)
    return upper_loss(problem, x, last, upper)
