r"""SPABA: recursive (PAGE) directions of x, y and z, with large batches by a coin.

With D = (D_x, D_y, D_z) of SOBA (`soba`), one sample s = (xi,
zeta) for all three, and w = (x, y, z):

    d_0 = mean of B samples of D(w_0; s)
    w_{t+1} = w_t - (lr_x, lr_y, lr_z) d_t
    d_{t+1} = mean of B samples of D(w_{t+1}; s)                   with probability pr
    d_{t+1} = d_t + D(w_{t+1}; s_t) - D(w_t; s_t)                  else

There is one coin for all three directions and all clients. A round lasts from one large
batch to the next: 1/pr iterations in the mean. With pr = 1 and B = 1 it is SOBA.
Without noise it is SOBA for any pr. The usual choice is pr = 1 / (B + 1). A step costs
twice SOBA's, a large batch B times.

On K clients directions are averaged at every iteration (p = 1), which is right where
clients differ: an exchange an iteration, with dx + 2 dy floats up, and as many down
with a large batch. Other exchanges send twice as many down, for both points.

Reference: Chu, Xu, Yao, Zhang, arXiv 2405.18777 (ICML 2024).
Deviations: the listing is a reconstruction from the abstract and from PAGE (arXiv
2008.10898). The authors' program was read, and is not followed: it draws its coin once,
when it is compiled, and its large batches renew no direction. `longest` bounds the
iterations between two large batches. A large batch is B samples (with
`Sampling(batch=None)` each one is all rows). z starts at 0.
"""

from fedbilevel.algorithms.base import Repeat
from fedbilevel.algorithms.one_machine._path import Recursive, WithZ
from fedbilevel.schedules import Number, count, number

__all__ = ["SPABA"]


class SPABA(Recursive, WithZ):
    """PAGE on x, y and z, with large batches by one coin."""

    reference = "Chu et al. 2024, arXiv 2405.18777"
    provenance = (
        "abstract and the authors' program read; listing reconstructed, unverified"
    )

    probability: Number = number(
        "chance of a large batch, pr", default=0.1, above=0.0, most=1.0
    )
    large_batch: int = count("batches of the run in a large one, B", default=9)
    longest: int = count("most iterations between two large batches", default=100)

    def phases(self):
        """Return the iteration with a large batch, and those until the next one."""
        large, step = self.exchanges()
        return large, Repeat(self.longest, (step,), True, self.probability)
