r"""BR-FedBiM: momentum on clients, and robust aggregation on the server.

With the three directions D_k = (nu, omega, q) of FedBiO at w = (x, y, z)
(`fedbio`), and R a rule that bears faulty replies:

    client k:  d_k <- (1 - alpha) d_k + alpha D_k(w; s),   d_k = D_k(w; s) at first
    server:    d   = R(d_1, ..., d_K),                     w <- w - step d

step is lr_x, lr_y and lr_z. Momentum makes honest replies alike, so that a rule can
distinguish more than noise: each d_k stays on its client and is never replaced by
what others sent. R is `robust`: the median of each coordinate, the geometric median, or
the mean without the largest and smallest fifth. With `mean` R is the choice of the run
(`--aggregate`), or else the mean. The more honest clients differ, the more biased every
robust rule is. With the mean the method is unbiased, as FedBiO, but bears no faults.

Exchanges an iteration: 1, with dx + 2 dy floats each way. There are no local steps. An
iteration costs a step of FedBiO.

Reference: "Single-Loop Byzantine-Resilient Federated Bilevel Optimization", ICLR 2026
(BR-FedBiM), of which an abstract was read; arXiv 2012.10333 for momentum and rules.
Deviations: the listing is a reconstruction. A client that was absent continues from its
old d_k.
"""

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel.algorithms import Number, Triple, Turn, three_directions
from fedbilevel.algorithms.one_machine._path import ITERATIONS, EachStep, at_point
from fedbilevel.algorithms.parts import Memory, evaluate, no_memory
from fedbilevel.channels import Channel, GeometricMedian, Mean, Median, TrimmedMean
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, step, weight, word

__all__ = ["BRFedBiM"]


# Made when they are asked for: a module computes nothing when it is imported.
ROBUST = {
    "median": Median,
    "geometric-median": GeometricMedian,
    "trimmed-mean": lambda: TrimmedMean(0.2),
    "mean": Mean,
}


class BRFedBiM(EachStep):
    """Momentum of clients on x, y and z, reduced by a rule that bears faults."""

    reference = "BR-FedBiM, ICLR 2026; arXiv 2012.10333"
    provenance = "abstract read; listing reconstructed, unverified"
    moves = ("x", "y", "z")

    lr_x: Number = step("upper", "x moves by lr_x d")
    lr_y: Number = step("lower", "y moves by lr_y d")
    lr_z: Number = step("auxiliary", "z moves by lr_z d")
    alpha: Number = weight("upper", "what d_k forgets of itself in a step")
    robust: str = word(
        "the rule R of the server", tuple(ROBUST), default="median", kw_only=True
    )
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_client(self, x, y):
        """Start without momentum."""
        return no_memory(self.variables(x, y))

    def channel(self):
        """Reduce replies by the rule."""
        return Channel((), ROBUST[self.robust]())

    def phases(self):
        """Return the iterations of a round."""
        return self.repeated(at_point("step", self.momentum, self.moved()))

    def momentum(self, w: Triple, memory: Memory, oracle: Oracle, turn: Turn):
        """Return d_k, and keep it."""
        D = evaluate(three_directions(oracle, turn.keys(1)[0]))(w)
        kept = _tree.scale(1 - self.alpha, memory.evaluated)
        d = _tree.add_scaled(kept, self.alpha, D)
        d = _tree.select(jnp.asarray(memory.index) < 0, D, d)
        return Memory(d, jnp.asarray(turn.index, jnp.int32)), d
