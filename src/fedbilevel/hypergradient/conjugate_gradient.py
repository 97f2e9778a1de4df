r"""Conjugate gradient on the frozen system (H + damping I) z = fy.

    r = fy, d = r, z = 0;  repeat `steps` times:
        a = <r, r> / <d, H d>;  z += a d;  r+ = r - a H d;  d = r+ + (<r+, r+>/<r, r>) d

One batch for all products. The error falls linearly; run to the dimension it is zero.
With a `tolerance` the solve rests where ||r|| <= tolerance ||fy||. Derivatives of the
estimate are those of the solution, by one more solve, and not those of the steps.

`Exact` is the dense solve, for small problems and as the yardstick of all other
estimators: no bias beyond the samples; with all rows and y = y*(x) it is grad Phi_k(x).
"""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Upper
from fedbilevel.hypergradient._base import Frozen
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number

T = TypeVar("T")
AT_MOST = "_at_most_"  # and the number: the name of a loop that may end earlier
_SPENT = 1e-10  # of the first squared residual


def solve(
    product: Callable[[Lower], Lower], b: Lower, steps: int, tolerance: float = 0.0
) -> Lower:
    """Return z with product(z) = b, after so many steps from zero, or fewer.

    Steps that come near 0/0 once they have converged have no usable derivative.
    """

    def by_steps(product: Callable[[Lower], Lower], b: Lower) -> Lower:
        return solve_if_convex(product, b, steps, tolerance)[0]

    return jax.lax.custom_linear_solve(product, b, by_steps, symmetric=True)


def solve_if_convex(
    product: Callable[[Lower], Lower], b: Lower, steps: int, tolerance: float = 0.0
) -> tuple[Lower, Bool[Array, ""]]:
    """Return also whether every direction of the solve curved upwards.

    The steps are those of Lanczos: a map with a negative eigenvalue that b can see soon
    shows a direction along which it curves downwards.
    """
    first = _tree.dot(b, b)

    def step(carry):
        z, r, d, square, convex = carry
        along = product(d)
        curvature = _tree.dot(d, along)
        # Residuals after convergence are rounding, and mean nothing.
        convex &= (curvature > 0) | (square <= _SPENT * first)
        # After convergence r = d = 0: then 0/0 must read as "stay".
        a = jnp.where(curvature > 0, square / jnp.where(curvature > 0, curvature, 1), 0)
        z, r = _tree.add_scaled(z, a, d), _tree.add_scaled(r, -a, along)
        fresh = _tree.dot(r, r)
        turn = jnp.where(square > 0, fresh / jnp.where(square > 0, square, 1), 0)
        return (z, r, _tree.add_scaled(r, turn, d), fresh, convex)

    def is_far(carry):
        # A residual that is no number is far, too, so that z is none either.
        return ~(carry[3] <= tolerance**2 * first)

    start = (_tree.zeros_like(b), b, b, first, jnp.asarray(True))
    if tolerance:
        z, *_, convex = at_most(steps, is_far, step, start)
    else:
        every = jax.lax.scan(lambda carry, _: (step(carry), None), start, length=steps)
        z, *_, convex = every[0]
    return z, convex


def at_most(
    steps: int, goes_on: Callable[[T], Array], step: Callable[[T], T], start: T
) -> T:
    """Repeat a step while `goes_on` says so, and so many times at most."""

    def limited(start: T) -> T:
        def more(carry: tuple[Array, T]) -> Array:
            return (carry[0] < steps) & goes_on(carry[1])

        def once(carry: tuple[Array, T]) -> tuple[Array, T]:
            return carry[0] + 1, step(carry[1])

        return jax.lax.while_loop(more, once, (jnp.zeros((), jnp.int32), start))[1]

    # By its name the loop is counted, whose length a traced program does not show.
    limited.__name__ = f"{AT_MOST}{steps}"
    return jax.jit(limited)(start)


def newton_step(oracle: Oracle, x: Upper, y: Lower, steps: int) -> Lower:
    """Return y after one Newton step on g over all rows, solved by so many steps."""
    rows = oracle.all_lower()
    slope = oracle.lower_gradient(x, y, rows)
    descent = solve(lambda d: oracle.hessian_product(x, y, d, rows), slope, steps)
    return _tree.subtract(y, descent)


class ConjugateGradient(Frozen):
    """Solve with so many conjugate-gradient steps, or until a tolerance is met."""

    steps: int = count("conjugate-gradient steps of a solve, at most")
    damping: Number = number("added to the Hessian's diagonal", default=0.0)
    tolerance: float = eqx.field(
        static=True,
        default=0.0,
        metadata={
            "meaning": "relative residual that ends a solve; 0 takes all steps",
            "least": 0,
            "below": 1,
        },
    )

    def solved(self, product: Callable[[Lower], Lower], fy: Lower) -> Lower:
        """Return z after the steps, whose lengths adapt to any curvature."""

        def damped(d: Lower) -> Lower:
            return _tree.add_scaled(product(d), self.damping, d)

        return solve(damped, fy, self.steps, self.tolerance)


class Exact(Frozen):
    """Build the lower Hessian column by column and solve with it."""

    def solved(self, product: Callable[[Lower], Lower], fy: Lower) -> Lower:
        """Return H^-1 fy."""
        flat, restore = ravel_pytree(fy)

        def column(unit: Array) -> Array:
            return ravel_pytree(product(restore(unit)))[0]

        hessian = jax.vmap(column)(jnp.eye(flat.size, dtype=flat.dtype))
        return restore(jnp.linalg.solve(hessian, flat))
