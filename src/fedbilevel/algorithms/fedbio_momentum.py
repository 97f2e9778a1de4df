r"""FedBiO with momentum on x: federated MA-SOBA.

With omega, q, nu of FedBiO (`fedbilevel.algorithms.fedbio`), sampled afresh for each
line, all at the old point, client k at local iteration t:

    u_t = (1 - alpha a_{t-1}) u_{t-1} + alpha a_{t-1} nu,      u_0 = nu
    y <- y - lr_y a_t omega,   z <- z - lr_z a_t q,   x <- x - lr_x a_t u_t
    every p iterations:  x, y, z, u <- mean over clients

u is averaged with the point that it moves, so that clients keep nothing, and one that
was away goes on from the mean. Unbiased where clients differ, as FedBiO; with
alpha = a = 1 it is FedBiO, and at p = 1 on one client it is MA-SOBA
(`fedbilevel.algorithms.ma_soba`) with samples of its own for each line. a_t is any
schedule.

With `drift` the samples omega, q, nu are corrected as FedBiO's, before u takes them in.

Exchanges a round: 1, with 2 dx + 2 dy floats each way, and 3 dx + 4 dy with controls;
2 with an anchor, and as many floats. A step costs FedBiO's.

Reference: Chen, Xiao, Balasubramanian, arXiv 2306.12067 (MA-SOBA, JMLR 2024), for the
average; Li, Huang, Huang, arXiv 2302.06701, for the local steps.
Deviations: the two are put together here, in no paper that is known. z starts at 0;
`radius` projects it onto a ball after every step.
"""

from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms._auxiliary import in_ball, three_directions
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
    at_time,
    check_counts,
    check_words,
    evaluate,
    local_steps,
    momentum_weight,
    move,
)
from fedbilevel.problem import Oracle
from fedbilevel.schedules import (
    Schedule,
    as_optional_number,
    count,
    number,
    part,
    schedule,
    word,
)

__all__ = ["FedBiOMomentum"]


class FedBiOMomentum(AbstractAlgorithm):
    """Local steps on x, y and z, that of x along a moving average."""

    reference: ClassVar[str] = "Chen et al. 2024, arXiv 2306.12067; arXiv 2302.06701"
    provenance: ClassVar[str] = "ours: two known methods put together"

    lr_x: Number = number("x moves by lr_x a u", step="upper")
    lr_y: Number = number("y moves by lr_y a omega", step="lower")
    lr_z: Number = number("z moves by lr_z a q", step="lower")
    alpha: Number = number("u forgets by alpha a a step")
    a: Schedule = schedule("common shape of steps and weight over t", default=1.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    radius: Number | None = part(
        "bound of ||z||", converter=as_optional_number, default=None, kw_only=True
    )
    drift: str | None = word(
        "how local steps are corrected", DRIFT, default=None, kw_only=True
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        check_words(self)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y, 0); u is formed on the clients at t = 0."""
        w, u = Triple(x, y, _tree.zeros_like(y)), Pair(_tree.zeros_like(x), None)
        return Iterate(w, u, first_control(self.drift, w))

    def init_client(self, x: Upper, y: Lower) -> Triple | None:
        """Start with c_k = 0, if there are controls; else clients keep nothing."""
        return own_control(self.drift, Triple(x, y, _tree.zeros_like(y)))

    def phases(self) -> Phases:
        """Return the exchanges of a round."""
        return corrected_rounds(
            self.local, self.drift, three_directions, self.local_steps
        )

    def point(self, server: Iterate) -> Pair:
        """Return the averaged x and y."""
        return Pair(server.point.x, server.point.y)

    def step(self, t: Any) -> Triple:
        """Return the steps of x, y and z."""
        a = at_time(self.a, t, self.lr_x)
        return Triple(self.lr_x * a, self.lr_y * a, self.lr_z * a)

    def local(self, message: Iterate, c_k: Triple | None, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        correction = Correction(message.point, message.control, c_k)

        def iterate(carry: tuple[Triple, Upper, Any], time: tuple[Any, Key]):
            (w, u, total), (t, key) = carry, time
            D = evaluate(correction.corrected(three_directions(oracle, key)))(w)
            weight = momentum_weight(self.alpha, self.a, t, 1)
            u = _tree.add_scaled(_tree.scale(1 - weight, u), weight, D.x)
            w = in_ball(move(w, self.step(t), Triple(u, D.y, D.z)), self.radius)
            return w, u, correction.summed(total, D)

        start = (message.point, message.direction.x, correction.no_sum())
        w, u, total = local_steps(iterate, start, turn, self.local_steps)
        c_k, change = correction.renewed(total, self.local_steps)
        return c_k, Iterate(w, Pair(u, None), change)
