r"""Methods whose server moves after every exchange, along the mean of directions.

    D_t     = G(w_t; s_t)       on one machine, or the mean over K clients of G_k
    w_{t+1} = w_t - step_t D_t

A method of one machine runs on K clients by averaging its directions at every step
(p = 1): then all of them follow one path, and none drifts. Where G is linear in means
over the clients, as the three directions with a variable z are, the limit is that of
one machine with the rows of all. Where G inverts a Hessian, each client inverts its
own: right only for clients that are alike.

Clients keep nothing, so that each exchange may ask a fresh cohort.

Recursive (SPIDER, SARAH) directions are means of B samples of G(w_t; s) in some
iterations, and in all others, with kept_t below 1 for STORM,

    d_t = G(w_t; s_t) + kept_t (d_{t-1} - G(w_{t-1}; s_t))

A round begins with a large batch. A `Repeat` of differences follows: as many as a
period has left (SPIDER), or until a coin ends it (PAGE).
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Lower, Number, Pair, Triple, Upper, base
from fedbilevel.algorithms.directions import (
    along_x,
    along_z,
    both_samples,
    hypergradient_and_slope,
    lower_slope,
)
from fedbilevel.algorithms.parts import Stepping, evaluate, only
from fedbilevel.estimators import at_both
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import part, step

# Draws s and returns the map w -> G(w; s); blocks that are None do not move.
Draw = Callable[[Oracle, Key], Callable[[Any], Any]]
Up = Callable[..., Any] | base.SeesTurn

ITERATIONS = "iterations in a round, p; K clients are averaged after each"


class Path(base.Pointed):
    """Where a method stands and stood before, its directions and their squares."""

    point: Any
    previous: Any = None
    direction: Any = None
    squares: Any = None


class EachStep(Stepping):
    """A method whose server moves after every exchange.

    If it has no phases of its own, it moves along the map that `draw` returns.
    """

    def init_server(self, x: Upper, y: Lower) -> Any:
        """Start at the first point."""
        return Path(self.variables(x, y))

    def phases(self) -> base.Phases:
        """Return the iterations of a round, an exchange each."""
        return self.repeated(sampled("step", self.draw, base.with_turn(self.taken)))

    def taken(self, server: Any, D: Any, turn: base.ServerTurn) -> Any:
        """Return the path after a step along D."""
        w = stepped(server.point, self.step(turn.index), D)
        return replace(server, point=w)

    def moved(self, every: int = 1) -> base.SeesTurn:
        """Return the server's step along D; t counts every so many exchanges."""

        def up(server: Path, D: Any, turn: base.ServerTurn) -> Path:
            return self.taken(server, D, replace(turn, index=turn.index // every))

        return base.with_turn(up)

    def remembered(self, server: Path, d: Any, turn: base.ServerTurn) -> Path:
        """Return the path after a step along d, with where d was formed."""
        w = stepped(server.point, self.step(turn.index), d)
        return Path(w, previous=server.point, direction=d)

    def kept(self, t: Any) -> Any:
        """Return what directions keep of themselves: nothing at t = 0."""
        return jax.tree.map(lambda weight: 1 - weight, self.weight(t))

    def repeated(self, *iteration: base.Phase | base.Repeat) -> base.Phases:
        """Return the iterations of a round."""
        return (base.Repeat(self.local_steps, iteration),)


class OneMachine(EachStep):
    """A method of one machine."""

    answers = "single machine"
    pools = True


class OfSystem(OneMachine):
    """A method of one machine that moves x, y and the linear-system variable z."""

    moves = ("x", "y", "z")

    def draw(self, oracle: Oracle, key: Key) -> Callable[[Triple], Triple]:
        """Draw one xi and one zeta; return the map of the directions of x, y and z.

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


class WithZ(OfSystem):
    """A method that moves x, y and z by steps of the same shape over t, if it has a."""

    lr_x: Number = step("upper", "x moves by lr_x times its direction", over="a")
    lr_y: Number = step("lower", "y moves by lr_y times its direction", over="a")
    lr_z: Number = step("auxiliary", "z moves by lr_z times its direction", over="a")


class Recursive(OneMachine):
    """Directions that differences correct, and steps along them."""

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at the first point; directions are formed at t = 0."""
        w = self.variables(x, y)
        return Path(w, previous=w, direction=_tree.zeros_like(w))

    def exchanges(self) -> tuple[base.Phase, base.Phase]:
        """Return the iteration with a large batch, and one that corrects d."""
        up = base.with_turn(self.remembered)
        large = sampled("large", self.draw, up, self.large_batch)
        return large, recursive("step", self.draw, self.remembered)


class ByBundle(OneMachine):
    """A method of one machine that moves x along a hypergradient."""

    inverts_locally = True

    hypergradient: AbstractHypergradient = part("the estimate of grad Phi")

    def draw(self, oracle: Oracle, key: Key) -> Callable[[Any], Pair]:
        """Draw a bundle and zeta; return the map of (h, gy)."""
        return evaluate(hypergradient_and_slope(self.hypergradient, oracle, key))


def stepped(w: Any, steps: Any, D: Any) -> Any:
    """Return w - steps * D in every block that has a direction."""

    def block(name: str) -> PyTree:
        at, d = getattr(w, name), getattr(D, name, None)
        return at if d is None else _tree.add_scaled(at, -getattr(steps, name), d)

    return replace(w, **{one.name: block(one.name) for one in fields(w)})


def at_point(name: str, local: Callable, up: Up, **more: Any) -> base.Phase:
    """Return the exchange in which clients learn the point alone."""
    return base.Phase(name, lambda server: server.point, local, up, **more)


def sampled(name: str, draw: Draw, up: Up, bundles: int = 1, **more: Any) -> base.Phase:
    """Return the exchange that takes the mean of G(w; s) over so many samples."""

    def local(w: Any, client: Any, oracle: Oracle, turn: base.Turn):
        def one(key: Key) -> Any:
            return draw(oracle, key)(w)

        keys = turn.keys(bundles)
        if bundles == 1:
            return client, one(keys[0])

        def add(total: Any, key: Key) -> tuple[Any, None]:
            return _tree.add(total, one(key)), None

        total, _ = jax.lax.scan(add, one(keys[0]), keys[1:])
        return client, _tree.scale(1 / bundles, total)

    return at_point(name, local, up, **more)


def recursive(
    name: str,
    draw: Draw,
    along: Callable,
    kept: Callable[[Any], Any] | None = None,
    blocks: Sequence[str] = ("x", "y", "z"),
) -> base.Phase:
    """Return the exchange that corrects d, and moves `along(server, d, turn)`.

    d is kept_t d + G(w; s) - kept_t G(w_before; s), with one sample. `kept(t)` has a
    number for each block, 1 everywhere if it is left out. Other `blocks` stay.
    """

    def weighed(t: Any, d: Any) -> Any:
        return jax.tree.map(_tree.scale, only(kept(t), blocks), d) if kept else d

    def local(message: tuple[Any, Any], client: Any, oracle: Oracle, turn: base.Turn):
        w, before = message
        now, then = at_both(draw(oracle, turn.keys(1)[0]), w, before)
        return client, _tree.subtract(now, weighed(turn.index, then))

    def corrected(server: Path, change: Any, turn: base.ServerTurn) -> Path:
        held = weighed(turn.index, only(server.direction, blocks))
        return along(server, _tree.add(held, change), turn)

    up = base.with_turn(corrected)
    return base.Phase(name, lambda server: (server.point, server.previous), local, up)


def system_slope(oracle: Oracle, key: Key) -> Callable[[Triple], Triple]:
    """Draw xi and zeta; return the map of D_z = hvp[z] - fy alone."""
    return evaluate(Triple(None, None, along_z(oracle, key)))


def upper_slope(oracle: Oracle, key: Key) -> Callable[[Triple], Triple]:
    """Draw xi and zeta; return the map of D_x = fx - jvp[z] alone."""
    return evaluate(Triple(along_x(oracle, key), None, None))


def slope(oracle: Oracle, key: Key) -> Callable[[Any], Pair]:
    """Draw zeta; return the map of gy alone, at a point with or without z."""
    return evaluate(lower_slope(oracle, key))
