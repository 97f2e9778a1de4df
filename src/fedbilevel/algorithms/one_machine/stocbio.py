r"""stocBiO: lower steps, then one step of x along a series hypergradient.

For every outer iteration t, from the y of the last one (a warm start):

    T_in times:  y <- y - lr_y b_t gy(x, y; zeta)
    x <- x - lr_x a_t h(x, y; b)

h is a hypergradient estimator, the stochastic Neumann series in this paper, with
samples of its own for fx and fy, for the cross product and for every factor. a_t and
b_t are any schedules, constant by default. `upper_first=True` moves x before y. BSA,
TTSA and ALSET are presets of this method.

A round: p outer iterations. On K clients slopes are averaged at every step (p = 1 in
other methods' words), each client inverting its own Hessian: right only for clients
that are alike. T_in + 1 exchanges an outer iteration, with T_in dy + dx floats each
way.

Reference: Ji, Yang, Liang, arXiv 2010.07962 (ICML 2021).
Deviations: all samples have one size. In theory that of a factor shrinks with its
place. The authors' program takes one batch for all factors, loses the first term of the
series and does not scale the sum. This one does not repeat that.
"""

from fedbilevel.algorithms import Number, Pair, Repeat
from fedbilevel.algorithms.one_machine._path import ByBundle, sampled, slope
from fedbilevel.schedules import Schedule, choice, count, schedule, step

__all__ = ["StocBiO"]


class StocBiO(ByBundle):
    """T_in lower steps, then a step of x along a hypergradient by a series."""

    reference = "Ji, Yang, Liang 2021, arXiv 2010.07962"
    provenance = "the authors' program and a benchmark's read"

    lr_x: Number = step("upper", "x moves by lr_x a h", over="a")
    lr_y: Number = step("lower", "y moves by lr_y b gy", over="b")
    a: Schedule = schedule("shape of x's steps over t", default=1.0)
    b: Schedule = schedule("shape of y's steps over t", default=1.0)
    inner_steps: int = count(
        "lower steps for each step of x, T_in", default=5, kw_only=True
    )
    upper_first: bool = choice("move x before y", default=False, kw_only=True)
    local_steps: int = count("steps of x in a round", default=1, kw_only=True)

    def phases(self):
        """Return the outer iterations of a round."""
        lower = sampled("lower", slope, self.moved(every=self.inner_steps))
        below = Repeat(self.inner_steps, (lower,))
        upper = sampled("upper", self.draw, self.moved())
        order = (upper, below) if self.upper_first else (below, upper)
        return self.repeated(*order)

    def draw(self, oracle, key):
        """Draw a bundle; return the map of h alone."""
        b = self.hypergradient.draw(oracle, key)
        return lambda w: Pair(self.hypergradient(oracle, w.x, w.y, b), None)
