r"""Differentiation through N lower steps, backwards (ITD) or forwards ((FG)^2U).

    y^0 = y,  y^{n+1} = y^n - step gy(x, y^n; zeta_n)

The start y does not depend on x.

`Unrolled`: h = d/dx f(x, y^N(x); xi). For quadratic g and one batch this is the Neumann
series with Q = N-1 and theta = step, evaluated at y^N.

`ForwardGradient`: s ~ N(0, I), d = the derivative of f(x, y^N(x); xi) along s, h = d s,
averaged over `directions` draws of s. Its mean is the derivative of `Unrolled` with the
same samples. One tangent for each direction is pushed through the N steps, so that
memory does not grow with N. Each yields one scalar of h. The variance is (dx + 1)
||h||^2 / directions: right for few upper variables (weights of sources, strengths of
penalties), and wrong for weights of rows or the layers of a network, where `Unrolled`
costs little more and has none of it.

Reference of `ForwardGradient`: Shen et al., arXiv 2406.14095.
Deviations: the abstract was read, not the listing.
"""

import jax
import jax.random as jr

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Upper
from fedbilevel.errors import ClientInputError
from fedbilevel.hypergradient._base import AbstractHypergradient
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import count, is_known, number


class _AbstractSteps(AbstractHypergradient):
    """An estimator that differentiates through `steps` lower steps."""

    steps: int = count("lower steps that are differentiated through")
    step: Number = number("how far each of them goes, below 2/L1", step="lower")

    def _draw(self, oracle: Oracle, upper: Key, lower: Key) -> tuple[Batch, Batch]:
        batches = jax.vmap(oracle.draw_lower)(jr.split(lower, self.steps))
        return oracle.draw_upper(upper), batches

    def check(self, curvature: float, client: int) -> None:
        """Raise if a lower step of this length moves away from the minimum."""
        if is_known(self.step) and float(self.step) * curvature >= 2:
            raise ClientInputError(
                client,
                f" L1 is about {curvature:.4g}, so use at most {1.98 / curvature:.4g}.",
                f"`{type(self).__name__}(step={float(self.step):.4g})`: lower steps "
                "diverge beyond 2/L1; on ",
            )


class Unrolled(_AbstractSteps):
    """Reverse-mode differentiation through `steps` lower steps."""

    def draw(self, oracle: Oracle, key: Key) -> tuple[Batch, Batch]:
        """Draw xi and one zeta per lower step."""
        return self._draw(oracle, *jr.split(key))

    def __call__(
        self, oracle: Oracle, x: Upper, y: Lower, bundle: tuple[Batch, Batch]
    ) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        return oracle.unrolled_gradient(x, y, *bundle, self.step)


class ForwardGradient(_AbstractSteps):
    """Forward differentiation through `steps` lower steps along random directions."""

    directions: int = count("random directions of an estimate", default=1)

    def draw(self, oracle: Oracle, key: Key) -> tuple[Batch, Batch, Key]:
        """Draw xi, one zeta per lower step, and what the directions are drawn by."""
        upper, lower, along = jr.split(key, 3)
        return *self._draw(oracle, upper, lower), along

    def __call__(
        self, oracle: Oracle, x: Upper, y: Lower, bundle: tuple[Batch, Batch, Key]
    ) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        xi, zetas, along = bundle

        def one(key: Key) -> Upper:
            s = _tree.normal_like(key, x)
            d = oracle.unrolled_derivative(x, y, s, xi, zetas, self.step)
            return _tree.scale(d, s)

        every = jax.vmap(one)(jr.split(along, self.directions))
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), every)
