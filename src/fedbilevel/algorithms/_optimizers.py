r"""Any Optax transformation as the server's step, or as a client's local step.

A method moves from what is known of a reply to the mean reply, or, on a client, from
one iterate to the next. These wrappers take that move for a negative gradient:

    change = mean reply - what was known
    updates, state = transformation.update(-change, state, what was known)
    new point = what was known + updates

so that `optax.sgd(1.0)` changes nothing, `optax.sgd(1.0, momentum=0.9)` is FedAvgM's
server and `optax.adam(0.01)` FedAdam's (arXiv 2003.00295). Only points move that way;
directions are averaged as the method says. One transformation serves all blocks, or a
`Pair` (a `Triple`) has one for each, None leaving a block alone.

The state of a server's transformation stays on the server, but where blocks are
private: there it travels with the server's state, and is counted. That of a client
stays on the client.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import AbstractBlocks, Lower, Pair, Upper
from fedbilevel.algorithms._base import (
    AbstractAlgorithm,
    Balance,
    Phase,
    Phases,
    SeesTurn,
    ServerTurn,
    Turn,
)
from fedbilevel.algorithms._local import Iterate, check_counts
from fedbilevel.channels import Channel
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, part

__all__ = ["AbstractWrapper", "LocalOptimizer", "ServerOptimizer", "mapped"]


class Optimized(eqx.Module):
    """The server's state, and that of the transformation of each phase that moves."""

    server: PyTree
    optimizer: dict[str, PyTree]


