"""The lower updates of the FedNest family, and the walk that its updates share.

FedInn corrects local steps by an anchor (2 exchanges), LFedInn takes plain ones (1).
Clients keep nothing between exchanges, so every exchange may draw a fresh cohort.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Pair, Upper
from fedbilevel.algorithms._base import Phase, Phases, Turn
from fedbilevel.estimators import at_both
from fedbilevel.problem import Oracle

__all__ = ["Nest", "fed_inn", "light_fed_inn", "new_x", "walk"]


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


def walk(
    start: Any, length: Array, turn: Turn, parts: int, slope: Callable[[Any, Key], Any]
) -> Any:
    """Walk a whole step in `parts` parts, each along a freshly sampled slope."""

    def part(w: Any, key: Key) -> tuple[Any, None]:
        return _tree.add_scaled(w, -length / parts, slope(w, key)), None

    return jax.lax.scan(part, start, turn.keys(parts))[0]


def fed_inn(beta: Array, tau: int) -> Phases:
    """Return FedInn: the clients' mean slope, then local steps corrected by it.

    q = mean_i gy_i(x, y; zeta_i);  then, tau times,
    y_i -= (beta/tau) (gy_i(x, y_i; zeta) - gy_i(x, y; zeta) + q);  y = mean_i y_i
    """

    def anchor(point: Pair, client: None, oracle: Oracle, turn: Turn):
        zeta = oracle.draw_lower(turn.keys(1)[0])
        return client, oracle.lower_gradient(point.x, point.y, zeta)

    def correct(message: tuple[Pair, Lower], client: None, oracle: Oracle, turn: Turn):
        point, q = message

        def slope(y: Lower, key: Key) -> Lower:
            zeta = oracle.draw_lower(key)

            def gradient(at: Lower) -> Lower:
                return oracle.lower_gradient(point.x, at, zeta)

            now, at_anchor = at_both(gradient, y, point.y)
            return _tree.add(_tree.subtract(now, at_anchor), q)

        return client, walk(point.y, beta, turn, tau, slope)

    return (
        Phase("inner_anchor", lambda s: s.point, anchor, lambda s, q: replace(s, q=q)),
        Phase(
            "inner_correct",
            lambda s: (s.point, s.q),
            correct,
            _new_y,
            about=lambda message: message[0].y,
            moves=True,
        ),
    )


def light_fed_inn(beta: Array, tau: int) -> Phases:
    """Return LFedInn: plain local steps on y.

    tau times, y_i -= (beta/tau) gy_i(x, y_i; zeta);  y = mean_i y_i
    """

    def local(point: Pair, client: None, oracle: Oracle, turn: Turn):
        def slope(y: Lower, key: Key) -> Lower:
            return oracle.lower_gradient(point.x, y, oracle.draw_lower(key))

        return client, walk(point.y, beta, turn, tau, slope)

    return (
        Phase(
            "inner_local",
            lambda s: s.point,
            local,
            _new_y,
            about=lambda point: point.y,
            moves=True,
        ),
    )


def _new_y(server: Nest, y: Lower) -> Nest:
    return replace(server, point=Pair(server.point.x, y))


def new_x(server: Nest, x: Upper) -> Nest:
    """Take the averaged x."""
    return replace(server, point=Pair(x, server.point.y))
