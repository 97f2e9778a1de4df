"""The parts of the FedNest family: lower updates, the series, the upper update.

FedInn corrects local steps by an anchor (2 exchanges), LFedInn takes plain ones (1).
FedIHGP inverts the mean Hessian (1 + N exchanges), FedOut moves x (2). Clients keep
nothing between exchanges, so every exchange may draw a fresh cohort.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Lower, Number, Pair, Upper, base, lower_slope
from fedbilevel.algorithms.one_machine._path import Draw, sampled
from fedbilevel.errors import ClientInputError, InvalidInputError
from fedbilevel.estimators import at_both
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Effective, choice, count, is_known, number, step


class Nest(base.Pointed):
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


class Nested(base.AbstractAlgorithm):
    """A method of two loops, whose step of x is walked in parts."""

    allows_private = False

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

    def upper_update(self, parts: int) -> base.Phases:
        """Return FedIHGP and FedOut."""
        series = fed_ihgp(self.ell, self.terms, self.random_length)
        return (*series, *fed_out(self.alpha, parts))


def local_steps_on(
    block: str,
    name: str,
    length: Array,
    parts: int,
    draw: Draw,
    anchor: str | None = None,
) -> base.Phase:
    """Return the exchange that takes the mean of one block after local steps.

    A whole step is walked in `parts` parts, each along a freshly sampled slope of the
    block. With the name of an anchor, which is sent along with the point, slopes are
    corrected by it and by their values at the point.
    """

    def local(message: Any, client: Any, oracle: Oracle, turn: base.Turn):
        point, mean = message if anchor else (message, None)
        start = getattr(point, block)

        def part(at: Any, key: Key) -> tuple[Any, None]:
            sampled = draw(oracle, key)

            def G(value: Any) -> Any:
                return sampled(replace(point, **{block: value}))

            if anchor is None:
                slope = G(at)
            else:
                now, at_anchor = at_both(G, at, start)
                slope = _tree.add(mean, _tree.subtract(now, at_anchor))
            return _tree.add_scaled(at, -length / parts, slope), None

        return client, jax.lax.scan(part, start, turn.keys(parts))[0]

    return moving(block, name, local, anchor)


def moving(
    block: str, name: str, local: Callable, anchor: str | None = None, **more: Any
) -> base.Phase:
    """Return an exchange whose replies are one block, with its anchor sent along."""

    def down(server: Nest) -> Any:
        return (server.point, getattr(server, anchor)) if anchor else server.point

    def up(server: Nest, mean: Any) -> Nest:
        return replace(server, point=replace(server.point, **{block: mean}))

    def about(message: Any) -> Any:
        return getattr(message[0] if anchor else message, block)

    return base.Phase(name, down, local, up, about, moves=True, **more)


def slope_of_g(oracle: Oracle, key: Key) -> Callable[[Pair], Lower]:
    """Draw zeta; return the map of gy."""
    return lower_slope(oracle, key).y


def slope_of_f(oracle: Oracle, key: Key) -> Callable[[Pair], Upper]:
    """Draw xi; return the map of fx."""
    xi = oracle.draw_upper(key)
    return lambda w: oracle.upper_gradients(w.x, w.y, xi)[0]


def fed_inn(beta: Array, tau: int, anchored: bool = True) -> base.Phases:
    """Return FedInn: the clients' mean slope, then local steps corrected by it.

    q = mean_i gy_i(x, y; zeta_i);  then, tau times,
    y_i -= (beta/tau) (gy_i(x, y_i; zeta) - gy_i(x, y; zeta) + q);  y = mean_i y_i

    LFedInn has no anchor: tau times, y_i -= (beta/tau) gy_i(x, y_i; zeta).
    """
    if not anchored:
        return (local_steps_on("y", "inner_local", beta, tau, slope_of_g),)
    return (
        sampled("inner_anchor", slope_of_g, lambda s, q: replace(s, q=q)),
        local_steps_on("y", "inner_correct", beta, tau, slope_of_g, "q"),
    )


def lower_updates(method: Any) -> base.Repeat:
    """Return T_in lower updates, with anchors where the method is anchored."""
    inner = fed_inn(method.beta, method.local_steps, method.anchored)
    return base.Repeat(method.inner_rounds, inner)


def factor_by(step: Callable[[], Array]) -> Callable:
    """Return the work of a client that multiplies p by I - step() H_i."""

    def factor(
        message: tuple[Pair, Lower], client: Any, oracle: Oracle, turn: base.Turn
    ):
        point, p = message
        zeta = oracle.draw_lower(turn.keys(1)[0])
        product = oracle.hessian_product(point.x, point.y, p, zeta)
        return client, _tree.add_scaled(p, -step(), product)

    return factor


def fed_ihgp(ell: Array, terms: int, random_length: bool) -> base.Phases:
    """Return the series: p_0, then one exchange a factor.

    p_m = mean_i (p_{m-1} - (1/ell) hvp_i[p_{m-1}]);  N' factors of a random number,
    from p_0 = (N/ell) mean_i fy_i, or all N of them and their sum, from mean_i fy_i/ell
    """
    factors = terms - 1 if random_length else terms

    def start(oracle: Oracle, key: Key) -> Callable[[Pair], Lower]:
        xi = oracle.draw_upper(key)
        return lambda w: oracle.upper_gradients(w.x, w.y, xi)[1]

    def first(server: Nest, fy: Lower) -> Nest:
        p = _tree.scale((terms if random_length else 1) / ell, fy)
        return replace(server, term=p, total=None if random_length else p)

    def longer(server: Nest, p: Lower) -> Nest:
        total = None if random_length else _tree.add(server.total, p)
        return replace(server, term=p, total=total)

    one_factor = base.Phase(
        "series_factor",
        lambda s: (s.point, s.term),
        factor_by(lambda: 1 / ell),
        longer,
        about=lambda message: message[1],
    )
    return (
        sampled("series_start", start, first),
        base.Repeat(factors, (one_factor,), random=random_length),
    )


def fed_out(alpha: Array, tau: int) -> base.Phases:
    """Return FedOut: the hypergradient with the series, then steps corrected by it.

    h = mean_i (fx_i(x, y; xi_i) - jvp_i(x, y; zeta_i)[z]);  then, tau times,
    x_i -= (alpha/tau) (h - fx_i(x, y; xi) + fx_i(x_i, y; xi));  x = mean_i x_i
    """

    def with_z(server: Nest) -> tuple[Pair, Lower | None]:
        return server.point, server.term if server.total is None else server.total

    def hypergradient(message: Any, client: Any, oracle: Oracle, turn: base.Turn):
        point, z = message
        for_xi, for_zeta = turn.keys(2)
        xi, zeta = oracle.draw_upper(for_xi), oracle.draw_lower(for_zeta)
        fx, _ = oracle.upper_gradients(point.x, point.y, xi)
        indirect = oracle.cross_product(point.x, point.y, z, zeta)
        return client, _tree.subtract(fx, indirect)

    return (
        base.Phase("outer_anchor", with_z, hypergradient, lambda s, h: replace(s, h=h)),
        local_steps_on("x", "outer_correct", alpha, tau, slope_of_f, "h"),
    )
