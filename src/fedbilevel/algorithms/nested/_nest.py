"""The parts of the FedNest family: lower updates, the series, the upper update.

FedInn corrects local steps by an anchor (2 exchanges), LFedInn takes plain ones (1).
FedIHGP inverts the mean Hessian (1 + N exchanges), FedOut moves x (2). Clients keep
nothing between exchanges, so every exchange may draw a fresh cohort.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    Pointed,
    Repeat,
    Turn,
)
from fedbilevel.errors import ClientInputError, InvalidInputError
from fedbilevel.estimators import at_both
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Effective, choice, count, is_known, number, step


class Nest(Pointed):
    """The server's state; None where a variant does not use a field.

    q anchors the lower steps, `term` and `total` are the last term and the sum of the
    federated series, h anchors the upper steps. `begins` is the lower update at which a
    series begins that travels with them.
    """

    point: Pair
    q: Lower | None = None
    term: Lower | None = None
    total: Lower | None = None
    h: Upper | None = None
    begins: Array | None = None


def whole_step(level: str, block: str) -> Any:
    """Declare a step that is made in tau parts, and is tau effective steps long."""
    meaning = f"whole step of {block}, walked in tau parts"
    # A step of x may have another number of parts, which is read first.
    times = {"times": "upper_steps", "after": ("upper_steps",)}
    own = times if level == "upper" else {"times": "local_steps"}
    return step(level, meaning, **own, kw_only=True)


def parts_of_x() -> Any:
    """Declare the number of parts of a step of x, where it is one of its own."""
    meaning = "parts of a step of x; as many as of y if it is 0"
    return count(meaning, default=0, least=0, kw_only=True)


class Nested(AbstractAlgorithm):
    """A method of two loops, whose step of x is walked in parts."""

    allows_private: ClassVar[bool] = False

    alpha: Number = whole_step("upper", "x")
    local_steps: int = count("parts of a step, tau", kw_only=True)


class WithSeries(Nested):
    """A method that moves x by FedIHGP and FedOut, after its lower updates."""

    ell: Number = number(
        "bound of the curvature, above L1",
        step="bound",
        effective=Effective(("theta",), convert=lambda theta, _: 1 / theta),
        kw_only=True,
    )
    terms: int = count("terms of the series, N", least=0, kw_only=True)
    random_length: bool = choice(
        "draw the number of factors, and let the last term stand for the sum",
        default=True,
        kw_only=True,
    )

    def __check_init__(self) -> None:
        if self.random_length and self.terms < 1:
            raise InvalidInputError(
                f"`{type(self).__name__}(terms=...)` must be at least 1, got "
                f"{self.terms}."
            )

    def check(self, curvature: float, client: int) -> None:
        """Raise unless ell bounds the curvature, as the series needs."""
        ell, name = self.ell, type(self).__name__
        if is_known(ell) and float(ell) <= curvature:
            raise ClientInputError(
                client,
                f" L1 is about {curvature:.4g} at the start, so use at least "
                f"{1.01 * curvature:.4g}.",
                f"`{name}(ell={float(ell):.4g})`: the series needs ell > L1; on ",
            )

    def init_server(self, x: Upper, y: Lower) -> Nest:
        """Start at (x, y) with what the series and the upper update fill in."""
        zero = _tree.zeros_like(y)
        total = None if self.random_length else zero
        return Nest(Pair(x, y), term=zero, total=total, h=_tree.zeros_like(x))

    def upper_update(self, parts: int) -> Phases:
        """Return FedIHGP and FedOut."""
        series = fed_ihgp(self.ell, self.terms, self.random_length)
        return (*series, *fed_out(self.alpha, parts))


def check_step(
    name: str, letter: str, step: Any, curvature: float, client: int
) -> None:
    """Raise if the step of a series is too large for the curvature."""
    if is_known(step) and float(step) * curvature >= 1:
        raise ClientInputError(
            client,
            f" L1 is about {curvature:.4g} at the start, so use at most "
            f"{0.99 / curvature:.4g}.",
            f"`{name}({letter}={float(step):.4g})`: the series needs {letter} < "
            "1/L1; on ",
        )


def walk(
    start: Any, length: Array, turn: Turn, parts: int, slope: Callable[[Any, Key], Any]
) -> Any:
    """Walk a whole step in `parts` parts, each along a freshly sampled slope."""

    def part(w: Any, key: Key) -> tuple[Any, None]:
        return _tree.add_scaled(w, -length / parts, slope(w, key)), None

    return jax.lax.scan(part, start, turn.keys(parts))[0]


def moving(
    block: str, name: str, local: Callable, anchor: str | None = None, **more: Any
) -> Phase:
    """Return the exchange that takes the mean of one block after local steps.

    With the name of an anchor that is sent along with the point.
    """

    def down(server: Nest) -> Any:
        return (server.point, getattr(server, anchor)) if anchor else server.point

    def up(server: Nest, mean: Any) -> Nest:
        return replace(server, point=replace(server.point, **{block: mean}))

    def about(message: Any) -> Any:
        return getattr(message[0] if anchor else message, block)

    return Phase(name, down, local, up, about, moves=True, **more)


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
        moving("y", "inner_correct", correct, anchor="q"),
    )


def light_fed_inn(beta: Array, tau: int) -> Phases:
    """Return LFedInn: plain local steps on y.

    tau times, y_i -= (beta/tau) gy_i(x, y_i; zeta);  y = mean_i y_i
    """

    def local(point: Pair, client: None, oracle: Oracle, turn: Turn):
        def slope(y: Lower, key: Key) -> Lower:
            return oracle.lower_gradient(point.x, y, oracle.draw_lower(key))

        return client, walk(point.y, beta, turn, tau, slope)

    return (moving("y", "inner_local", local),)


def fed_ihgp(ell: Array, terms: int, random_length: bool) -> Phases:
    """Return the series: p_0, then one exchange a factor.

    p_m = mean_i (p_{m-1} - (1/ell) hvp_i[p_{m-1}]);  N' factors of a random number,
    from p_0 = (N/ell) mean_i fy_i, or all N of them and their sum, from mean_i fy_i/ell
    """
    factors = terms - 1 if random_length else terms

    def slope_of_f(point: Pair, client: Any, oracle: Oracle, turn: Turn):
        xi = oracle.draw_upper(turn.keys(1)[0])
        return client, oracle.upper_gradients(point.x, point.y, xi)[1]

    def first(server: Nest, fy: Lower) -> Nest:
        p = _tree.scale((terms if random_length else 1) / ell, fy)
        return replace(server, term=p, total=None if random_length else p)

    def factor(message: Any, client: Any, oracle: Oracle, turn: Turn):
        point, p = message
        zeta = oracle.draw_lower(turn.keys(1)[0])
        product = oracle.hessian_product(point.x, point.y, p, zeta)
        return client, _tree.add_scaled(p, -1 / ell, product)

    def longer(server: Nest, p: Lower) -> Nest:
        total = None if random_length else _tree.add(server.total, p)
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
        Repeat(factors, (one_factor,), random=random_length),
    )


def fed_out(alpha: Array, tau: int) -> Phases:
    """Return FedOut: the hypergradient with the series, then steps corrected by it.

    h = mean_i (fx_i(x, y; xi_i) - jvp_i(x, y; zeta_i)[z]);  then, tau times,
    x_i -= (alpha/tau) (h - fx_i(x, y; xi) + fx_i(x_i, y; xi));  x = mean_i x_i
    """

    def with_z(server: Nest) -> tuple[Pair, Lower | None]:
        return server.point, server.term if server.total is None else server.total

    def hypergradient(message: Any, client: Any, oracle: Oracle, turn: Turn):
        point, z = message
        for_xi, for_zeta = turn.keys(2)
        xi, zeta = oracle.draw_upper(for_xi), oracle.draw_lower(for_zeta)
        fx, _ = oracle.upper_gradients(point.x, point.y, xi)
        indirect = oracle.cross_product(point.x, point.y, z, zeta)
        return client, _tree.subtract(fx, indirect)

    def correct(message: Any, client: Any, oracle: Oracle, turn: Turn):
        point, h = message

        def slope(x: Upper, key: Key) -> Upper:
            xi = oracle.draw_upper(key)

            def direct(at: Upper) -> Upper:
                return oracle.upper_gradients(at, point.y, xi)[0]

            now, at_anchor = at_both(direct, x, point.x)
            return _tree.add(h, _tree.subtract(now, at_anchor))

        return client, walk(point.x, alpha, turn, tau, slope)

    return (
        Phase("outer_anchor", with_z, hypergradient, lambda s, h: replace(s, h=h)),
        moving("x", "outer_correct", correct, anchor="h"),
    )
