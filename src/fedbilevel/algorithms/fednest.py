r"""FedNest: T_in anchored lower updates, a federated inverse, one anchored upper step.

For every round, with S a fresh cohort of clients in each exchange:

    FedInn, T_in times (2 exchanges each):
        q   = mean_i gy_i(x, y; zeta_i)
        y_i = y;  tau times:
            y_i -= (beta/tau) (gy_i(x, y_i; zeta) - gy_i(x, y; zeta) + q)
        y   = mean_i y_i
    FedIHGP (1 + N' exchanges), N' uniform on {0..N-1}:
        p_0 = (N/ell) mean_i fy_i(x, y; xi_i)
        p_m = mean_i (p_{m-1} - (1/ell) hvp_i(x, y; zeta_{i,m})[p_{m-1}]),  m = 1..N'
    FedOut (2 exchanges), z = p_{N'}:
        h   = mean_i (fx_i(x, y; xi_i) - jvp_i(x, y; zeta_i)[z])
        x_i = x;  tau times:  x_i -= (alpha/tau) (h - fx_i(x, y; xi) + fx_i(x_i, y; xi))
        x   = mean_i x_i

One sample at both points of a difference. Every factor of the series is averaged, so
it inverts the mean Hessian: unbiased where clients differ. `random_length=False` sums
the whole series instead, z = (1/ell) sum_{m=0..N} r_m with r_0 = mean fy, N factors.

Exchanges a round: 2 T_in + N' + 3 (N' = N for the whole series). Floats a client and
round, each way: 2 T_in dy + (1 + N') dy + 2 dx; down, that is what is new to a client
that took part before, and one that did not also needs x and y.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, arXiv 2205.02215 (ICML 2022).
`anchored=False` takes LFedInn in place of FedInn: that is FedNest-SGD
(`fedbilevel.algorithms.fednest_sgd`).
Deviations: tau is the same on all clients. Random length and scaling of the series are
from memory. The authors' program differs in many ways (its Neumann vectors are never
averaged, steps are not divided by tau); this is the paper's structure.
"""

from dataclasses import replace
from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Repeat, Turn
from fedbilevel.algorithms._local import check_counts
from fedbilevel.algorithms._nest import Nest, fed_inn, light_fed_inn, new_x, walk
from fedbilevel.errors import ClientInputError
from fedbilevel.estimators import at_both
from fedbilevel.problem import Oracle
from fedbilevel.schedules import choice, count, is_known, number

__all__ = ["FedNest"]


