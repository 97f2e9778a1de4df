r"""S-TFBO: steps on x, y and z that need no tuning, on one machine.

With D_x, D_y, D_z of SOBA (`soba`), one sample for each level,
all at the old point, and sums that start at c^2, c = `start`:

    beta^2  <- beta^2 + ||D_y||^2,    y <- y - D_y / beta
    gamma^2 <- gamma^2 + ||D_z||^2,   z <- z - D_z / max(beta, gamma)
    alpha^2 <- alpha^2 + ||D_x||^2,   x <- x - D_x / (alpha max(beta, gamma))

The sums grow until steps are short enough, and stay there where directions vanish. No
constant of the problem is needed. Choose `start` by the scale of its slopes.

A step costs SOBA's. On K clients the directions are averaged at every iteration (p =
1), and the norms are those of the means: right where clients differ. 1 exchange an
iteration, with dx + 2 dy floats each way.

Reference: Yang, Ban, Huang, Ma, Ji, arXiv 2410.05140 (ICLR 2025), the single-loop one.
Deviations: the update was read in the authors' program, but not its sums, whose file is
missing: they are from memory, and come before the step. z starts at 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel.algorithms import Number, Pointed, ServerTurn, Triple
from fedbilevel.algorithms.one_machine._path import ITERATIONS, OfSystem, stepped
from fedbilevel.schedules import count, number

__all__ = ["STFBO"]


class Summed(Pointed):
    """A point, and the sums al^2, be^2 and ga^2 of squared norms."""

    point: Triple
    al: Float[Array, ""]
    be: Float[Array, ""]
    ga: Float[Array, ""]


class STFBO(OfSystem):
    """Steps on x, y and z by sums of squared norms, without a step to tune."""

    reference = "Yang et al. 2025, arXiv 2410.05140"
    provenance = "the authors' program read in part; sums from memory"
    allows_private = False

    start: Number = number(
        "what the roots of the sums start at", default=1.0, above=0.0
    )
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_server(self, x, y):
        """Start at (x, y, 0)."""
        first = (self.start**2).astype(_tree.dot(y, y).dtype)
        return Summed(self.variables(x, y), first, first, first)

    def taken(self, server: Summed, D: Triple, turn: ServerTurn) -> Summed:
        """Add to the sums, and move by their roots."""
        al = server.al + _tree.dot(D.x, D.x)
        be = server.be + _tree.dot(D.y, D.y)
        ga = server.ga + _tree.dot(D.z, D.z)
        most = jnp.sqrt(jnp.maximum(be, ga))
        steps = Triple(1 / (jnp.sqrt(al) * most), 1 / jnp.sqrt(be), 1 / most)
        return Summed(stepped(server.point, steps, D), al, be, ga)
