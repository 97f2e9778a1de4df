r"""FedBiOAcc: STORM on x, y and the linear-system variable z, for a shared y.

With omega, q, nu of FedBiO, sampled afresh for each line, and any schedule a_t, such as
delta/(t_0 + t)^(1/3), client k at local iteration t:

    omega_t = omega(w_t) + (1 - c_omega a_{t-1}^2) (omega_{t-1} - omega(w_{t-1}))
    q_t     = q(w_t)     + (1 - c_q     a_{t-1}^2) (q_{t-1}     - q(w_{t-1}))
    nu_t    = nu(w_t)    + (1 - c_nu    a_{t-1}^2) (nu_{t-1}    - nu(w_{t-1}))
    y <- y - gamma a_t omega_t,   z <- z - tau a_t q_t,   x <- x - eta a_t nu_t
    every p iterations:  x, y, z, omega, q, nu <- mean over clients

where w = (x, y, z) and both points of a line use one sample. First directions by direct
evaluation. Unbiased where clients differ, as FedBiO, and with a linear speed-up in K.

With `drift` the samples omega(w), q(w), nu(w) of client k are corrected, at both points
alike, as FedBiO's: by - c_k + c (controls), or by - omega(w_0) + c (anchor). Then only
c_omega a^2 of the correction enters a step, as much as enters of the client's own.

Exchanges a round: 1, with 2 (dx + 2 dy) floats each way, and 3 (dx + 2 dy) with
controls; 2 with an anchor, and as many floats. A step costs twice FedBiO's; an anchor
doubles that.

Reference: Li, Huang, Huang, arXiv 2302.06701 (NeurIPS 2023).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. The previous point is the client's own, before averaging. All three lines use the
old point; `alternating=True` moves y, then z, then x at fresh values. z starts at 0;
`radius` projects it onto a ball (the paper suggests L0/mu). With fewer than K
participants a client that missed the last round corrects from the received point;
`absent` has two other ways (`_absence.py`): from where the last participants stood in
the mean, w + step d, or by forgetting what it would have forgotten in the steps that it
missed. `drift` is not in the paper.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Key, Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms._absence import (
    ABSENT,
    KEEP,
    faded,
    missed_steps,
    where_evaluated,
)
from fedbilevel.algorithms._auxiliary import in_ball, order_of_moves, three_directions
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
    Memory,
    at_time,
    check_counts,
    check_words,
    evaluate,
    local_steps,
    momentum_weight,
    move,
    no_memory,
    only,
)
from fedbilevel.estimators import Storm
from fedbilevel.problem import Oracle
from fedbilevel.schedules import (
    Schedule,
    as_optional_number,
    choice,
    count,
    number,
    part,
    schedule,
    word,
)

__all__ = ["FedBiOAcc"]


class FedBiOAcc(AbstractAlgorithm):
    """STORM on x, y and z, averaged every p steps."""

    reference: ClassVar[str] = "Li, Huang, Huang 2023, arXiv 2302.06701"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"

    a: Schedule = schedule("common step of x, y and z, or its schedule")
    eta: Number = number("x moves by eta a nu", step="upper")
    gamma: Number = number("y moves by gamma a omega", step="lower")
    tau: Number = number("z moves by tau a q", step="lower")
    c_nu: Number = number("nu forgets by c_nu a^2 a step")
    c_omega: Number = number("omega forgets by c_omega a^2 a step")
    c_q: Number = number("q forgets by c_q a^2 a step")
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
    absent: str = word(
        "what one that missed rounds does with the memory it receives",
        ABSENT,
        default=KEEP,
        kw_only=True,
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        check_words(self)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y, 0); directions are formed on the clients at t = 0."""
        point = Triple(x, y, _tree.zeros_like(y))
        control = first_control(self.drift, point)
        return Iterate(point, _tree.zeros_like(point), control)

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without usable previous points, one for each group of blocks."""
        point = Triple(x, y, _tree.zeros_like(y))
        stood = (point,) * len(order_of_moves(self.alternating))
        return no_memory(stood, own_control(self.drift, point))

    def phases(self) -> Phases:
        """Return the exchanges of a round."""
        return corrected_rounds(
            self.local, self.drift, three_directions, self.local_steps
        )

    def point(self, server: Iterate) -> Pair:
        """Return the averaged x and y."""
        return Pair(server.point.x, server.point.y)

    def step(self, t: Any) -> Triple:
        """Return eta a_t, gamma a_t and tau a_t."""
        a = at_time(self.a, t, self.eta)
        return Triple(self.eta * a, self.gamma * a, self.tau * a)

    def weight(self, t: Any) -> Triple:
        """Return c a_{t-1}^2 for each block, and 1 at t = 0."""
        letters = (self.c_nu, self.c_omega, self.c_q)
        return Triple(*(momentum_weight(c, self.a, t, 2) for c in letters))

    def local(self, message: Iterate, memory: Memory, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        order, p = order_of_moves(self.alternating), self.local_steps
        correction = Correction(message.point, message.control, memory.control)
        first, missed = turn.steps(p)[0], missed_steps(self.absent, memory, turn, p)

        def iterate(carry: tuple[Triple, Triple, tuple, Any], time: tuple[Any, Key]):
            (w, d, before, total), (t, key) = carry, time
            G = correction.corrected(three_directions(oracle, key))
            steps, weights = self.step(t), faded(self.weight(t), missed, t == first)
            seen, taken = [], []
            for group, previous in zip(order, before, strict=True):
                held, weight = only(d, group), only(weights, group)
                storm = (evaluate(only(G, group)), w, previous, held, weight)
                fresh, sample = correction.filtered(Storm(), *storm)
                seen.append(w)
                taken.append(sample)
                moved = move(only(w, group), only(steps, group), fresh)
                w, d = in_ball(combine(moved, w), self.radius), combine(fresh, d)
            return w, d, tuple(seen), correction.summed(total, *taken)

        known = (message, memory, turn, order)
        before = where_evaluated(self.absent, *known, self.step, p)
        start = (message.point, message.direction, before, correction.no_sum())
        w, d, before, total = local_steps(iterate, start, turn, p)
        c_k, change = correction.renewed(total, p)
        index = jnp.asarray(turn.index, jnp.int32)
        return Memory(before, index, c_k), Iterate(w, d, change)
