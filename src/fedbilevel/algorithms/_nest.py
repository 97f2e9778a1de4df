"""The phases of the FedNest family: T_in rounds below, then one step above.

Below, FedInn (anchor and correct, 2 exchanges) or LFedInn (local steps, 1). Above,
FedOut (federated series, anchor and correct) or LFedOut (local hypergradients, 1).
Clients keep nothing between exchanges, so every exchange may draw a fresh cohort.
"""

import abc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._blocks import put
from fedbilevel._types import Key, Lower, Pair, Upper
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Repeat, Turn
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import at_both
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_number, is_known

__all__ = ["AbstractNest", "Nest", "check_inverse", "local_descent", "new_x"]

INNER_ROUNDS = "5"


class Nest(eqx.Module):
    """What the server carries; None where a variant has no use for it.

    q anchors the lower steps, `term` and `total` are the last term and the sum of the
    federated series, h anchors the upper steps.
    """

    point: Pair
    q: Lower | None = None
    term: Lower | None = None
    total: Lower | None = None
    h: Upper | None = None


class AbstractNest(AbstractAlgorithm):
    """`alpha` and `beta` are whole steps of x and y, walked in `local_steps` parts.

    `inner_rounds` is T_in, the lower updates before each upper one: FedInn if
    `anchors_inner`, else LFedInn.
    """

    allows_private: ClassVar[bool] = False
    anchors_inner: ClassVar[bool]

    alpha: Float[Array, "..."] = eqx.field(converter=as_number, kw_only=True)
    beta: Float[Array, "..."] = eqx.field(converter=as_number, kw_only=True)
    inner_rounds: int = eqx.field(static=True, kw_only=True)
    local_steps: int = eqx.field(static=True, kw_only=True)

    @abc.abstractmethod
    def outer(self) -> Phases:
        """Return the phases of one upper update."""

    def __check_init__(self) -> None:
        if self.local_steps < 1 or self.inner_rounds < 1:
            raise InvalidInputError(
                f"`{type(self).__name__}` needs local_steps >= 1 and inner_rounds >= "
                f"1, got {self.local_steps} and {self.inner_rounds}."
            )

    def init_server(self, x: Upper, y: Lower) -> Nest:
        """Start at (x, y), with an anchor where there will be one."""
        return Nest(Pair(x, y), _tree.zeros_like(y) if self.anchors_inner else None)

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients are stateless."""
        del x, y

    def phases(self) -> Phases:
        """Return T_in lower updates and one upper update."""
        inner = anchored_inner(self) if self.anchors_inner else light_inner(self)
        return (Repeat(self.inner_rounds, inner), *self.outer())

    def point(self, server: Nest) -> Pair:
        """Return the server's point."""
        return server.point

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        steps = ("alpha", "beta", "upper_step", "lower_step")
        return (*steps, "inner_rounds", "q", "theta")

    @classmethod
    def nest_options(
        cls, options: Mapping[str, str], local_steps: int
    ) -> dict[str, Any]:
        """Read alpha and beta, or so many parts of an effective step, and T_in."""
        alpha = _options.optional_number(options, "alpha")
        beta = _options.optional_number(options, "beta")
        if alpha is None:
            alpha = local_steps * _options.number(options, "upper_step")
        if beta is None:
            beta = local_steps * _options.number(options, "lower_step")
        given = {"inner_rounds": INNER_ROUNDS, **options}
        return {
            "alpha": alpha,
            "beta": beta,
            "inner_rounds": _options.integer(given, "inner_rounds"),
            "local_steps": local_steps,
        }


def local_descent(
    start: Any, length: Array, turn: Turn, parts: int, slope: Callable[[Any, Key], Any]
) -> Any:
    """Walk a whole step in `parts` parts, each along a freshly sampled slope."""

    def walk(w: Any, key: Key) -> tuple[Any, None]:
        return _tree.add_scaled(w, -length / parts, slope(w, key)), None

    return jax.lax.scan(walk, start, turn.keys(parts))[0]


def anchored_inner(nest: AbstractNest) -> Phases:
    """Return FedInn: the clients' mean slope, then local steps corrected by it."""

    def anchor(point: Pair, client: None, oracle: Oracle, turn: Turn):
        zeta = oracle.draw_lower(turn.keys(1)[0])
        return client, oracle.lower_gradient(point.x, point.y, zeta)

    def correct(message: Any, client: None, oracle: Oracle, turn: Turn):
        point, q = message

        def slope(y: Lower, key: Key) -> Lower:
            zeta = oracle.draw_lower(key)

            def gradient(at: Lower) -> Lower:
                return oracle.lower_gradient(point.x, at, zeta)

            now, at_anchor = at_both(gradient, y, point.y)
            return _tree.add(_tree.subtract(now, at_anchor), q)

        return client, local_descent(point.y, nest.beta, turn, nest.local_steps, slope)

    return (
        Phase("inner_anchor", lambda s: s.point, anchor, lambda s, q: replace(s, q=q)),
        Phase(
            "inner_correct",
            lambda s: (s.point, s.q),
            correct,
            _new_y,
            about=lambda message: message[0].y,
        ),
    )


def light_inner(nest: AbstractNest) -> Phases:
    """Return LFedInn: plain local steps on y."""

    def local(point: Pair, client: None, oracle: Oracle, turn: Turn):
        def slope(y: Lower, key: Key) -> Lower:
            return oracle.lower_gradient(point.x, y, oracle.draw_lower(key))

        return client, local_descent(point.y, nest.beta, turn, nest.local_steps, slope)

    return (
        Phase(
            "inner_local",
            lambda s: s.point,
            local,
            _new_y,
            about=lambda point: point.y,
        ),
    )


def _new_y(server: Nest, y: Lower) -> Nest:
    return replace(server, point=put(server.point, {"y": y}))


def new_x(server: Nest, x: Upper) -> Nest:
    """Take the averaged x."""
    return replace(server, point=put(server.point, {"x": x}))


def check_inverse(name: str, ell: Array, curvature: float, client: int) -> None:
    """Raise unless ell bounds the curvature, as the series needs."""
    if is_known(ell) and float(ell) <= curvature:
        raise InvalidInputError(
            f"`{name}(ell={float(ell):.4g})`: the series needs ell > L1; on client "
            f"{client} L1 is about {curvature:.4g} at the start, so use at least "
            f"{1.01 * curvature:.4g}."
        )
