r"""F2SA-p: loops on copies of y by gradients alone, then a step of x, to degree 4.

The copies y_j follow argmin_y j nu f + g for a few j. a_j are weights of a difference
of degree p (`_copies.py` has both, for p from 1 to 4). At every outer iteration t,
with samples xi and zeta of their own for each line, which all copies share:

    T_in times:  y_j <- y_j - lr_y s_t (j nu_t fy(x, y_j; xi) + gy(x, y_j; zeta))
    x <- x - lr_x s_t sum_j a_j (j fx(x, y_j; xi) + gx(x, y_j; zeta) / nu_t)

with nu_t = nu b_t, s_t = a_t. The bias is O(nu^p). p = 2 costs what p = 1 does, with
y_1 and y_-1. The reported y is y_0, or its estimate by the copies: (y_1 + y_-1)/2.

A round: `local_steps` outer iterations. On K clients slopes are averaged at every step,
which is right where clients differ: T_in + 1 exchanges an outer iteration, each with
all copies or x, up and down. A step costs a gradient of each level for each copy.

Reference: arXiv 2509.02937 (ICLR 2026).
Deviations: updates as in the authors' program, where a loop begins with all copies of
one sign of j at their mean (`begin=sides`): that leaves an error unless T_in is large.
Here each copy continues from its last point. The step of x is not divided by the norm
of h, as that of the paper's analysis is. All copies start at y.
"""

from typing import Any

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel.algorithms import at_time, both_samples, evaluate
from fedbilevel.algorithms.base import Phase, Repeat, ServerTurn, Turn, with_turn
from fedbilevel.algorithms.one_machine._path import OneMachine, Path, at_point, stepped
from fedbilevel.algorithms.penalty._copies import BEGINNINGS, NU, OWN, Copies, OfDegree
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Number, Schedule, count, number, schedule, step, word

__all__ = ["F2SAP"]


class F2SAP(OneMachine, OfDegree):
    """Loops on copies of y by gradients alone, then a step of x; degree 1 to 4."""

    reference = "F2SA-p, arXiv 2509.02937"
    provenance = "the authors' program read"
    needs_hessian = False

    lr_x: Number = step("upper", "x moves by lr_x a h", over="a")
    lr_y: Number = step(
        "lower", "copies of y move by lr_y a times their slopes", over="a"
    )
    nu: Number = number(NU, default=0.01, above=0.0)
    a: Schedule = schedule("common shape of the steps over t", default=1.0)
    b: Schedule = schedule("shape of nu over t", default=1.0)
    degree: int = count("power of nu in the bias, p: 1 to 4", default=2, kw_only=True)
    inner_steps: int = count(
        "steps of the copies for each of x, T_in", default=10, kw_only=True
    )
    begin: str = word(
        "where a loop on copies begins: each where it stood, those of one sign of j at "
        "their mean, or all at y_1",
        BEGINNINGS,
        default=OWN,
        kw_only=True,
    )
    local_steps: int = count("steps of x in a round", default=1, kw_only=True)

    def phases(self):
        """Return the outer iterations of a round."""
        begun, up = with_turn(self.begun), with_turn(self.lower_step)
        slopes = self.sampled(self.scheme.slopes, self.inner_steps)
        below = Repeat(self.inner_steps, (Phase("lower", begun, slopes, up),))
        h = self.sampled(self.scheme.slope_of_x, 1)
        return self.repeated(below, at_point("upper", h, self.moved()))

    def nu_at(self, t):
        """Return nu b_t."""
        return self.nu * at_time(self.b, t, self.nu)

    def begun(self, server: Path, turn: ServerTurn) -> Copies:
        """Return where the copies are, at the beginning of a loop where they begin."""
        if self.begin == OWN:
            return server.point
        first = jnp.asarray(turn.index % self.inner_steps == 0)
        begin = self.scheme.begun(server.point, self.begin)
        return _tree.select(first, begin, server.point)

    def sampled(self, maps: Any, every: int) -> Any:
        """Return a client's work: values of maps, each sampled with nu_t."""

        def local(w: Copies, client: None, oracle: Oracle, turn: Turn):
            samples = both_samples(oracle, turn.keys(1)[0])
            nu = self.nu_at(turn.index // every)
            return client, evaluate(maps(oracle, nu, *samples))(w)

        return local

    def lower_step(self, server: Path, D: Copies, turn: ServerTurn) -> Path:
        """Move the copies, from where their loop begins."""
        steps = self.step(turn.index // self.inner_steps)
        return Path(stepped(self.begun(server, turn), steps, D))