class AbstractWrapper(AbstractAlgorithm):
    """What a method keeps of its own, however its points are moved."""

    algorithm: AbstractAlgorithm = part("the method whose points move otherwise")

    @property
    def answers(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whose lower level the method solves."""
        return self.algorithm.answers

    @property
    def allows_private(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Say whether the method bears private blocks."""
        return self.algorithm.allows_private

    @property
    def inverts_locally(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Say whether a client's own Hessian stands in for the mean one."""
        return self.algorithm.inverts_locally

    @property
    def needs_hessian(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Say whether the method asks for more than gradients."""
        return self.algorithm.needs_hessian

    def private_blocks(self) -> Pair:
        """Flag what the method keeps on clients."""
        return self.algorithm.private_blocks()

    def channel(self) -> Channel:
        """Return what the method does to replies."""
        return self.algorithm.channel()

    def check(self, curvature: float, client: int) -> None:
        """Ask the method."""
        self.algorithm.check(curvature, client)

    def check_balance(self, curvatures: Balance) -> None:
        """Ask the method."""
        self.algorithm.check_balance(curvatures)


class ServerOptimizer(AbstractWrapper):
    """An algorithm whose server steps by an Optax transformation."""

    optimizer: Any = part("an Optax transformation, or one for each block")

    def __check_init__(self) -> None:
        if not _moving(self.algorithm.phases()):
            raise InvalidInputError(
                f"`ServerOptimizer`: no phase of `{type(self.algorithm).__name__}` "
                "sends points back, so there is no step to change."
            )

    def init_server(self, x: Upper, y: Lower) -> Optimized:
        """Start the method, and the transformation of each phase that moves."""
        server = self.algorithm.init_server(x, y)
        states = {
            phase.name: _start(self.optimizer, _point(_known(phase, server)))
            for phase in _moving(self.algorithm.phases())
        }
        return Optimized(server, states)

    def init_client(self, x: Upper, y: Lower) -> PyTree:
        """Return what the method keeps on a client."""
        return self.algorithm.init_client(x, y)

    def setup(self) -> Phases:
        """Return the method's own."""
        return mapped(self.algorithm.setup(), self._wrapped)

    def phases(self) -> Phases:
        """Return the method's own, with other steps."""
        return mapped(self.algorithm.phases(), self._wrapped)

    def point(self, server: Optimized) -> Pair:
        """Return the method's iterate."""
        return self.algorithm.point(server.server)

    def watched(self, server: Optimized) -> PyTree:
        """Return what the method has watched."""
        return self.algorithm.watched(server.server)

    def _wrapped(self, phase: Phase) -> Phase:
        def down(server: Optimized, turn: ServerTurn) -> PyTree:
            return phase.message(server.server, turn)

        def up(server: Optimized, reply: PyTree, turn: ServerTurn) -> Optimized:
            states = server.optimizer
            if phase.name in states:
                message = phase.message(server.server, turn)
                known = phase.about(message)  # pyright: ignore[reportOptionalCall]
                step = (self.optimizer, states[phase.name])
                reply, state = _stepped(*step, known, reply)
                states = {**states, phase.name: state}
            return Optimized(phase.taken_in(server.server, reply, turn), states)

        sees = isinstance(phase.down, SeesTurn)
        plain: Any = phase.down
        seen = SeesTurn(down) if sees else lambda server: plain(server.server)
        return replace(phase, down=seen, up=SeesTurn(up))


class LocalOptimizer(AbstractWrapper):
    """An algorithm of one loop whose clients step by an Optax transformation.

    `algorithm` makes one local step, and every one of the `local_steps` here is one of
    its; the transformation changes how far that leads.
    """

    optimizer: Any = part("an Optax transformation, or one for each block")
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        phases, steps = (
            self.algorithm.phases(),
            getattr(self.algorithm, "local_steps", 1),
        )
        alone = len(phases) == 1 and isinstance(phases[0], Phase) and phases[0].moves
        if not alone or steps != 1:
            raise InvalidInputError(
                f"`LocalOptimizer`: `{type(self.algorithm).__name__}` must be a method "
                "of one loop that sends its iterate back, with local_steps=1; give the "
                "number of steps to `LocalOptimizer(local_steps=...)`."
            )

    def init_server(self, x: Upper, y: Lower) -> PyTree:
        """Start the method."""
        return self.algorithm.init_server(x, y)

    def init_client(self, x: Upper, y: Lower) -> tuple[PyTree, PyTree]:
        """Start the method's memory, and the transformation."""
        server = self.algorithm.init_server(x, y)
        if not isinstance(server, Iterate) or server.control is not None:
            raise InvalidInputError(
                f"`LocalOptimizer`: `{type(self.algorithm).__name__}` sends more than "
                "an iterate, so that one of its steps cannot follow another by itself."
            )
        start = _start(self.optimizer, _point(_known(self._phase(), server)))
        return self.algorithm.init_client(x, y), start

    def setup(self) -> Phases:
        """Return the method's own, which leave the transformation alone."""

        def wrapped(phase: Phase) -> Phase:
            def local(message: Any, client: Any, oracle: Oracle, turn: Turn):
                memory, reply = phase.local(message, client[0], oracle, turn)
                return (memory, client[1]), reply

            return replace(phase, local=local)

        return mapped(self.algorithm.setup(), wrapped)

    def phases(self) -> Phases:
        """Return the one exchange of a round."""
        return (replace(self._phase(), local=self.local),)

    def point(self, server: PyTree) -> Pair:
        """Return the method's iterate."""
        return self.algorithm.point(server)

    def watched(self, server: PyTree) -> PyTree:
        """Return what the method has watched."""
        return self.algorithm.watched(server)

    def _phase(self) -> Phase:
        (phase,) = self.algorithm.phases()
        assert isinstance(phase, Phase)
        return phase

    def local(self, message: PyTree, client: Any, oracle: Oracle, turn: Turn):
        """Make p local steps, each one of the method's."""
        phase = self._phase()
        about: Any = phase.about

        def step(carry: tuple[PyTree, Any], t: Any):
            message, (memory, state) = carry
            one = Turn(turn.key, t, turn.shared)
            memory, reply = phase.local(message, memory, oracle, one)
            reply, state = _stepped(self.optimizer, state, about(message), reply)
            return (combine(reply, message), (memory, state)), None

        times = turn.steps(self.local_steps)
        (message, client), _ = jax.lax.scan(step, (message, client), times)
        return client, about(message)


def _moving(phases: Phases) -> list[Phase]:
    """Return the phases that send points back."""
    found = []
    for entry in phases:
        inside = [entry] if isinstance(entry, Phase) else _moving(entry.phases)
        found += [phase for phase in inside if phase.moves]
    return found


def mapped(phases: Phases, change: Callable[[Phase], Phase]) -> Phases:
    """Change every phase, inside of repeats, too."""
    return tuple(
        change(entry)
        if isinstance(entry, Phase)
        else replace(entry, phases=mapped(entry.phases, change))
        for entry in phases
    )


def _known(phase: Phase, server: PyTree) -> PyTree:
    """Return what is known of a reply at the start."""
    if phase.about is None or isinstance(phase.down, SeesTurn):
        raise InvalidInputError(
            f"phase '{phase.name}' moves, but what is known of its reply does not "
            "follow from the server's state alone."
        )
    return phase.about(phase.down(server))


def _point(reply: PyTree) -> PyTree:
    return reply.point if isinstance(reply, Iterate) else reply


def _start(optimizer: Any, point: PyTree) -> PyTree:
    """Return the state of a transformation, or of one for each block."""
    if not isinstance(optimizer, AbstractBlocks):
        return optimizer.init(point)
    return [
        None if one is None else one.init(block) for one, block in _by(optimizer, point)
    ]


def _by(optimizer: AbstractBlocks, *points: Any) -> list[tuple]:
    """Line up the transformations of all blocks with the blocks of points."""
    names = list(vars(optimizer))
    if not all(isinstance(point, AbstractBlocks) for point in points):
        raise InvalidInputError(
            "a transformation for each block needs a method that moves all of them in "
            "one exchange; give one transformation."
        )
    columns = [[getattr(tree, name) for name in names] for tree in points]
    return list(zip(vars(optimizer).values(), *columns, strict=True))


def _stepped(
    optimizer: Any, state: PyTree, known: PyTree, reply: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the reply with another point, and the next state."""
    before, after = _point(known), _point(reply)
    if isinstance(optimizer, AbstractBlocks):
        blocks, states = {}, []
        every = zip(vars(optimizer), _by(optimizer, before, after), state, strict=True)
        for name, (one, old, new), held in every:
            blocks[name], held = (
                (new, held) if one is None else _one(one, held, old, new)
            )
            states.append(held)
        # A block without a transformation of its own moves as the method says.
        moved, state = replace(after, **blocks), states
    else:
        moved, state = _one(optimizer, state, before, after)
    return (replace(reply, point=moved) if isinstance(reply, Iterate) else moved), state


def _one(
    optimizer: Any, state: PyTree, before: PyTree, after: PyTree
) -> tuple[PyTree, PyTree]:
    updates, state = optimizer.update(_tree.subtract(before, after), state, before)
    return _tree.add(before, updates), state
