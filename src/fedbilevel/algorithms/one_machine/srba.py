r"""SRBA: recursive (SPIDER) directions of x, y and z, with a large batch every q steps.

With D = (D_x, D_y, D_z) of SOBA (`soba`), one sample s = (xi,
zeta) for all three, and w = (x, y, z):

    d_t = mean of B samples of D(w_t; s)                        if t mod q = 0
    d_t = d_{t-1} + D(w_t; s_t) - D(w_{t-1}; s_t)               else
    w_{t+1} = w_t - (lr_x, lr_y, lr_z) d_t

A round is one period. With q = 1 and B = 1 it is SOBA. Without noise it is SOBA for any
q. A step costs twice SOBA's, a large batch B times.

On K clients directions are averaged at every iteration (p = 1), which is right where
clients differ: q exchanges a round, with dx + 2 dy floats up each, and as many down
with a large batch. Other exchanges send twice as many down, for both points.

Reference: Dagreou, Moreau, Vaiter, Ablin, arXiv 2302.08766 (AISTATS 2024).
Deviations: the updates were read in the authors' benchmark, where a large batch is all
rows. Here it is B samples (with `Sampling(batch=None)` each one is all rows). z has the
opposite sign, and starts at 0.
"""

from fedbilevel.algorithms.base import Repeat
from fedbilevel.algorithms.one_machine._path import Recursive, WithZ
from fedbilevel.schedules import count

__all__ = ["SRBA"]


class SRBA(Recursive, WithZ):
    """SPIDER on x, y and z, with a large batch at the start of every round."""

    reference = "Dagreou et al. 2024, arXiv 2302.08766"
    provenance = "updates read in the authors' benchmark"

    period: int = count("iterations from one large batch to the next, q", default=10)
    large_batch: int = count("batches of the run in a large one, B", default=10)

    def phases(self):
        """Return the iteration with a large batch, and those after it."""
        large, step = self.exchanges()
        return large, Repeat(self.period - 1, (step,))
