r"""Any Optax transformation as the server's step, or as a client's local step.

A method moves from what is known of a reply to the mean reply, or, on a client, from
one iterate to the next. These wrappers take that move for a negative gradient:

    change = mean reply - what was known
    updates, state = transformation.update(-change, state, what was known)
    new point = what was known + updates

so that `optax.sgd(1.0)` changes nothing, `optax.sgd(1.0, momentum=0.9)` is FedAvgM's
server and `optax.adam(0.01)` FedAdam's (arXiv 2003.00295). Only points move so.
Directions are averaged as the method says. One transformation serves all blocks, or a
`Pair` (a `Triple`) has one for each, None leaving a block alone. `Descent` and `Adam`
are two that need no other library.

The state of a server's transformation stays on the server, but where blocks are
private: there it travels with the server's state, and is counted. A client keeps
its own.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import AbstractBlocks, Lower, Number, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    ServerTurn,
    with_turn,
)
from fedbilevel.algorithms.parts import Iterate, Part
from fedbilevel.algorithms.wrappers import base
from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import check_fields, number, part


class Optimized(base.Inside):
    """The server's state, and that of the transformation of each phase that moves."""

    optimizer: dict[str, PyTree]


class ServerOptimizer(base.AroundServer):
    """An algorithm whose server steps by an Optax transformation."""

    optimizer: Any = part("an Optax transformation, or one for each block")

    def settings(self) -> dict[str, Any]:
        """Return those of the method, and of a transformation of ours."""
        own: dict[str, Any] = {"optimizer": self.optimizer}
        if isinstance(self.optimizer, Descent | Adam):
            own = dict(vars(self.optimizer))
        return {**self.algorithm.settings(), **own}

    def __check_init__(self) -> None:
        if not base.moving_phases(self.algorithm.phases()):
            raise InvalidInputError(
                f"`ServerOptimizer`: no phase of `{type(self.algorithm).__name__}` "
                "sends points back, so there is no step to change."
            )

    def init_server(self, x: Upper, y: Lower) -> Optimized:
        """Start the method, and the transformation of each phase that moves."""
        server = self.algorithm.init_server(x, y)
        states = {
            phase.name: _start(self.optimizer, _point(_known(phase, server)))
            for phase in base.moving_phases(self.algorithm.phases())
        }
        return Optimized(server, states)

    def phases(self) -> Phases:
        """Return the method's own, with other steps."""
        return base.mapped(self.algorithm.phases(), self._wrapped)

    def _wrapped(self, phase: Phase) -> Phase:
        def up(server: Optimized, reply: PyTree, turn: ServerTurn) -> Optimized:
            states = server.optimizer
            if phase.name in states:
                message = phase.message(server.server, turn)
                known = phase.about(message)  # pyright: ignore[reportOptionalCall]
                step = (self.optimizer, states[phase.name])
                reply, state = _stepped(*step, known, reply)
                states = {**states, phase.name: state}
            return Optimized(phase.taken_in(server.server, reply, turn), states)

        return replace(base.inner_phase(phase), up=with_turn(up))


class LocalOptimizer(base.With):
    """An algorithm of one loop whose clients step by an Optax transformation.

    The transformation changes the length of each of the `local_steps`. `algorithm` has
    as many, or one. `optimizer` is one for all blocks, or one for each.
    """

    def __init__(
        self, algorithm: AbstractAlgorithm, optimizer: Any, *, local_steps: int
    ) -> None:
        """Wrap a method. The number of local steps may differ only from one."""
        method = base.check_one_loop("LocalOptimizer", algorithm)
        if method.local_steps not in (1, local_steps):
            raise InvalidInputError(
                f"`LocalOptimizer(local_steps={local_steps})`: the number of local "
                f"steps of `{type(method).__name__}`, {method.local_steps}, must be "
                "the same, or 1."
            )
        if not method.returns_point:
            raise InvalidInputError(
                f"`LocalOptimizer`: `{type(method).__name__}` sends sums of "
                "directions, so that other local steps would change nothing."
            )
        self.algorithm = method.with_local_steps(local_steps)
        self.variation = Transformed(optimizer)


class Transformed(Part):
    """Local steps that a transformation changes."""

    optimizer: Any = part("an Optax transformation, or one for each block")

    def own(self, w):
        """Start the transformation."""
        return _start(self.optimizer, w)

    def begun(self, begin, shared, own):
        """Return the transformation's state."""
        return own

    def stepped(self, state, old, new, t):
        """Return another point, and the next state."""
        point, state = _stepped(self.optimizer, state, old.point, new.point)
        return state, replace(new, point=point)

    def ended(self, state, answer):
        """Keep the state."""
        return state, answer


