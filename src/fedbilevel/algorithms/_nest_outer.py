"""The upper updates of the FedNest family: FedOut and LFedOut."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import equinox as eqx
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Pair, Upper
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._base import Phase, Phases, Repeat, Turn
from fedbilevel.algorithms._nest import (
    AbstractNest,
    Nest,
    check_inverse,
    local_descent,
    new_x,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import at_both
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_number

__all__ = ["AbstractFedOut", "AbstractLightOut"]


class AbstractFedOut(AbstractNest):
    """FedOut: the series is averaged after every factor, so it inverts Hbar.

    `ell` bounds the curvature. With `random_length` the number of factors is uniform on
    {0..terms-1} and the last term stands for the sum; without, `terms` factors give a
    sum of terms + 1.
    """

    ell: Float[Array, "..."] = eqx.field(converter=as_number, kw_only=True)
    terms: int = eqx.field(static=True, kw_only=True)
    random_length: bool = eqx.field(static=True, default=True, kw_only=True)

    def __check_init__(self) -> None:
        least = 1 if self.random_length else 0
        if self.terms < least:
            raise InvalidInputError(
                f"`{type(self).__name__}(terms=...)` must be at least {least}, got "
                f"{self.terms}."
            )

    def check(self, curvature: float, client: int) -> None:
        """Raise if ell does not bound the curvature."""
        check_inverse(type(self).__name__, self.ell, curvature, client)

    def init_server(self, x: Upper, y: Lower) -> Nest:
        """Start at (x, y) with empty anchors."""
        zero = _tree.zeros_like(y)
        return replace(
            super().init_server(x, y),
            term=zero,
            total=None if self.random_length else zero,
            h=_tree.zeros_like(x),
        )

    def outer(self) -> Phases:
        """Return the series, the anchor h, and the corrected steps on x."""
        factors = self.terms - 1 if self.random_length else self.terms
        factor = Phase(
            "series_factor",
            lambda s: (s.point, s.term),
            self._factor,
            self._longer,
            about=lambda message: message[1],
        )
        correct = Phase(
            "outer_correct",
            lambda s: (s.point, s.h),
            self._correct,
            new_x,
            about=lambda message: message[0].x,
        )
        return (
            Phase("series_start", lambda s: s.point, self._slope_of_f, self._shortest),
            Repeat(factors, (factor,), random=self.random_length),
            Phase("outer_anchor", self._z, self._hypergradient, _new_h),
            correct,
        )

    def _slope_of_f(self, point: Pair, client: None, oracle: Oracle, turn: Turn):
        xi = oracle.draw_upper(turn.keys(1)[0])
        return client, oracle.upper_gradients(point.x, point.y, xi)[1]

    def _shortest(self, server: Nest, fy: Lower) -> Nest:
        scale = self.terms if self.random_length else 1
        first = _tree.scale(scale / self.ell, fy)
        return replace(server, term=first, total=self._sum(first, None))

    def _factor(self, message: Any, client: None, oracle: Oracle, turn: Turn):
        point, term = message
        zeta = oracle.draw_lower(turn.keys(1)[0])
        product = oracle.hessian_product(point.x, point.y, term, zeta)
        return client, _tree.add_scaled(term, -1 / self.ell, product)

    def _longer(self, server: Nest, term: Lower) -> Nest:
        return replace(server, term=term, total=self._sum(term, server.total))

    def _sum(self, term: Lower, total: Lower | None) -> Lower | None:
        if self.random_length:
            return None
        return term if total is None else _tree.add(total, term)

    def _z(self, server: Nest) -> tuple[Pair, Lower]:
        return server.point, server.term if self.random_length else server.total

    def _hypergradient(self, message: Any, client: None, oracle: Oracle, turn: Turn):
        point, z = message
        upper, lower = _two(turn)
        fx, _ = oracle.upper_gradients(point.x, point.y, oracle.draw_upper(upper))
        zeta = oracle.draw_lower(lower)
        indirect = oracle.cross_product(point.x, point.y, z, zeta)
        return client, _tree.subtract(fx, indirect)

    def _correct(self, message: Any, client: None, oracle: Oracle, turn: Turn):
        point, h = message

        def slope(x: Upper, key: Key) -> Upper:
            xi = oracle.draw_upper(key)

            def direct(at: Upper) -> Upper:
                return oracle.upper_gradients(at, point.y, xi)[0]

            now, at_anchor = at_both(direct, x, point.x)
            return _tree.add(h, _tree.subtract(now, at_anchor))

        return client, local_descent(point.x, self.alpha, turn, self.local_steps, slope)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        return (*super().option_names(), "ell", "length")

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters or effective steps; `q` terms, `ell` or 1/theta."""
        del clients
        ell = _options.optional_number(options, "ell")
        length = _options.choice(options, "length", ("random", "full"))
        return cls(
            **cls.nest_options(options, local_steps),
            ell=1 / _options.number(options, "theta") if ell is None else ell,
            terms=_options.integer(options, "q"),
            random_length=length == "random",
        )


def _two(turn: Turn) -> tuple[Key, Key]:
    first, second = turn.keys(2)
    return first, second


def _new_h(server: Nest, h: Upper) -> Nest:
    return replace(server, h=h)


class AbstractLightOut(AbstractNest):
    """LFedOut: local steps along hypergradients on the client's own Hessian."""

    inverts_locally: ClassVar[bool] = True

    hypergradient: AbstractHypergradient

    def check(self, curvature: float, client: int) -> None:
        """Ask the hypergradient rule."""
        self.hypergradient.check(curvature, client)

    def outer(self) -> Phases:
        """Return the one exchange of LFedOut."""
        return (
            Phase(
                "outer_local",
                lambda s: s.point,
                self._local,
                new_x,
                about=lambda point: point.x,
            ),
        )

    def _local(self, point: Pair, client: None, oracle: Oracle, turn: Turn):
        rule = self.hypergradient

        def slope(x: Upper, key: Key) -> Upper:
            return rule(oracle, x, point.y, rule.draw(oracle, key))

        return client, local_descent(point.x, self.alpha, turn, self.local_steps, slope)

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters or effective steps, with a stochastic Neumann series."""
        del clients
        shared = cls.nest_options(options, local_steps)
        return cls(_options.series(options), **shared)
