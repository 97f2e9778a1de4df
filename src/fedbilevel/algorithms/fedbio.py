r"""FedBiO: local steps on x, y and the linear-system variable z, for a shared y.

Client k at every local iteration, independent samples for each line:

    omega = gy_k(x, y; .)                            slope of the lower level
    q     = hvp_k(x, y; .)[z] - fy_k(x, y; .)        slope of 0.5 z'Hz - z'fy
    nu    = fx_k(x, y; .) - jvp_k(x, y; .)[z]        hypergradient with the current z
    y <- y - lr_y omega,   z <- z - lr_z q,   x <- x - lr_x nu
    every p iterations:  x, y, z <- mean over clients

Because z is averaged, it tracks Hbar^-1 fybar of the mean Hessian, so the limit is
unbiased where clients differ (p = 1), up to a drift of order lr p (p > 1). With K = 1
this is SOBA (arXiv 2201.13409), whose code stores -z and shares one sample a level.

Exchanges a round: 1, with dx + 2 dy floats each way. A step: one Hessian and one cross
product, two upper gradients.

Reference: Li, Huang, Huang, arXiv 2302.06701 (NeurIPS 2023).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. All three lines use the old point; `alternating=True` moves y, then z, then x at
fresh values. z starts at 0. `radius` projects z onto a ball after every step.
"""

from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Key, Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms._auxiliary import in_ball, order_of_moves, three_directions
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._local import (
    Iterate,
    averaged,
    check_counts,
    evaluate,
    local_steps,
    move,
    only,
)
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_optional_number, choice, count, number, part

__all__ = ["FedBiO"]


class FedBiO(AbstractAlgorithm):
    """Plain local steps on x, y and z, averaged every p steps."""

    reference: ClassVar[str] = "Li, Huang, Huang 2023, arXiv 2302.06701"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"

    lr_x: Number = number("x moves by lr_x nu", step="upper")
    lr_y: Number = number("y moves by lr_y omega", step="lower")
    lr_z: Number = number("z moves by lr_z q", step="lower")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    radius: Number | None = part(
        "bound of ||z||", converter=as_optional_number, default=None, kw_only=True
    )
    alternating: bool = choice(
        "move y, then z, then x, each at fresh values", default=False, kw_only=True
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y, 0)."""
        return Iterate(Triple(x, y, _tree.zeros_like(y)))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients keep nothing between rounds."""

    def phases(self) -> Phases:
        """Return the one exchange of a round."""
        return (averaged(self.local),)

    def point(self, server: Iterate) -> Pair:
        """Return the averaged x and y."""
        return Pair(server.point.x, server.point.y)

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        steps = Triple(self.lr_x, self.lr_y, self.lr_z)

        def iterate(w: Triple, time: tuple[Any, Key]) -> Triple:
            _, key = time
            G = three_directions(oracle, key)
            for group in order_of_moves(self.alternating):
                d = evaluate(only(G, group))(w)
                moved = move(only(w, group), only(steps, group), d)
                w = in_ball(combine(moved, w), self.radius)
            return w

        w = local_steps(iterate, message.point, turn, self.local_steps)
        return client, Iterate(w)