class Descent(eqx.Module):
    """The server's gradient step with momentum: v <- beta v + g, w <- w - lr v."""

    lr_server: Number = number("the server's step along the mean move", default=1.0)
    beta: Number = number(
        "v keeps beta of itself a round", default=0.0, least=0.0, below=1.0
    )

    def __check_init__(self) -> None:
        check_fields(self)

    def init(self, point: PyTree) -> PyTree:
        """Return v = 0."""
        return _tree.zeros_like(point)

    def update(self, g: PyTree, v: PyTree, point: PyTree) -> tuple[PyTree, PyTree]:
        """Return how far to move, and v."""
        v = _tree.add_scaled(g, self.beta, v)
        return _tree.scale(-self.lr_server, v), v


class Moments(eqx.Module):
    """Averages of changes and of their squares."""

    m: PyTree
    v: PyTree


class Adam(eqx.Module):
    """FedAdam's server: m and v are not corrected for their start, v begins at tau^2.

    m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,
    w <- w - lr m / (sqrt(v) + tau).
    """

    lr_server: Number = number(
        "the server's step of a coordinate", step="lower", default=0.1
    )
    beta1: Number = number(
        "m keeps beta1 of itself a round", default=0.9, least=0.0, below=1.0
    )
    beta2: Number = number(
        "v keeps beta2 of itself a round", default=0.99, least=0.0, below=1.0
    )
    tau: Number = number(
        "added to sqrt(v); v begins at its square", default=1e-3, above=0.0
    )

    def __check_init__(self) -> None:
        check_fields(self)

    def init(self, point: PyTree) -> Moments:
        """Return m = 0 and v = tau^2."""

        def first(leaf: Array) -> Array:
            return jnp.full_like(leaf, self.tau.astype(leaf.dtype) ** 2)

        return Moments(_tree.zeros_like(point), jax.tree.map(first, point))

    def update(
        self, g: PyTree, state: Moments, point: PyTree
    ) -> tuple[PyTree, Moments]:
        """Return how far to move, and the moments."""
        m = _mixed(self.beta1, state.m, g)
        v = _mixed(self.beta2, state.v, jax.tree.map(jnp.square, g))

        def scaled(m: Array, v: Array) -> Array:
            return m / (jnp.sqrt(v) + self.tau.astype(v.dtype))

        return _tree.scale(-self.lr_server, jax.tree.map(scaled, m, v)), Moments(m, v)


def _mixed(beta: Array, old: PyTree, new: PyTree) -> PyTree:
    return _tree.add_scaled(_tree.scale(beta, old), 1 - beta, new)


def _known(phase: Phase, server: PyTree) -> PyTree:
    """Return what is known of a reply at the start."""
    known = phase.known(server)
    if known is None:
        raise InvalidInputError(
            f"phase '{phase.name}' moves, but what is known of its reply does not "
            "follow from the server's state alone."
        )
    return known


def _point(reply: PyTree) -> PyTree:
    return reply.point if isinstance(reply, Iterate) else reply


def _start(optimizer: Any, point: PyTree) -> PyTree:
    """Return the state of a transformation, or of one for each block."""
    if not isinstance(optimizer, AbstractBlocks):
        return optimizer.init(point)
    every = _by(optimizer, point)
    return [None if one is None else one.init(block) for _, one, block in every]


def _by(optimizer: AbstractBlocks, *points: Any) -> list[tuple]:
    """Line up names and transformations of all blocks with the blocks of points."""
    if not all(isinstance(point, AbstractBlocks) for point in points):
        raise InvalidInputError(
            "a transformation for each block needs a method that moves all of them in "
            "one exchange. Give one transformation."
        )
    return [
        (name, one, *(getattr(tree, name) for tree in points))
        for name, one in vars(optimizer).items()
    ]


def _stepped(
    optimizer: Any, state: PyTree, known: PyTree, reply: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the reply with another point, and the next state."""
    before, after = _point(known), _point(reply)
    if isinstance(optimizer, AbstractBlocks):
        blocks, states = {}, []
        every = zip(_by(optimizer, before, after), state, strict=True)
        for (name, one, old, new), held in every:
            # A block without a transformation of its own moves as the method says.
            after_it = (new, held) if one is None else _one(one, held, old, new)
            blocks[name], held = after_it
            states.append(held)
        moved, state = replace(after, **blocks), states
    else:
        moved, state = _one(optimizer, state, before, after)
    return (replace(reply, point=moved) if isinstance(reply, Iterate) else moved), state


def _one(
    optimizer: Any, state: PyTree, before: PyTree, after: PyTree
) -> tuple[PyTree, PyTree]:
    updates, state = optimizer.update(_tree.subtract(before, after), state, before)
    return _tree.add(before, updates), state
