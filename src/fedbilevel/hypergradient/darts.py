r"""A number, or a diagonal, in the place of the inverse Hessian; no second derivative.

`DARTS`:  z = gamma fy(xi)
`SAMA`:   z = P fy(xi),   P = gamma / (sqrt(v) + small) in every coordinate,
          v = the mean of gy(zeta_i)^2 over `samples` fresh lower samples

and h = fx(xi) - jvp(zeta_0)[z], the product by two gradients of g along x, at y +- d z,
d = radius / ||z||. DARTS is the series of `Neumann` with Q = 0, by finite differences,
where gamma need not be below 1/L1.

Both are biased unless the Hessian is a multiple of the inverse of what stands for it:
gamma is to be tuned, and another gamma is another limit. They are for models so large
that nothing but two more gradients can be afforded.

SAMA takes for P the derivative of the lower optimizer's step by its gradient. Of plain
descent that is the step itself: SAMA is DARTS then, with gamma the step. Of Adam it is
its diagonal, with the second moments held, as here. An estimator keeps nothing between
two calls. So v is not Adam's running average but its limit where y rests, from samples
of its own.

Reference: DARTS, Liu, Simonyan, Yang, arXiv 1806.09055; SAMA, Choe et al., arXiv
2310.05674. Deviations: fy is taken at y, and not one lower step ahead of it.

`FiniteDifference` is any estimator with both products taken so:

    hvp[v] ~ (gy(x, y + d v) - gy(x, y - d v)) / (2 d),   d = radius / ||v||
    jvp[v] ~ (gx(x, y + d v) - gx(x, y - d v)) / (2 d)

Two gradients a product, error O(radius^2), none for quadratic g.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Upper
from fedbilevel.hypergradient._base import AbstractHypergradient, Bundle, assemble
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import count, number, part

_RADIUS = "distance of the two points of a difference"


class DARTS(AbstractHypergradient):
    """Take a number for the inverse Hessian, and differences for the cross product."""

    gamma: Number = number("what stands for the inverse Hessian", above=0)
    radius: Number = number(_RADIUS, default=1e-2, above=0)

    def draw(self, oracle: Oracle, key: Key) -> Bundle:
        """Draw xi and zeta_0."""
        upper, cross = jr.split(key)
        return Bundle(oracle.draw_upper(upper), oracle.draw_lower(cross), None)

    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Bundle) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        fx, fy = oracle.upper_gradients(x, y, bundle.upper)
        first_order = dataclasses.replace(oracle, radius=self.radius)
        return assemble(first_order, x, y, fx, _tree.scale(self.gamma, fy), bundle)


class SAMA(AbstractHypergradient):
    """Take the diagonal of Adam's lower step for the inverse Hessian."""

    gamma: Number = number("Adam's step, over the root of the second moments", above=0)
    small: Number = number("added to that root", default=1e-2, above=0)
    samples: int = count("lower samples of the second moments", default=4)
    radius: Number = number(_RADIUS, default=1e-2, above=0)

    def draw(self, oracle: Oracle, key: Key) -> Bundle:
        """Draw xi, zeta_0 and the samples of the second moments."""
        upper, cross, rest = jr.split(key, 3)
        moments = jax.vmap(oracle.draw_lower)(jr.split(rest, self.samples))
        return Bundle(oracle.draw_upper(upper), oracle.draw_lower(cross), moments)

    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Bundle) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        fx, fy = oracle.upper_gradients(x, y, bundle.upper)

        def add(total: Lower, zeta: Batch) -> tuple[Lower, None]:
            slope = oracle.lower_gradient(x, y, zeta)
            return jax.tree.map(lambda v, g: v + g * g, total, slope), None

        total, _ = jax.lax.scan(add, _tree.zeros_like(fy), bundle.factors)

        def preconditioned(fy: Any, v: Any) -> Any:
            root = jnp.sqrt(v / self.samples) + jnp.asarray(self.small, v.dtype)
            return jnp.asarray(self.gamma, fy.dtype) * fy / root

        z = jax.tree.map(preconditioned, fy, total)
        first_order = dataclasses.replace(oracle, radius=self.radius)
        return assemble(first_order, x, y, fx, z, bundle)


class FiniteDifference(AbstractHypergradient):
    """Run the estimator `rule` on first-order oracles only."""

    rule: AbstractHypergradient = part("what is run, without second derivatives")
    radius: Number = number("distance of the two points", default=1e-2)

    def draw(self, oracle: Oracle, key: Key) -> Any:
        """Draw what the estimator draws."""
        return self.rule.draw(oracle, key)

    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Any) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        return self.rule(dataclasses.replace(oracle, radius=self.radius), x, y, bundle)

    def check(self, curvature: float, client: int) -> None:
        """Raise if the estimator fails at this lower curvature."""
        self.rule.check(curvature, client)
