r"""Parts of methods for one machine: a path of the server, an exchange an iteration.

    D_t     = G(w_t; s_t)       on one machine, or the mean over K clients of G_k
    w_{t+1} = w_t - step_t D_t

A method of one machine runs on K clients by averaging its directions at every step
(p = 1): then all of them follow one path, and none drifts. Where G is linear in means
over the clients, as the three directions with a variable z are, the limit is that of
one machine with the rows of all. Where G inverts a Hessian, each client inverts its
own: right only for clients that are alike.

Clients keep nothing, so that each exchange may ask a fresh cohort.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    Pointed,
    Repeat,
    SeesTurn,
    ServerTurn,
    Turn,
    with_turn,
)
from fedbilevel.algorithms.directions import (
    along_x,
    along_z,
    both_samples,
    hypergradient_and_slope,
    lower_slope,
    with_z,
)
from fedbilevel.algorithms.parts import evaluate, shaped
from fedbilevel.estimators import at_both
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import number

# Draws s and returns the map w -> G(w; s); blocks that are None do not move.
Draw = Callable[[Oracle, Key], Callable[[Any], Any]]
Up = Callable[..., Any] | SeesTurn

ITERATIONS = "iterations in a round, p; K clients are averaged after each"


class Path(Pointed):
    """Where a method stands and stood before, its directions and their squares."""

    point: Any
    previous: Any = None
    direction: Any = None
    squares: Any = None


class OneMachine(AbstractAlgorithm):
    """A method of one machine: its path starts at (x, y), and moves by `step(t)`."""

    answers: ClassVar[str] = "single machine"
    pools: ClassVar[bool] = True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Let fields of methods, local_steps among them, be of any type."""

    def init_server(self, x: Upper, y: Lower) -> Any:
        """Start at (x, y)."""
        return Path(Pair(x, y))

    def step(self, t: Any) -> Any:
        """Return the step size of every block in iteration t."""
        return Pair(self.lr_x, self.lr_y)

    def moved(self, every: int = 1) -> SeesTurn:
        """Return the server's step along D; t counts every so many exchanges."""

        def up(server: Path, D: Any, turn: ServerTurn) -> Path:
            w = stepped(server.point, self.step(turn.index // every), D)
            return replace(server, point=w)

        return with_turn(up)

    def repeated(self, *iteration: Phase | Repeat) -> Phases:
        """Return the iterations of a round."""
        return (Repeat(self.local_steps, iteration),)


class WithZ(OneMachine):
    """A method of one machine that moves x, y and the linear-system variable z."""

    lr_x: Number = number("x moves by lr_x times its direction", step="upper")
    lr_y: Number = number("y moves by lr_y times its direction", step="lower")
    lr_z: Number = number("z moves by lr_z times its direction", step="lower")

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at (x, y, 0)."""
        return Path(with_z(x, y))

    def step(self, t: Any) -> Triple:
        """Return the steps of x, y and z."""
        return Triple(self.lr_x, self.lr_y, self.lr_z)


class WithShape(WithZ):
    """Steps on x, y and z whose common shape over t is the method's schedule a."""

    def step(self, t: Any) -> Triple:
        """Return lr_x a_t, lr_y a_t and lr_z a_t."""
        return Triple(*shaped(self.a, t, self.lr_x, self.lr_y, self.lr_z))


def stepped(w: Any, steps: Any, D: Any) -> Any:
    """Return w - steps * D in every block that has a direction."""

    def block(name: str) -> PyTree:
        at, d = getattr(w, name), getattr(D, name, None)
        return at if d is None else _tree.add_scaled(at, -getattr(steps, name), d)

    return replace(w, **{one.name: block(one.name) for one in fields(w)})


def at_point(name: str, local: Callable, up: Up, **more: Any) -> Phase:
    """Return the exchange in which clients learn the point alone."""
    return Phase(name, lambda server: server.point, local, up, **more)


def sampled(name: str, draw: Draw, up: Up, bundles: int = 1) -> Phase:
    """Return the exchange that takes the mean of G(w; s) over so many samples."""

    def local(w: Any, client: Any, oracle: Oracle, turn: Turn):
        def one(key: Key) -> Any:
            return draw(oracle, key)(w)

        keys = turn.keys(bundles)
        if bundles == 1:
            return client, one(keys[0])

        def add(total: Any, key: Key) -> tuple[Any, None]:
            return _tree.add(total, one(key)), None

        total, _ = jax.lax.scan(add, one(keys[0]), keys[1:])
        return client, _tree.scale(1 / bundles, total)

    return at_point(name, local, up)


def differences(
    name: str, draw: Draw, up: Up, kept: Callable[[Any], Any] | None = None
) -> Phase:
    """Return the exchange that takes G(w; s) - kept_t G(w_before; s), with one sample.

    `kept(t)` has a number for each block, 1 everywhere if it is left out.
    """

    def local(message: tuple[Any, Any], client: Any, oracle: Oracle, turn: Turn):
        w, before = message
        now, then = at_both(draw(oracle, turn.keys(1)[0]), w, before)
        if kept is not None:
            then = jax.tree.map(_tree.scale, kept(turn.index), then)
        return client, _tree.subtract(now, then)

    return Phase(name, lambda server: (server.point, server.previous), local, up)


def all_directions(oracle: Oracle, key: Key) -> Callable[[Triple], Triple]:
    """Draw one xi and one zeta; return SOBA's map of the directions of x, y and z.

    D_y = gy(zeta), D_z = hvp(zeta)[z] - fy(xi) and D_x = fx(xi) - jvp(zeta)[z].
    """
    xi, zeta = both_samples(oracle, key)

    def D(w: Triple) -> Triple:
        fx, fy = oracle.upper_gradients(w.x, w.y, xi)
        return Triple(
            _tree.subtract(fx, oracle.cross_product(w.x, w.y, w.z, zeta)),
            oracle.lower_gradient(w.x, w.y, zeta),
            _tree.subtract(oracle.hessian_product(w.x, w.y, w.z, zeta), fy),
        )

    return D


def system_slope(oracle: Oracle, key: Key) -> Callable[[Triple], Triple]:
    """Draw xi and zeta; return the map of D_z = hvp[z] - fy alone."""
    return evaluate(Triple(None, None, along_z(oracle, *both_samples(oracle, key))))


def upper_slope(oracle: Oracle, key: Key) -> Callable[[Triple], Triple]:
    """Draw xi and zeta; return the map of D_x = fx - jvp[z] alone."""
    return evaluate(Triple(along_x(oracle, *both_samples(oracle, key)), None, None))


def slope(oracle: Oracle, key: Key) -> Callable[[Any], Pair]:
    """Draw zeta; return the map of gy alone, at a point with or without z."""
    return evaluate(lower_slope(oracle, key))


def hypergradient_alone(rule: AbstractHypergradient) -> Draw:
    """Return the draw of a bundle, for the map of the hypergradient alone."""

    def draw(oracle: Oracle, key: Key) -> Callable[[Pair], Pair]:
        b = rule.draw(oracle, key)
        return lambda w: Pair(rule(oracle, w.x, w.y, b), None)

    return draw


def both_directions(rule: AbstractHypergradient) -> Draw:
    """Return the draw of a bundle and of zeta, for the map of (h, gy)."""

    def draw(oracle: Oracle, key: Key) -> Callable[[Pair], Pair]:
        return evaluate(hypergradient_and_slope(rule, oracle, key))

    return draw
