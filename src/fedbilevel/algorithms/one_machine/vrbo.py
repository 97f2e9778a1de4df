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

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel.algorithms import Number, Pair, Repeat, ServerTurn
from fedbilevel.algorithms.one_machine import _path
from fedbilevel.schedules import count, step

__all__ = ["VRBO"]


class VRBO(_path.Recursive, _path.ByBundle):
    """SPIDER on both levels, corrected at every lower step."""

    reference = "Yang, Ji, Liang 2021, arXiv 2106.04692"
    provenance = "the authors' program and a benchmark's read"

    lr_x: Number = step("upper", "x moves by lr_x u")
    lr_y: Number = step("lower", "y moves by lr_y v")
    inner_steps: int = count("lower steps for each step of x, m", default=3)
    period: int = count("steps of x from one large batch to the next, q", default=3)
    large_batch: int = count("batches of the run in a large one, B", default=10)

    def phases(self):
        """Return the large batch, and all lower steps of a period."""
        large = _path.sampled("large", self.draw, self.begun, self.large_batch)
        step = _path.recursive("step", self.draw, self.corrected)
        return large, Repeat(self.period * self.inner_steps, (step,))

    def begun(self, server: _path.Path, d: Pair) -> _path.Path:
        """Take the directions of a large batch, and move x."""
        return _path.Path(self.upper_step(server.point, d), server.point, d)

    def corrected(self, server: _path.Path, d: Pair, turn: ServerTurn) -> _path.Path:
        """Move y along corrected directions; x, too, where its next turn begins."""
        w = _path.stepped(server.point, self.step(0), Pair(None, d.y))
        done = turn.index % (self.period * self.inner_steps) + 1
        # After the last lower step of a period x waits for the large batch.
        ends = done == self.period * self.inner_steps
        moves = (done % self.inner_steps == 0) & ~jnp.asarray(ends)
        w = _tree.select(moves, self.upper_step(w, d), w)
        return _path.Path(w, server.point, d)

    def upper_step(self, w: Pair, d: Pair) -> Pair:
        """Move x along u."""
        return _path.stepped(w, self.step(0), Pair(d.x, None))
