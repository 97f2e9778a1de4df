r"""E-AiPOD: lower steps that skip exchanges by a coin, with controls, then FedOut.

One y for all clients is an equality constraint, and c_k its multiplier: the lower level
is ProxSkip. Client k keeps c_k between rounds, from 0. For every round:

    T_in times (1 exchange each), from y_k = y:
        repeat:  y_k -= lr_y (gy_k(x, y_k; zeta) - c_k)
                 until a coin that all share shows heads, chance pr; S times at most
        y = mean y_k,   c_k += (pr/lr_y) (y - y_k)
    FedIHGP and FedOut of FedNest for x (`fednest`)

An exchange comes after 1/pr steps in the mean. The controls take up what clients differ
in, and their mean stays 0, so that with exact oracles the limit is unbiased for every
pr, without FedNest's anchors. With pr = 1 controls are not used: y moves along mean gy.

Exchanges a round: T_in + N' + 3. Floats a client and round, each way:
(T_in + 1 + N') dy + 2 dx. c_k is renewed when the next y arrives.

Reference: Xiao, Shen, Yin, Chen, arXiv 2211.07096 (alternating projected SGD, AiPOD).
Deviations: the updates were read in the authors' program. There S lower steps make a
round, exchanges happen S pr times in the mean, and FedIHGP and FedOut are run at each
client's own y_k, which are one y only if the last coin showed heads. Here exchanges are
counted and steps drawn, so that x moves at a y that all agree on. Steps after the coin
are computed, but not taken. All clients take part in lower exchanges. One that missed
the last one leaves c_k as it was.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Lower, Number, Pair, Repeat, Turn
from fedbilevel.algorithms.nested._nest import WithSeries, moving
from fedbilevel.algorithms.parts import Memory, move, no_memory
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number

__all__ = ["EAiPOD"]


class EAiPOD(WithSeries):
    """Controlled lower steps with an exchange by a coin, a federated series above."""

    reference = "Xiao et al. 2023, arXiv 2211.07096"
    provenance = "updates read in the authors' program"

    lr_y: Number = number("y moves by lr_y (gy - c_k)", step="lower", kw_only=True)
    probability: Number = number(
        "chance that a lower step ends in an exchange, pr",
        default=0.3,
        above=0.0,
        most=1.0,
        kw_only=True,
    )
    inner_rounds: int = count(
        "lower exchanges in a round, T_in", default=5, kw_only=True
    )
    longest: int = count(
        "most lower steps before an exchange, S", default=20, kw_only=True
    )

    def init_client(self, x, y):
        """Start with c_k = 0."""
        return no_memory(y, _tree.zeros_like(y))

    def phases(self):
        """Return the lower exchanges, the series, and one upper update."""
        lower = moving("y", "lower", self.lower_steps, everyone=True)
        above = self.upper_update(self.local_steps)
        return (Repeat(self.inner_rounds, (lower,)), *above)

    def lower_steps(self, point: Pair, memory: Memory, oracle: Oracle, turn: Turn):
        """Renew c_k by the y that arrived; make lower steps until the coin."""
        c, factor = memory.control, self.probability / self.lr_y
        rest = _tree.subtract(point.y, memory.evaluated)
        renewed = _tree.add_scaled(c, factor, rest)
        c = _tree.select(memory.index == turn.index - 1, renewed, c)

        def step(y: Lower, time: tuple[Array, Key]) -> tuple[Lower, None]:
            goes_on, key = time
            slope = oracle.lower_gradient(point.x, y, oracle.draw_lower(key))
            moved = move(y, self.lr_y, _tree.subtract(slope, c))
            return _tree.select(goes_on, moved, y), None

        coins = jr.bernoulli(turn.shared, self.probability, (self.longest,))
        heads = coins.astype(jnp.int32)
        # Those steps are made before which no coin showed heads.
        made = jnp.cumsum(heads) == heads
        y, _ = jax.lax.scan(step, point.y, (made, turn.keys(self.longest)))
        return Memory(y, jnp.asarray(turn.index, jnp.int32), c), y
