r"""SRBA: recursive (SPIDER) directions of x, y and z, with a large batch every q steps.

With D = (D_x, D_y, D_z) of SOBA (`soba`), one sample s = (xi,
zeta) for all three, and w = (x, y, z):

    d_t = mean of B samples of D(w_t; s)                        if t mod q = 0
    d_t = d_{t-1} + D(w_t; s_t) - D(w_{t-1}; s_t)               else
    w_{t+1} = w_t - (lr_x, lr_y, lr_z) d_t

A round is one period. With q = 1 and B = 1 it is SOBA; without noise it is SOBA for any
q. A step costs twice SOBA's, a large batch B times.

On K clients directions are averaged at every iteration (p = 1), which is right where
clients differ: q exchanges a round, with dx + 2 dy floats up each; as many down with a
large batch, and twice as many else, for both points.

Reference: Dagreou, Moreau, Vaiter, Ablin, arXiv 2302.08766 (AISTATS 2024).
Deviations: the updates were read in the authors' benchmark, where a large batch is all
rows; here it is B samples (with `Sampling(batch=None)` each one is all rows). z has the
opposite sign, and starts at 0.
"""

from typing import ClassVar

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Triple, Upper
from fedbilevel.algorithms.base import AbstractAlgorithm, Phases, Repeat
from fedbilevel.algorithms.one_machine._path import Path, all_directions, stepped
from fedbilevel.algorithms.one_machine._recursive import (
    recursive_phases,
    recursive_start,
)
from fedbilevel.schedules import count, number

__all__ = ["SRBA"]


class SRBA(AbstractAlgorithm):
    """SPIDER on x, y and z, with a large batch at the start of every round."""

    reference: ClassVar[str] = "Dagreou et al. 2024, arXiv 2302.08766"
    provenance: ClassVar[str] = "updates read in the authors' benchmark"
    answers: ClassVar[str] = "single machine"
    pools: ClassVar[bool] = True

    lr_x: Number = number("x moves by lr_x d_x", step="upper")
    lr_y: Number = number("y moves by lr_y d_y", step="lower")
    lr_z: Number = number("z moves by lr_z d_z", step="lower")
    period: int = count("iterations from one large batch to the next, q", default=10)
    large_batch: int = count("batches of the run in a large one, B", default=10)

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at (x, y, 0); directions are formed at t = 0."""
        return recursive_start(Triple(x, y, _tree.zeros_like(y)))

    def phases(self) -> Phases:
        """Return the iteration with a large batch, and those after it."""
        large, step = recursive_phases(all_directions, self.moved, self.large_batch)
        return large, Repeat(self.period - 1, (step,))

    def moved(self, w: Triple, d: Triple) -> Triple:
        """Move x, y and z along d."""
        return stepped(w, Triple(self.lr_x, self.lr_y, self.lr_z), d)
