r"""SABA: SAGA on the five parts of SOBA's directions.

The rows of each level are divided into m parts, the same ones at all times (as many as
rows if those are fewer). Of every part a table holds gy, hvp[z], jvp[z] (lower) or fx,
fy (upper) as they were when it was last drawn. At every iteration, with a lower part i
and an upper part j drawn uniformly:

    s(q) = q_i(x, y, z) - T_q[i] + mean_i T_q[i],    then T_q[i] <- q_i(x, y, z)
    D_y = s(gy),   D_z = s(hvp[z]) - s(fy),   D_x = s(fx) - s(jvp[z])
    y <- y - lr_y D_y,   z <- z - lr_z D_z,   x <- x - lr_x D_x

all three from the old point. Steps are constant. With m = 1 it is SOBA with all rows.

A step costs SOBA's, on 1/m of the rows. Memory: m (3 dy + 2 dx) floats. On K clients
each keeps tables of its own rows, and directions are averaged at every iteration (p =
1), which is right where clients differ: 1 exchange an iteration, with dx + 2 dy floats
each way. A client that takes part rarely has old tables, not wrong ones.

Reference: Dagreou, Ablin, Vaiter, Moreau, arXiv 2201.13409 (NeurIPS 2022).
Deviations: tables start at 0, as in the authors' benchmark by default. The batch size
of a run is not used, nor noise in a sample: a sample is a part of the rows. z has the
opposite sign of the authors' code, and starts at 0.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Pair, Triple, Turn
from fedbilevel.algorithms.one_machine._path import ITERATIONS, WithZ, at_point
from fedbilevel.algorithms.parts import stacked_zeros
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count

__all__ = ["SABA"]


class Tables(eqx.Module):
    """Values last seen of every part: (jvp[z], gy, hvp[z]) below, (fx, fy) above."""

    lower: Triple
    upper: Pair


class SABA(WithZ):
    """SAGA on x, y and z: every part of the rows has a stored slope."""

    reference = "Dagreou et al. 2022, arXiv 2201.13409"
    provenance = "listing read in the paper"

    parts: int = count("parts of the rows of each level, m", default=10)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_client(self, x, y):
        """Start with tables of zeros."""
        of_x, of_y = (stacked_zeros(level, self.parts) for level in (x, y))
        return Tables(Triple(of_x, of_y, of_y), Pair(of_x, of_y))

    def phases(self):
        """Return the iterations of a round."""
        return self.repeated(at_point("step", self.local, self.moved()))

    def local(self, w: Triple, tables: Tables, oracle: Oracle, turn: Turn):
        """Draw a part of each level, and return the directions."""
        for_i, for_j = jr.split(turn.keys(1)[0])
        above, below = oracle.parts(self.parts)
        i, j = _drawn(for_i, below), _drawn(for_j, above)
        zeta, xi = oracle.part_lower(i, self.parts), oracle.part_upper(j, self.parts)
        lower = Triple(
            oracle.cross_product(w.x, w.y, w.z, zeta),
            oracle.lower_gradient(w.x, w.y, zeta),
            oracle.hessian_product(w.x, w.y, w.z, zeta),
        )
        upper = Pair(*oracle.upper_gradients(w.x, w.y, xi))
        lower, table_below = _saga(lower, tables.lower, i, below)
        upper, table_above = _saga(upper, tables.upper, j, above)
        D_x = _tree.subtract(upper.x, lower.x)
        D = Triple(D_x, lower.y, _tree.subtract(lower.z, upper.y))
        return Tables(table_below, table_above), D


def _drawn(key: Key, parts: Array) -> Array:
    return jr.randint(key, (), 0, parts, jnp.int32)


def _saga(now: Any, table: Any, part: Array, parts: Array) -> tuple[Any, Any]:
    """Return the estimate of the mean over all parts, and the table after it."""

    def estimate(leaf: Array, held: Array) -> Array:
        return leaf - held[part] + jnp.sum(held, axis=0) / parts.astype(held.dtype)

    def stored(leaf: Array, held: Array) -> Array:
        return held.at[part].set(leaf)

    return jax.tree.map(estimate, now, table), jax.tree.map(stored, now, table)
