r"""VRBO: SPIDER directions of both levels that are corrected inside the lower loop.

A round is a period of q outer iterations, with w = (x, y) and B bundles in a large
batch:

    u, v = means of B samples of h(w; b), gy(w; zeta)         once, at its start
    q times:
        x_old <- x;   x <- x - lr_x u
        m times:
            u <- u + h(x, y; b) - h(x_old, y_old; b)          one bundle at both points
            v <- v + gy(x, y; zeta) - gy(x_old, y_old; zeta)
            x_old, y_old <- x, y;   y <- y - lr_y v

So both directions follow each move of x and of y. y_old is where y stood when u and v
were last formed. h is the stochastic Neumann series.

Oracle calls: a large batch B times, a lower step twice those of one sample. On K
clients directions are averaged at every step, each client inverting its own Hessian:
right only for clients that are alike. 1 + q m exchanges a round, with dx + dy floats up
each, and as many down with a large batch. Other exchanges send up to twice as many
down, for both points.

Reference: Yang, Ji, Liang, arXiv 2106.04692 (NeurIPS 2021).
Deviations: updates as in a public benchmark, but the first lower step differences in x,
too, as in the paper. A large batch is B samples (with `Sampling(batch=None)` each one
is all rows).
"""

from typing import ClassVar

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel._types import Number, Pair
from fedbilevel.algorithms.base import Repeat, ServerTurn, with_turn
from fedbilevel.algorithms.one_machine._path import (
    OneMachine,
    Path,
    both_directions,
    differences,
    sampled,
    stepped,
)
from fedbilevel.algorithms.one_machine._recursive import recursive_start
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.schedules import count, number, part

__all__ = ["VRBO"]


class VRBO(OneMachine):
    """SPIDER on both levels, corrected at every lower step."""

    reference: ClassVar[str] = "Yang, Ji, Liang 2021, arXiv 2106.04692"
    provenance: ClassVar[str] = "the authors' program and a benchmark's read"
    inverts_locally: ClassVar[bool] = True

    hypergradient: AbstractHypergradient = part("the estimate of grad Phi")
    lr_x: Number = number("x moves by lr_x u", step="upper")
    lr_y: Number = number("y moves by lr_y v", step="lower")
    inner_steps: int = count("lower steps for each step of x, m", default=3)
    period: int = count("steps of x from one large batch to the next, q", default=3)
    large_batch: int = count("batches of the run in a large one, B", default=10)

    def init_server(self, x, y):
        """Start at (x, y); directions are formed at the start of the first round."""
        return recursive_start(Pair(x, y))

    def phases(self):
        """Return the large batch, and all lower steps of a period."""
        draw = both_directions(self.hypergradient)
        large = sampled("large", draw, self.begun, self.large_batch)
        step = differences("step", draw, with_turn(self.corrected))
        return large, Repeat(self.period * self.inner_steps, (step,))

    def begun(self, server: Path, d: Pair) -> Path:
        """Take the directions of a large batch, and move x."""
        return Path(self.upper_step(server.point, d), server.point, d)

    def corrected(self, server: Path, change: Pair, turn: ServerTurn) -> Path:
        """Correct both directions and move y; x, too, where its next turn begins."""
        d = _tree.add(server.direction, change)
        w = stepped(server.point, self.step(0), Pair(None, d.y))
        done = turn.index % (self.period * self.inner_steps) + 1
        # After the last lower step of a period x waits for the large batch.
        ends = done == self.period * self.inner_steps
        moves = (done % self.inner_steps == 0) & ~jnp.asarray(ends)
        w = _tree.select(moves, self.upper_step(w, d), w)
        return Path(w, server.point, d)

    def upper_step(self, w: Pair, d: Pair) -> Pair:
        """Move x along u."""
        return stepped(w, self.step(0), Pair(d.x, None))
