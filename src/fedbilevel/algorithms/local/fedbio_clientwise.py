r"""FedBiO for a client-local lower level: x is shared, every client keeps a personal y.

    min_x  1/K sum_k f_k(x, y_k*(x))   with   y_k*(x) = argmin_y g_k(x, y)

Client k at every local iteration, from all rows or a sample of them:

    y <- y - lr_y gy_k(x, y)
    nu = fx_k(x, y) - jvp_k(x, y)[z],    z from the client's own Hessian
    x <- x - lr_x nu                                 (at the fresh y)
    every p iterations:  x <- mean over clients;  y is never sent

Averaging client hypergradients is exact here, however much the clients differ. It is
another problem than the one with a shared y: see `docs/which-question.md`.

Exchanges a round: 1, with dx floats each way.

Reference: Li, Huang, Huang, arXiv 2205.01608.
Deviations: the listing is a reconstruction. The paper's abstract was read, not its
body. z comes from any hypergradient estimator (`Neumann` on the command line).
`alternating=False` takes both directions at the old point.
"""

from fedbilevel._types import Number, Pair
from fedbilevel.algorithms.local._bases import ByHypergradient
from fedbilevel.schedules import choice, count, step

__all__ = ["FedBiOClientwise"]


class FedBiOClientwise(ByHypergradient):
    """Plain local steps; x averaged every p steps, y kept on its client."""

    reference = "Li, Huang, Huang 2022, arXiv 2205.01608"
    provenance = "abstract read; listing reconstructed, unverified"
    answers = "own y per client"
    inverts_locally = False

    lr_x: Number = step("upper", "x moves by lr_x nu")
    lr_y: Number = step("lower", "y moves by lr_y gy")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    alternating: bool = choice(
        "move y, then x at the fresh y", default=True, kw_only=True
    )

    def private_blocks(self):
        """Keep y on its client."""
        return Pair(False, True)

    def order(self):
        """Move y, then x, unless both are to move at once."""
        return self.in_turn() if self.alternating else (self.moves,)
