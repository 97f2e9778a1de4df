r"""AggITD: a hypergradient that is computed while the lower level is optimized.

For every round, from y^0 = y, with m uniform on {0..N-1}:

    t = 0..N-1 (2 exchanges each):  y^{t+1} = FedInn(x, y^t)           tau local steps
    z begins with y^{N-m}:          z = lam N mean_i fy_i(x, y^{N-m}; xi_i)
    at each later y^t, t <= N:      z <- mean_i (z - lam hvp_i(x, y^t; zeta_i)[z])
    FedOut (2 exchanges):           h = mean_i (fx_i - jvp_i[z]) at (x, y^N)
        x_i = x;  tau times:  x_i -= (alpha/tau) (h - fx_i(x, y^N) + fx_i(x_i, y^N))
        x   = mean_i x_i

z travels with the anchors of FedInn, and once more at y^N, so that it needs no
exchanges of its own, as FedNest's series does (`fednest`). fy is taken at an
intermediate iterate and Hessians are applied in the order of time: that is not
reverse-mode unrolling. Every factor is averaged, so it is unbiased where clients
differ. `random_length=False` has the sum over all beginnings in the place of one,

    z <- mean_i (z - lam hvp_i(x, y^t; zeta_i)[z] + lam fy_i(x, y^t; xi_i)),  t = 1..N

from z = 0. If y^0 is the solution, that is the Neumann series of N terms.

Exchanges a round: 2 N + 3. Floats a client and round, each way: (3 N + 1) dy + 2 dx; a
random beginning is one whole number more, in every anchor.

Reference: Xiao, Ji, arXiv 2302.04969 (ICML 2023).
Deviations: the listing is a reconstruction. The paper's abstract was read, not its
body. z is sent, and computed, before it begins, too.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Pair
from fedbilevel.algorithms.base import Phase, Repeat, ServerTurn, Turn, with_turn
from fedbilevel.algorithms.nested import _nest
from fedbilevel.hypergradient._base import check_step
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Effective, choice, count, number

__all__ = ["AggITD"]


class AggITD(_nest.Nested):
    """A federated series that travels with the lower steps."""

    reference = "Xiao, Ji 2023, arXiv 2302.04969"
    provenance = "abstract read; listing reconstructed, unverified"

    beta: Number = _nest.whole_step("lower", "y")
    lam: Number = number(
        "step of the series, below 1/L1",
        step="lower",
        effective=Effective(("theta",)),
        kw_only=True,
    )
    terms: int = count("lower updates, and terms of the series, N", kw_only=True)
    random_length: bool = choice(
        "draw where the series begins, and let it stand for all beginnings",
        default=True,
        kw_only=True,
    )

    def check(self, curvature: float, client: int) -> None:
        """Raise if lam is too large for the series."""
        check_step("AggITD", "lam", self.lam, curvature, client)

    def init_server(self, x, y):
        """Start at (x, y); where a series begins is drawn in every round."""
        zero, h = _tree.zeros_like(y), _tree.zeros_like(x)
        begins = jnp.ones((), jnp.int32) if self.random_length else None
        return _nest.Nest(Pair(x, y), q=zero, term=zero, h=h, begins=begins)

    def phases(self):
        """Return N lower updates with the series, its end, and one upper update."""

        def with_z(server: _nest.Nest) -> tuple[Pair, Lower | None, Array | None]:
            return server.point, server.term, server.begins

        _, correct = _nest.fed_inn(self.beta, self.local_steps)
        anchor = Phase("inner_anchor", with_z, self.anchored, with_turn(self.anchor))
        end = Phase("series_end", with_z, self.last, lambda s, z: replace(s, term=z))
        outer = _nest.fed_out(self.alpha, self.local_steps)
        return (Repeat(self.terms, (anchor, correct)), end, *outer)

    def anchored(self, message: Any, client: None, oracle: Oracle, turn: Turn):
        """Return gy at y^t, and what becomes of z there."""
        (point, _, _), t = message, turn.index % self.terms
        for_zeta, *for_z = turn.keys(3)
        zeta = oracle.draw_lower(for_zeta)
        gy = oracle.lower_gradient(point.x, point.y, zeta)
        return client, (gy, self.longer(message, oracle, for_z, t))

    def anchor(self, server: _nest.Nest, reply: tuple[Lower, Lower], turn: ServerTurn):
        """Take the mean slope and z; draw at t = 0 where z begins."""
        (q, z), begins = reply, server.begins
        if begins is not None:
            drawn = jr.randint(turn.shared, (), 1, self.terms + 1, jnp.int32)
            begins = jnp.where(turn.index % self.terms == 0, drawn, begins)
        return replace(server, q=q, term=z, begins=begins)

    def last(self, message: Any, client: None, oracle: Oracle, turn: Turn):
        """Return what becomes of z at y^N."""
        return client, self.longer(message, oracle, turn.keys(2), self.terms)

    def longer(self, message: Any, oracle: Oracle, keys: Any, t: Any) -> Lower:
        """Return z after y^t: longer by a factor, begun, or 0 before that."""
        (point, z, begins), (for_xi, for_zeta) = message, keys
        xi, zeta = oracle.draw_upper(for_xi), oracle.draw_lower(for_zeta)
        _, fy = oracle.upper_gradients(point.x, point.y, xi)
        product = oracle.hessian_product(point.x, point.y, z, zeta)
        longer = _tree.add_scaled(z, -self.lam, product)
        if begins is None:
            begun = _tree.add_scaled(longer, self.lam, fy)
            return _tree.select(jnp.asarray(t > 0), begun, _tree.zeros_like(z))
        first = _tree.scale(self.terms * self.lam, fy)
        begun = _tree.select(t == begins, first, _tree.zeros_like(z))
        return _tree.select(t > begins, longer, begun)