class FedNest(AbstractAlgorithm):
    """Anchored lower and upper steps around a federated Neumann series."""

    reference: ClassVar[str] = "Tarzanagh et al. 2022, arXiv 2205.02215"
    provenance: ClassVar[str] = "authors' program and table read; details from memory"
    allows_private: ClassVar[bool] = False

    alpha: Number = number(
        "whole step of x, walked in tau parts", step="upper", kw_only=True
    )
    beta: Number = number(
        "whole step of y, walked in tau parts", step="lower", kw_only=True
    )
    inner_rounds: int = count("lower updates in a round, T_in", kw_only=True, default=5)
    local_steps: int = count("parts of a step, tau", kw_only=True)
    ell: Number = number("bound of the curvature, above L1", step="bound", kw_only=True)
    terms: int = count("terms of the series, N", kw_only=True)
    random_length: bool = choice(
        "draw the number of factors, and let the last term stand for the sum",
        default=True,
        kw_only=True,
    )
    anchored: bool = choice(
        "correct lower steps by an anchor", default=True, kw_only=True
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps, inner_rounds=self.inner_rounds)
        check_counts(self, 1 if self.random_length else 0, terms=self.terms)

    def check(self, curvature: float, client: int) -> None:
        """Raise unless ell bounds the curvature, as the series needs."""
        if is_known(self.ell) and float(self.ell) <= curvature:
            raise ClientInputError(
                client,
                f" L1 is about {curvature:.4g} at the start, so use at least "
                f"{1.01 * curvature:.4g}.",
                f"`FedNest(ell={float(self.ell):.4g})`: the series needs ell > L1; on ",
            )

    def init_server(self, x: Upper, y: Lower) -> Nest:
        """Start at (x, y) with empty anchors, where there will be some."""
        zero = _tree.zeros_like(y)
        return Nest(
            Pair(x, y),
            q=zero if self.anchored else None,
            term=zero,
            total=None if self.random_length else zero,
            h=_tree.zeros_like(x),
        )

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients are stateless."""

    def phases(self) -> Phases:
        """Return T_in lower updates, the series, and one upper update."""
        inner = fed_inn if self.anchored else light_fed_inn
        below = inner(self.beta, self.local_steps)
        return (Repeat(self.inner_rounds, below), *self.fed_ihgp(), *self.fed_out())

    def point(self, server: Nest) -> Pair:
        """Return the server's point."""
        return server.point

    def fed_ihgp(self) -> Phases:
        """Return the series: p_0, then one exchange a factor."""
        factors = self.terms - 1 if self.random_length else self.terms

        def slope_of_f(point: Pair, client: None, oracle: Oracle, turn: Turn):
            xi = oracle.draw_upper(turn.keys(1)[0])
            return client, oracle.upper_gradients(point.x, point.y, xi)[1]

        def first(server: Nest, fy: Lower) -> Nest:
            scale = self.terms if self.random_length else 1
            p = _tree.scale(scale / self.ell, fy)
            return replace(server, term=p, total=None if self.random_length else p)

        def factor(message: Any, client: None, oracle: Oracle, turn: Turn):
            point, p = message
            zeta = oracle.draw_lower(turn.keys(1)[0])
            product = oracle.hessian_product(point.x, point.y, p, zeta)
            return client, _tree.add_scaled(p, -1 / self.ell, product)

        def longer(server: Nest, p: Lower) -> Nest:
            total = None if self.random_length else _tree.add(server.total, p)
            return replace(server, term=p, total=total)

        one_factor = Phase(
            "series_factor",
            lambda s: (s.point, s.term),
            factor,
            longer,
            about=lambda message: message[1],
        )
        return (
            Phase("series_start", lambda s: s.point, slope_of_f, first),
            Repeat(factors, (one_factor,), random=self.random_length),
        )

    def fed_out(self) -> Phases:
        """Return the anchor h, and the corrected steps on x."""

        def with_z(server: Nest) -> tuple[Pair, Lower | None]:
            return server.point, server.term if self.random_length else server.total

        def hypergradient(message: Any, client: None, oracle: Oracle, turn: Turn):
            point, z = message
            for_xi, for_zeta = turn.keys(2)
            xi, zeta = oracle.draw_upper(for_xi), oracle.draw_lower(for_zeta)
            fx, _ = oracle.upper_gradients(point.x, point.y, xi)
            indirect = oracle.cross_product(point.x, point.y, z, zeta)
            return client, _tree.subtract(fx, indirect)

        def correct(message: Any, client: None, oracle: Oracle, turn: Turn):
            point, h = message

            def slope(x: Upper, key: Key) -> Upper:
                xi = oracle.draw_upper(key)

                def direct(at: Upper) -> Upper:
                    return oracle.upper_gradients(at, point.y, xi)[0]

                now, at_anchor = at_both(direct, x, point.x)
                return _tree.add(h, _tree.subtract(now, at_anchor))

            return client, walk(point.x, self.alpha, turn, self.local_steps, slope)

        return (
            Phase("outer_anchor", with_z, hypergradient, lambda s, h: replace(s, h=h)),
            Phase(
                "outer_correct",
                lambda s: (s.point, s.h),
                correct,
                new_x,
                about=lambda message: message[0].x,
                moves=True,
            ),
        )
