r"""LocalBSGVRM: local bilevel stochastic gradient with variance-reduced momentum.

Client k at local iteration t, with ONE bundle b_t = {xi, zeta_0..zeta_Q} and ONE zeta_t
used at both points (algorithm 2 of the paper; need alpha eta^2 < 1 and beta eta^2 < 1):

    a = alpha eta_{t-1}^2,   c = beta eta_{t-1}^2
    u_t = (1 - a) (u_{t-1} - h_k(x_{t-1}, y_{t-1}; b_t)) + h_k(x_t, y_t; b_t)
    v_t = (1 - c) (v_{t-1} - gy_k(x_{t-1}, y_{t-1}; zeta_t)) + gy_k(x_t, y_t; zeta_t)
    x_{t+1} = x_t - rho1 eta_t u_t,     y_{t+1} = y_t - rho2 eta_t v_t
    if (t+1) mod p == 0:  u_t, v_t, x_{t+1}, y_{t+1} <- mean over clients

where u_0 and v_0 are means over B independent bundles at (x_0, y_0). The previous
point is the client's own, before averaging: only then does mean_k u_t track mean_k h_k
exactly when oracles are exact. h_k is the stochastic Neumann hypergradient. With
`drift` its samples, and those of gy_k, are corrected at both points alike, by - c_k + c
(controls) or - h_k(w_0; b_t) + c (anchor), as in LocalBSGM.

Exchanges a round: 1, with 2 (dx + dy) floats each way, and 3 (dx + dy) with controls; 2
with an anchor, and as many floats. Samples a step: Q + 3. Oracle calls: twice
LocalBSGM's. Right for clients whose data are alike, as LocalBSGM, also with `drift`.

Readings: u_t, not the printed u_{t+1}, is averaged; the start is (x_0, y_0), arbitrary;
"LocalBSGVR" in the paper's abstract is this algorithm; p = 1 is allowed.
Deviations: at t = 0 the two points coincide, which costs one evaluation more than the
listing and changes nothing. With fewer than K participants, a client that missed the
last round takes the received point as its previous one (momentum without correction);
`absent` has two other ways (`_absence.py`): the point w + step d where the last
participants stood in the mean, or to forget for the steps that it missed, too. `drift`
is not in the paper.
With `own_lower` every client keeps its y and v, and inverts the right Hessian, its own:
that is FedBiOAcc-Local (`fedbilevel.algorithms.fedbioacc_local`).
"""

from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._absence import (
    ABSENT,
    KEEP,
    faded,
    missed_steps,
    where_evaluated,
)
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._drift import (
    DRIFT,
    Correction,
    corrected_rounds,
    first_control,
    own_control,
)
from fedbilevel.algorithms._founding import (
    check_letters,
    effective_values,
    from_effective,
    warm_start,
)
from fedbilevel.algorithms._local import (
    Iterate,
    Memory,
    at_time,
    check_counts,
    check_words,
    evaluate,
    first_batch,
    hypergradient_and_slope,
    local_steps,
    momentum_weight,
    move,
    no_memory,
)
from fedbilevel.estimators import Storm
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, choice, count, number, part, schedule, word

__all__ = ["LocalBSGVRM"]


class LocalBSGVRM(AbstractAlgorithm):
    """STORM on hypergradient and lower gradient, averaged every p steps."""

    reference: ClassVar[str] = "Gao 2022, arXiv 2204.13299, Algorithm 2"
    provenance: ClassVar[str] = "listing read in the paper"
    inverts_locally: ClassVar[bool] = True

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi")
    eta: Schedule = schedule("common step of x and y, or its schedule")
    alpha: Number = number("u forgets by alpha eta^2 a step")
    beta: Number = number("v forgets by beta eta^2 a step")
    rho1: Number = number("x moves by rho1 eta u", step="upper")
    rho2: Number = number("y moves by rho2 eta v", step="lower")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    warm_start: int = count("lower steps before the first round", default=0)
    first_batch: int = count("bundles of the first directions, B", default=1)
    own_lower: bool = choice("every client keeps a y of its own", default=False)
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
        check_counts(self, local_steps=self.local_steps, first_batch=self.first_batch)
        check_counts(self, 0, warm_start=self.warm_start)
        check_letters(self, power=2)
        check_words(self)

    @classmethod
    def effective(
        cls, hypergradient: AbstractHypergradient, *, eta: Any = 1.0, **values: Any
    ) -> "LocalBSGVRM":
        """Build from upper_step, lower_step, upper_weight and lower_weight at t = 0.

        x moves by upper_step * u, and u keeps 1 - upper_weight of its memory.
        """
        return from_effective(cls, 2, hypergradient, eta=eta, **values)

    def effective_values(self, t: int = 0) -> dict[str, float]:
        """Return the effective steps and weights at iteration t."""
        return effective_values(self.step(t), self.weight(max(t, 1)))

    def private_blocks(self) -> Pair:
        """Keep y and v on their client, if asked to."""
        return Pair(False, self.own_lower)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y); directions are formed on the clients at t = 0."""
        control = first_control(self.drift, Pair(x, y))
        return Iterate(Pair(x, y), _tree.zeros_like(Pair(x, y)), control)

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a usable previous point."""
        return no_memory(Pair(x, y), own_control(self.drift, Pair(x, y)))

    def setup(self) -> Phases:
        """Return the optional warm start of the lower level."""
        first = self.step(0).y
        return (warm_start(self.warm_start, first),) if self.warm_start else ()

    def phases(self) -> Phases:
        """Return the exchanges of a round."""
        draw = partial(hypergradient_and_slope, self.hypergradient)
        return corrected_rounds(self.local, self.drift, draw, self.local_steps)

    def point(self, server: Iterate) -> Pair:
        """Return the averaged iterate."""
        return server.point

    def step(self, t: Any) -> Pair:
        """Return rho1 eta_t and rho2 eta_t."""
        eta = at_time(self.eta, t, self.rho1)
        return Pair(self.rho1 * eta, self.rho2 * eta)

    def weight(self, t: Any) -> Pair:
        """Return a = alpha eta_{t-1}^2 and c = beta eta_{t-1}^2; 1/B at t = 0."""
        a = momentum_weight(self.alpha, self.eta, t, 2, self.first_batch)
        c = momentum_weight(self.beta, self.eta, t, 2, self.first_batch)
        return Pair(a, c)

    def local(self, message: Iterate, memory: Memory, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        p, together = self.local_steps, (Pair(True, True),)
        correction = Correction(message.point, message.control, memory.control)
        first, missed = turn.steps(p)[0], missed_steps(self.absent, memory, turn, p)

        def G(key: Key):
            maps = hypergradient_and_slope(self.hypergradient, oracle, key)
            return evaluate(correction.corrected(maps))

        def iterate(carry: tuple[Pair, Pair, Pair, Any], time: tuple[Any, Key]):
            (w, d, before, total), (t, key) = carry, time
            weight = faded(self.weight(t), missed, t == first)
            d, sample = correction.filtered(Storm(), G(key), w, before, d, weight)
            return move(w, self.step(t), d), d, w, correction.summed(total, sample)

        known = (message, Memory((memory.evaluated,), memory.index), turn, together)
        (before,) = where_evaluated(self.absent, *known, self.step, p)
        d = first_batch(G, message.point, message.direction, turn, self.first_batch)
        start = (message.point, d, before, correction.no_sum())
        w, d, before, total = local_steps(iterate, start, turn, p)
        c_k, change = correction.renewed(total, p)
        index = jnp.asarray(turn.index, jnp.int32)
        return Memory(before, index, c_k), Iterate(w, d, change)
