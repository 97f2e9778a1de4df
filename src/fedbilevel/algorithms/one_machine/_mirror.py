r"""The mirror step of x in the BiO-BreD family, with an l1 term.

    x+ = argmin_x <u, x> + l1 ||x||_1 + D_psi(x, x_t) / gamma

where D_psi is the distance that psi makes. psi = ||x||^2 / 2 ("square") is a gradient
step, then a soft threshold. psi = x'H_t x / 2 with the diagonal H_t = sqrt(a) + 1e-6, a
<- 0.99 a + 0.01 u^2 ("diagonal"), scales both:

    x+ = soft(x_t - gamma u / H, gamma l1 / H),     soft(v, s) = sign(v) max(|v| - s, 0)

The proximal point of a mean is not the mean of proximal points, so that the step is the
server's.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Pair
from fedbilevel.algorithms.one_machine._path import OneMachine, Path

SQUARE, DIAGONAL = PSIS = ("square", "diagonal")
PSI = "the function psi whose distance keeps a step short"
L1 = "weight of the l1 norm of x, a part of the upper level"
_KEPT, _SMALL = 0.99, 1e-6


class Mirrored(OneMachine):
    """A method of one machine whose step of x is a mirror step."""

    allows_private = False
    inverts_locally = True

    def init_server(self, x, y):
        """Start at (x, y), with a = 0 where psi needs it."""
        moments = Pair(_tree.zeros_like(x), None) if self.psi == DIAGONAL else None
        return replace(super().init_server(x, y), squares=moments)

    def mirrored(self, server: Path, w: Pair, u: PyTree, **more: Any) -> Path:
        """Return the path after the mirror step of x from w."""

        def renewed(a: Array, d: Array) -> Array:
            return _KEPT * a + (1 - _KEPT) * d**2

        H, squares = jax.tree.map(lambda _: 1.0, u), None
        if self.psi == DIAGONAL:
            a = jax.tree.map(renewed, server.squares.x, u)
            H, squares = jax.tree.map(lambda a: jnp.sqrt(a) + _SMALL, a), Pair(a, None)
        x = jax.tree.map(self._soft, w.x, u, H)
        return Path(Pair(x, w.y), squares=squares, **more)

    def _soft(self, at: Array, d: Array, H: Any) -> Array:
        length = self.lr_x.astype(at.dtype) / H
        moved = at - length * d
        most = jnp.abs(moved) - length * self.l1.astype(at.dtype)
        return jnp.sign(moved) * jnp.maximum(most, 0)
