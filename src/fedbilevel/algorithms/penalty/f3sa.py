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
Deviations: the listing is a reconstruction. The abstract was read, not the body. The
weights are those of STORM as other methods have them. lam is constant.
"""

from dataclasses import replace
from typing import Any

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel.algorithms import Key, Number, Phase, ServerTurn, both_samples, evaluate
from fedbilevel.algorithms.one_machine import _path
from fedbilevel.algorithms.penalty._copies import NU, Copied, Copies
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, count, number, schedule, step, weight

__all__ = ["F3SA"]


class F3SA(_path.OneMachine, Copied):
    """F2SA with STORM on the directions of x and of both copies of y."""

    reference = "Kwon et al. 2023, arXiv 2301.10945"
    provenance = "abstract read; listing reconstructed, unverified"
    needs_hessian = False

    lr_x: Number = step("upper", "x moves by lr_x a u", over="a")
    lr_y: Number = step("lower", "copies of y move by lr_y a v", over="a")
    alpha: Number = weight("upper", "u forgets by alpha a^2", over="a", power=2)
    beta: Number = weight("lower", "v forgets by beta a^2", over="a", power=2)
    nu: Number = number(NU, default=0.01, above=0.0)
    a: Schedule = schedule("common shape of steps and weights over t", default=1.0)
    local_steps: int = count(_path.ITERATIONS, default=1, kw_only=True)

    def init_server(self, x, y):
        """Start with both copies at y; directions are formed at t = 0."""
        w = self.variables(x, y)
        return _path.Path(w, previous=(w, w), direction=_tree.zeros_like(w))

    def phases(self):
        """Return the iterations of a round: both copies, then x at the new y."""
        below = self.line("lower", 0, ("y", "z"), self.scheme.slopes)
        above = self.line("upper", 1, ("x",), self.scheme.slope_of_x)
        return self.repeated(below, above)

    def line(self, name: str, place: int, blocks: tuple[str, ...], maps: Any) -> Phase:
        """Return the exchange of a line; it was last evaluated at previous[place]."""

        def draw(oracle: Oracle, key: Key) -> Any:
            return evaluate(maps(oracle, self.nu, *both_samples(oracle, key)))

        def along(server: _path.Path, d: Copies, turn: ServerTurn) -> _path.Path:
            w = _path.stepped(server.point, self.step(turn.index), d)
            seen = list(server.previous)
            seen[place] = server.point
            return _path.Path(w, tuple(seen), combine(d, server.direction))

        exchange = _path.recursive(name, draw, along, self.kept, blocks)
        return replace(exchange, down=lambda s: (s.point, s.previous[place]))
