r"""SPABA: recursive (PAGE) directions of x, y and z, with large batches by a coin.

With D = (D_x, D_y, D_z) of SOBA (`soba`), one sample s = (xi,
zeta) for all three, and w = (x, y, z):

    d_0 = mean of B samples of D(w_0; s)
    w_{t+1} = w_t - (lr_x, lr_y, lr_z) d_t
    d_{t+1} = mean of B samples of D(w_{t+1}; s)                   with probability pr
    d_{t+1} = d_t + D(w_{t+1}; s_t) - D(w_t; s_t)                  else

One coin for all three directions, and for all clients. A round is what is done from one
large batch to the next: 1/pr iterations in the mean. With pr = 1 and B = 1 it is SOBA;
without noise it is SOBA for any pr. The usual choice is pr = 1 / (B + 1). A step costs
twice SOBA's, a large batch B times.

On K clients directions are averaged at every iteration (p = 1), which is right where
clients differ: an exchange an iteration, with dx + 2 dy floats up; as many down with a
large batch, and twice as many else, for both points.

Reference: Chu, Xu, Yao, Zhang, arXiv 2405.18777 (ICML 2024).
Deviations: the listing is a reconstruction from the abstract and from PAGE (arXiv
2008.10898); the authors' program draws its coin once. `longest` bounds the iterations
between two large batches. A large batch is B samples (with `Sampling(batch=None)` each
one is all rows). z starts at 0.
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

__all__ = ["SPABA"]


class SPABA(AbstractAlgorithm):
    """PAGE on x, y and z, with large batches by one coin."""

    reference: ClassVar[str] = "Chu et al. 2024, arXiv 2405.18777"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"
    answers: ClassVar[str] = "single machine"
    pools: ClassVar[bool] = True

    lr_x: Number = number("x moves by lr_x d_x", step="upper")
    lr_y: Number = number("y moves by lr_y d_y", step="lower")
    lr_z: Number = number("z moves by lr_z d_z", step="lower")
    probability: Number = number(
        "chance of a large batch, pr", default=0.1, above=0.0, most=1.0
    )
    large_batch: int = count("batches of the run in a large one, B", default=9)
    longest: int = count("most iterations between two large batches", default=100)

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at (x, y, 0); directions are formed at t = 0."""
        return recursive_start(Triple(x, y, _tree.zeros_like(y)))

    def phases(self) -> Phases:
        """Return the iteration with a large batch, and those until the next one."""
        large, step = recursive_phases(all_directions, self.moved, self.large_batch)
        return large, Repeat(self.longest, (step,), True, self.probability)

    def moved(self, w: Triple, d: Triple) -> Triple:
        """Move x, y and z along d."""
        return stepped(w, Triple(self.lr_x, self.lr_y, self.lr_z), d)
