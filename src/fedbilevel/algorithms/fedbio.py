r"""FedBiO: local steps on x, y and the linear-system variable z, for a shared y.

Client k at every local iteration, independent samples for each line:

    omega = gy_k(x, y; .)                            slope of the lower level
    q     = hvp_k(x, y; .)[z] - fy_k(x, y; .)        slope of 0.5 z'Hz - z'fy
    nu    = fx_k(x, y; .) - jvp_k(x, y; .)[z]        hypergradient with the current z
    y <- y - lr_y omega,   z <- z - lr_z q,   x <- x - lr_x nu
    every p iterations:  x, y, z <- mean over clients

With `drift` every direction d of the three is corrected before the step:

    controls:  d <- d - c_k + c      c_k the mean of d over the client's last p steps,
                                     kept there, and c the mean of c_k over all clients
    anchor:    d <- d - d(w_0) + c   with the same samples at the received point w_0,
                                     and c the clients' mean of d(w_0)

Because z is averaged, it tracks Hbar^-1 fybar of the mean Hessian, so the limit is
unbiased where clients differ (p = 1), up to a drift of order lr p (p > 1), of which
`drift` leaves nothing (`_drift.py` has both ways). With K = 1 this is SOBA (arXiv
2201.13409), whose code stores -z and shares one sample a level.

Exchanges a round: 1, with dx + 2 dy floats each way; twice as many floats with
controls, and with an anchor, in 2 exchanges. A step: one Hessian and one cross product,
two upper gradients; an anchor needs three times as many in all. With a `distance` both
products are central differences of two gradients of g each: no second derivative.

Reference: Li, Huang, Huang, arXiv 2302.06701 (NeurIPS 2023).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. All three lines use the old point; `alternating=True` moves y, then z, then x at
fresh values. z starts at 0. `radius` projects z onto a ball after every step. `drift`
and `distance` are not in the paper.
"""

from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Key, Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms._auxiliary import (
    by_differences,
    in_ball,
    order_of_moves,
    three_directions,
)
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._drift import (
    DRIFT,
    Correction,
    corrected_rounds,
    first_control,
    own_control,
)
from fedbilevel.algorithms._local import (
    Iterate,
    check_counts,
    check_words,
    evaluate,
    local_steps,
    move,
    only,
)
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_optional_number, choice, count, number, part, word

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
    drift: str | None = word(
        "how local steps are corrected", DRIFT, default=None, kw_only=True
    )
    distance: Number | None = part(
        "distance of the points whose gradients' difference stands for a product",
        converter=as_optional_number,
        default=None,
        kw_only=True,
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        check_words(self)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y, 0)."""
        w = Triple(x, y, _tree.zeros_like(y))
        return Iterate(w, control=first_control(self.drift, w))

    def init_client(self, x: Upper, y: Lower) -> Triple | None:
        """Start with c_k = 0, if there are controls; else clients keep nothing."""
        return own_control(self.drift, Triple(x, y, _tree.zeros_like(y)))

    def phases(self) -> Phases:
        """Return the exchanges of a round."""
        return corrected_rounds(self.local, self.drift, self.draw, self.local_steps)

    def point(self, server: Iterate) -> Pair:
        """Return the averaged x and y."""
        return Pair(server.point.x, server.point.y)

    def draw(self, oracle: Oracle, key: Key) -> Triple:
        """Draw the samples of a step; return the maps nu, omega and q."""
        return three_directions(by_differences(oracle, self.distance), key)

    def local(self, message: Iterate, c_k: Triple | None, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        steps = Triple(self.lr_x, self.lr_y, self.lr_z)
        correction = Correction(message.point, message.control, c_k)

        def iterate(carry: tuple[Triple, Triple | None], time: tuple[Any, Key]):
            (w, total), (_, key) = carry, time
            G, taken = correction.corrected(self.draw(oracle, key)), []
            for group in order_of_moves(self.alternating):
                d = evaluate(only(G, group))(w)
                moved = move(only(w, group), only(steps, group), d)
                w = in_ball(combine(moved, w), self.radius)
                taken.append(d)
            return w, correction.summed(total, *taken)

        start = (message.point, correction.no_sum())
        w, total = local_steps(iterate, start, turn, self.local_steps)
        c_k, change = correction.renewed(total, self.local_steps)
        return c_k, Iterate(w, control=change)
