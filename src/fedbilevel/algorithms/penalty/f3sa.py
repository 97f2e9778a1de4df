r"""F3SA: F2SA with STORM on the directions of x and of both copies of y.

At every iteration t, with nu_t = nu, lam = 1/nu, one sample for each of the two lines,
and before: where the same line was evaluated in the last iteration:

    D(y_l) = nu fy(x, y_l; xi) + gy(x, y_l; zeta),    D(y_s) = gy(x, y_s; zeta)
    v <- D + (1 - beta a_{t-1}^2) (v - D(before)),    y <- y - lr_y a_t v    both copies
    D(x) = fx(x, y_l; xi) + lam (gx(x, y_l; zeta) - gx(x, y_s; zeta))    at the new y
    u <- D + (1 - alpha a_{t-1}^2) (u - D(before)),   x <- x - lr_x a_t u

First directions by direct evaluation. y_s is reported. With alpha = beta = a = 1 it is
F2SA (`fedbilevel.algorithms.presets`) at T_in = 1.

A step costs twice F2SA's. On K clients directions are averaged at every step, which is
right where clients differ: 2 exchanges an iteration, with dx + 2 dy floats up.

Reference: Kwon, Kwon, Wright, Nowak, arXiv 2301.10945 (ICML 2023).
Deviations: the listing is a reconstruction, the abstract was read, not the body. The
weights are those of STORM as other methods have them; lam is constant.
"""

from dataclasses import replace
from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phases,
    Repeat,
    ServerTurn,
    with_turn,
)
from fedbilevel.algorithms.directions import both_samples
from fedbilevel.algorithms.one_loop import at_time, evaluate, momentum_weight
from fedbilevel.algorithms.one_machine._path import (
    ITERATIONS,
    Path,
    kept_differences,
    stepped,
)
from fedbilevel.algorithms.penalty._copies import FIRST_DEGREE, NU, Copies
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, count, number, schedule, weight

__all__ = ["F3SA"]


class F3SA(AbstractAlgorithm):
    """F2SA with STORM on the directions of x and of both copies of y."""

    reference: ClassVar[str] = "Kwon et al. 2023, arXiv 2301.10945"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"
    answers: ClassVar[str] = "single machine"
    pools: ClassVar[bool] = True
    needs_hessian: ClassVar[bool] = False

    lr_x: Number = number("x moves by lr_x a u", step="upper")
    lr_y: Number = number("copies of y move by lr_y a v", step="lower")
    alpha: Number = weight("upper", "u forgets by alpha a^2", over="a", power=2)
    beta: Number = weight("lower", "v forgets by beta a^2", over="a", power=2)
    nu: Number = number(NU, default=0.01, above=0.0)
    a: Schedule = schedule("common shape of steps and weights over t", default=1.0)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start with both copies at y; directions are formed at t = 0."""
        w = FIRST_DEGREE.copies(x, y)
        return Path(w, previous=(w, w), direction=_tree.zeros_like(w))

    def phases(self) -> Phases:
        """Return the iterations of a round."""
        kept, up = self.kept_below, with_turn(self.lower_step)
        lower = kept_differences("lower", self.slopes, kept, up)
        kept, up = self.kept_above, with_turn(self.upper_step)
        upper = kept_differences("upper", self.slope_of_x, kept, up)
        both = (
            replace(lower, down=lambda server: (server.point, server.previous[0])),
            replace(upper, down=lambda server: (server.point, server.previous[1])),
        )
        return (Repeat(self.local_steps, both),)

    def point(self, server: Path) -> Pair:
        """Return x and y_s."""
        return FIRST_DEGREE.point(server.point)

    def slopes(self, oracle: Oracle, key: Key) -> Any:
        """Draw xi and zeta; return the map of the copies' slopes."""
        samples = both_samples(oracle, key)
        return evaluate(FIRST_DEGREE.slopes(oracle, self.nu, *samples))

    def slope_of_x(self, oracle: Oracle, key: Key) -> Any:
        """Draw xi and zeta; return the map of h."""
        samples = both_samples(oracle, key)
        return evaluate(FIRST_DEGREE.slope_of_x(oracle, self.nu, *samples))

    def kept_below(self, t: Any) -> Copies:
        """Return what v keeps of itself: nothing at t = 0."""
        return FIRST_DEGREE.copies(None, 1 - momentum_weight(self.beta, self.a, t, 2))

    def kept_above(self, t: Any) -> Copies:
        """Return what u keeps of itself: nothing at t = 0."""
        return FIRST_DEGREE.copies(1 - momentum_weight(self.alpha, self.a, t, 2), None)

    def lower_step(self, server: Path, fresh: Copies, turn: ServerTurn) -> Path:
        """Correct v, and move the copies."""
        kept, (_, above) = self.kept_below(turn.index), server.previous
        return self._moved(server, fresh, kept, (server.point, above), turn)

    def upper_step(self, server: Path, fresh: Copies, turn: ServerTurn) -> Path:
        """Correct u, and move x."""
        kept, (below, _) = self.kept_above(turn.index), server.previous
        return self._moved(server, fresh, kept, (below, server.point), turn)

    def _moved(
        self, server: Path, fresh: Copies, kept: Copies, seen: Any, turn: ServerTurn
    ) -> Path:
        a = at_time(self.a, turn.index, self.lr_x)
        d = corrected(fresh, kept, server.direction)
        steps = FIRST_DEGREE.copies(self.lr_x * a, self.lr_y * a)
        w = stepped(server.point, steps, d)
        return Path(w, previous=seen, direction=combine(d, server.direction))


def corrected(fresh: Copies, kept: Copies, direction: Copies) -> Copies:
    """Return fresh + kept times the old direction, where something is kept."""

    def block(name: str) -> Any:
        factor = getattr(kept, name)
        if factor is None:
            return None
        return _tree.add_scaled(getattr(fresh, name), factor, getattr(direction, name))

    return replace(fresh, x=block("x"), y=block("y"), z=block("z"))
