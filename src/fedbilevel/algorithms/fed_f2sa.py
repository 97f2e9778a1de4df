r"""Fed-F2SA: local steps along gradients alone, with a penalty in place of a Hessian.

Client k at every local iteration, samples xi, zeta and zeta', lam = 1/nu:

    y_l <- y_l - lr_y (nu fy_k(x, y_l; xi) + gy_k(x, y_l; zeta))
    y_s <- y_s - lr_y gy_k(x, y_s; zeta)
    x   <- x - lr_x (fx_k(x, y_l; xi) + lam (gx_k(x, y_l; zeta') - gx_k(x, y_s; zeta')))
    every p iterations:  x, y_l, y_s <- mean over clients

That is degree 1, whose limit is O(nu) away from the solution; y_s, which was trained at
x without a penalty, is what is reported. Higher degrees have other copies of y and
weights (`_penalty.py`); with degree 2, at the same cost, O(nu^2):

    y_+- <- y_+- - lr_y (+- nu fy_k(x, y_+-; xi) + gy_k(x, y_+-; zeta))
    x    <- x - lr_x ((fx_k(x, y_+; xi) + fx_k(x, y_-; xi)) / 2
                      + (lam/2) (gx_k(x, y_+; zeta') - gx_k(x, y_-; zeta')))

where (y_+ + y_-)/2 is reported. Orders 3 and 4 have four copies.

No inverse is averaged, so the limit does not change where clients differ (p = 1), up to
a drift of order lr p (p > 1), of which `drift` leaves nothing: every direction d is
corrected as FedBiO's are (`_drift.py`):

    controls:  d <- d - c_k + c       anchor:  d <- d - d(w_0) + c

Exchanges a round: 1, with dx + 2 dy floats each way (dx + 4 dy from degree 3 on); twice
as many floats with controls, and with an anchor, in 2 exchanges. A step: two gradients
of g for each copy, and two of f for each that has a penalty, which are the same unless
`alternating`.

Reference: Kwon, Kwon, Wright, Nowak, arXiv 2301.10945 (ICML 2023), for F2SA;
arXiv 2509.02937 (ICLR 2026) for higher degrees.
Deviations: the federated form is ours. nu is constant. All lines use the old point;
`alternating=True` moves the copies of y, then x at their fresh values. All copies start
at y.
"""

from typing import Any, ClassVar

import jax.random as jr

from fedbilevel._blocks import combine
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Balance, Phases, Turn
from fedbilevel.algorithms._drift import (
    DRIFT,
    Correction,
    corrected_rounds,
    first_control,
    own_control,
)
from fedbilevel.algorithms._local import (
    Iterate,
    check_counts,
    check_words,
    evaluate,
    local_steps,
    move,
    only,
)
from fedbilevel.algorithms._penalty import (
    NU,
    Copies,
    check_balance,
    check_nu,
    scheme_of,
)
from fedbilevel.problem import Oracle
from fedbilevel.schedules import choice, count, number, word

__all__ = ["FedF2SA"]


class FedF2SA(AbstractAlgorithm):
    """Local steps on x and two copies of y by gradients alone, averaged."""

    reference: ClassVar[str] = "Kwon et al. 2023, arXiv 2301.10945; arXiv 2509.02937"
    provenance: ClassVar[str] = "ours: a known method made federated"
    needs_hessian: ClassVar[bool] = False

    lr_x: Number = number("x moves by lr_x h", step="upper")
    lr_y: Number = number("copies of y move by lr_y times their slopes", step="lower")
    nu: Number = number(NU, default=0.01)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    degree: int = count(
        "power of nu in the bias: 1 to 4; 3 and 4 have four copies of y",
        default=1,
        kw_only=True,
    )
    alternating: bool = choice(
        "move the copies of y, then x at their fresh values",
        default=False,
        kw_only=True,
    )
    drift: str | None = word(
        "how local steps are corrected", DRIFT, default=None, kw_only=True
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        check_words(self)
        check_nu(self)
        scheme_of(self)

    def check_balance(self, curvatures: Balance) -> None:
        """Raise if f curves too much for what is taken from g."""
        check_balance(self, self.nu, curvatures)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start with all copies at y."""
        w = scheme_of(self).copies(x, y)
        return Iterate(w, control=first_control(self.drift, w))

    def init_client(self, x: Upper, y: Lower) -> Copies | None:
        """Start with c_k = 0, if there are controls; else clients keep nothing."""
        return own_control(self.drift, scheme_of(self).copies(x, y))

    def phases(self) -> Phases:
        """Return the exchanges of a round."""
        return corrected_rounds(
            self.local, self.drift, self.directions, self.local_steps
        )

    def point(self, server: Iterate) -> Pair:
        """Return x and y_s, or what the copies tell of it."""
        return scheme_of(self).point(server.point)

    def watched(self, server: Iterate) -> tuple[Lower, ...]:
        """Return all copies: what is reported may stand still between two of them."""
        return scheme_of(self).of(server.point)

    def directions(self, oracle: Oracle, key: Key) -> Copies:
        """Draw xi, zeta and zeta'; return the maps of h and of the copies' slopes."""
        for_xi, for_y, for_x = jr.split(key, 3)
        xi, scheme = oracle.draw_upper(for_xi), scheme_of(self)
        below = scheme.slopes(oracle, self.nu, xi, oracle.draw_lower(for_y))
        above = scheme.slope_of_x(oracle, self.nu, xi, oracle.draw_lower(for_x))
        return combine(above, below)

    def local(self, message: Iterate, c_k: Copies | None, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        each = scheme_of(self).copies
        steps = each(self.lr_x, self.lr_y)
        at_once, in_turn = (each(True, True),), (each(False, True), each(True, False))
        correction = Correction(message.point, message.control, c_k)

        def iterate(carry: tuple[Copies, Copies | None], time: tuple[Any, Key]):
            (w, total), (_, key) = carry, time
            G, taken = correction.corrected(self.directions(oracle, key)), []
            for group in in_turn if self.alternating else at_once:
                d = evaluate(only(G, group))(w)
                moved = move(only(w, group), only(steps, group), d)
                w = combine(moved, w)
                taken.append(d)
            return w, correction.summed(total, *taken)

        start = (message.point, correction.no_sum())
        w, total = local_steps(iterate, start, turn, self.local_steps)
        c_k, change = correction.renewed(total, self.local_steps)
        return c_k, Iterate(w, control=change)
