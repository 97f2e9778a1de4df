r"""PBGD-Free: a penalty below, and no correction above, for problems that are flat.

At every outer iteration, with samples of their own for each line:

    T_in times:  y <- y - lr_y (nu fy(x, y; xi) + gy(x, y; zeta))
    x <- x - lr_x fx(x, y; xi)

The step of x leaves out what y* changes with x. This is right only where the solution
of the lower level hardly matters to f: the paper calls such problems flat. Elsewhere
another question is answered: on the task two-client x goes to 0, where 1 is right. So
the method must be asked for by flat=yes.

A step: two gradients. On K clients slopes are averaged at every step: T_in + 1
exchanges an outer iteration, with T_in dy + dx floats up.

Reference: PBGD-Free (NeurIPS 2025), with the penalty of Shen, Chen, arXiv 2302.05185.
Deviations: the abstract was read, not the body. y, which is trained on f, too, is all
there is to report.
"""

from typing import Any

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Number, Pair, Repeat, both_samples
from fedbilevel.algorithms.one_machine._path import OneMachine, sampled
from fedbilevel.algorithms.penalty._copies import NU
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number, step, word

__all__ = ["PBGDFree"]


class PBGDFree(OneMachine):
    """Penalized lower steps, then x along fx alone; for flat problems only."""

    reference = "PBGD-Free, NeurIPS 2025; arXiv 2302.05185"
    provenance = "abstract read; listing reconstructed, unverified"
    needs_hessian = False

    lr_x: Number = step("upper", "x moves by lr_x fx")
    lr_y: Number = step("lower", "y moves by lr_y (nu fy + gy)")
    nu: Number = number(NU, default=0.01, above=0.0)
    inner_steps: int = count("steps of y for each of x, T_in", default=10, kw_only=True)
    flat: str | None = word(
        "say yes where f hardly depends on how y* changes with x",
        ("yes",),
        default=None,
        kw_only=True,
    )
    local_steps: int = count("steps of x in a round", default=1, kw_only=True)

    def __check_init__(self) -> None:
        if self.flat is None:
            raise InvalidInputError(
                "PBGD-Free moves x along fx alone, as if y* did not change with x, and "
                "ends elsewhere unless the problem is flat. If yours is, say flat=yes "
                "(--set flat=yes), else use f2sa or fed-f2sa-2."
            )

    def phases(self):
        """Return the outer iterations of a round."""
        lower = sampled("lower", self.penalized, self.moved())
        upper = sampled("upper", slope_alone, self.moved())
        return self.repeated(Repeat(self.inner_steps, (lower,)), upper)

    def penalized(self, oracle: Oracle, key: Key) -> Any:
        """Draw xi and zeta; return the map of nu fy + gy."""
        xi, zeta = both_samples(oracle, key)

        def slope(w: Pair) -> Pair:
            _, fy = oracle.upper_gradients(w.x, w.y, xi)
            gy = oracle.lower_gradient(w.x, w.y, zeta)
            return Pair(None, _tree.add_scaled(gy, self.nu, fy))

        return slope


def slope_alone(oracle: Oracle, key: Key) -> Any:
    """Draw xi; return the map of fx."""
    xi = oracle.draw_upper(key)
    return lambda w: Pair(oracle.upper_gradients(w.x, w.y, xi)[0], None)
