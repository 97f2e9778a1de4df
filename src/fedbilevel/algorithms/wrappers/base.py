"""The contract of wrappers: whatever a wrapper leaves out is the method's own.

`AroundServer` is for the round: it changes exchanges of any method, and its server
keeps numbers of its own. `With` adds a `Part` to a method of one loop, and is a method
of one loop itself. So wrappers nest, those of local steps inside of those of the round.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
from jaxtyping import PyTree

from fedbilevel._types import AbstractBlocks, Key, Lower, Pair, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Balance,
    Phase,
    Phases,
    SeesTurn,
    ServerTurn,
    Turn,
    every_phase,
    with_turn,
)
from fedbilevel.algorithms.one_loop import Iterate, OneLoop, Order, Part
from fedbilevel.channels import Channel
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import part


class AbstractWrapper(AbstractAlgorithm):
    """A method around a method; what it does not change is the inner one's."""

    algorithm: AbstractAlgorithm = part("the method that is wrapped")
    named: str = eqx.field(
        static=True,
        default="",
        kw_only=True,
        metadata={"meaning": "the name that a preset gives its chain, for people"},
    )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Show the parameters of what is wrapped."""
            settings = {} if name.startswith("_") else self.settings()
            if name not in settings:
                kind = type(self).__name__
                raise AttributeError(f"`{kind}` has no parameter or method '{name}'")
            return settings[name]

    @property
    def title(self) -> str:
        """The name of the chain, or the method's own."""
        return self.named or self.algorithm.title

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

    def settings(self) -> dict[str, Any]:
        """Return those of the method, and the wrapper's own."""
        mine = {one.name for one in fields(self)} - {"algorithm", "named"}
        own = {name: value for name, value in vars(self).items() if name in mine}
        return {**self.algorithm.settings(), **own}

    def init_server(self, x: Upper, y: Lower) -> PyTree:
        """Start the method."""
        return self.algorithm.init_server(x, y)

    def init_client(self, x: Upper, y: Lower) -> PyTree:
        """Start the method's memory."""
        return self.algorithm.init_client(x, y)

    def setup(self) -> Phases:
        """Return the method's own."""
        return self.algorithm.setup()

    def phases(self) -> Phases:
        """Return the method's own."""
        return self.algorithm.phases()

    def point(self, server: PyTree) -> Pair:
        """Return the method's iterate."""
        return self.algorithm.point(server)

    def blocks(self, server: PyTree) -> AbstractBlocks | None:
        """Return the method's blocks."""
        return self.algorithm.blocks(server)

    def at(self, server: PyTree, blocks: AbstractBlocks) -> PyTree:
        """Return the state with other blocks."""
        return self.algorithm.at(server, blocks)

    def watched(self, server: PyTree) -> PyTree:
        """Return what the method has watched."""
        return self.algorithm.watched(server)

    def worked_on(self, server: PyTree) -> PyTree:
        """Return what clients of the method work on."""
        return self.algorithm.worked_on(server)

    def forgotten(self, server: PyTree) -> PyTree:
        """Let the method forget what clients no longer know."""
        return self.algorithm.forgotten(server)

    def private_blocks(self) -> Pair:
        """Flag what the method keeps on clients."""
        return self.algorithm.private_blocks()

    def channel(self) -> Channel:
        """Return what the method does to replies."""
        return self.algorithm.channel()

    def events(self, server: PyTree) -> list[str]:
        """Return the method's own."""
        return self.algorithm.events(server)

    def check(self, curvature: float, client: int) -> None:
        """Ask the method."""
        self.algorithm.check(curvature, client)

    def check_balance(self, curvatures: Balance) -> None:
        """Ask the method."""
        self.algorithm.check_balance(curvatures)


class Inside(eqx.Module):
    """A server's state with the state of the method inside of it."""

    server: eqx.AbstractVar[PyTree]


class AroundServer(AbstractWrapper):
    """A wrapper whose server keeps numbers of its own around the method's state."""

    def point(self, server: Inside) -> Pair:
        """Return the method's iterate."""
        return self.algorithm.point(server.server)

    def blocks(self, server: Inside) -> AbstractBlocks | None:
        """Return the method's blocks."""
        return self.algorithm.blocks(server.server)

    def at(self, server: Inside, blocks: AbstractBlocks) -> Inside:
        """Return the state with other blocks."""
        return replace(server, server=self.algorithm.at(server.server, blocks))

    def watched(self, server: Inside) -> PyTree:
        """Return what the method has watched."""
        return self.algorithm.watched(server.server)

    def worked_on(self, server: Inside) -> PyTree:
        """Return what clients of the method work on."""
        return self.algorithm.worked_on(server.server)

    def forgotten(self, server: Inside) -> Inside:
        """Let the method forget what clients no longer know."""
        return replace(server, server=self.algorithm.forgotten(server.server))

    def events(self, server: Inside) -> list[str]:
        """Return the method's own."""
        return self.algorithm.events(server.server)


def check_one_loop(name: str, algorithm: AbstractAlgorithm) -> OneLoop:
    """Return a method of one loop, and raise if it is none."""
    if isinstance(algorithm, OneLoop):
        return algorithm
    raise InvalidInputError(
        f"`{name}` changes the local steps of a method of one loop, and "
        f"`{type(algorithm).__name__}` is none. Apply it to the method itself, inside "
        "of wrappers that change the round."
    )


class Around(OneLoop, AbstractWrapper):
    """A wrapper around a method of one loop, and one itself: the loop is its own."""

    algorithm: OneLoop = part(  # pyright: ignore[reportIncompatibleVariableOverride]
        "the method of one loop that is varied"
    )

    def __check_init__(self) -> None:
        check_one_loop(self.name(), self.algorithm)

    def name(self) -> str:
        """Return what the wrapper is called."""
        return type(self).__name__

    @property
    def local_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of local steps, p."""
        return self.algorithm.local_steps

    def unwrapped(self) -> AbstractAlgorithm:
        """Return the method itself."""
        return self.algorithm.unwrapped()

    def with_local_steps(self, count: int) -> Any:
        """Return the same around the method with another number of local steps."""
        inner = self.algorithm.with_local_steps(count)
        return eqx.tree_at(lambda one: one.algorithm, self, inner)

    @property
    def estimator(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The method's estimator."""
        return self.algorithm.estimator

    @property
    def moves(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of the blocks that move."""
        return self.algorithm.moves

    @property
    def sums(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Say whether samples are summed."""
        return self.algorithm.sums

    @property
    def returns_point(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Say whether a reply is an iterate."""
        return self.algorithm.returns_point

    def variables(self, x: Upper, y: Lower) -> Any:
        """Return the method's blocks."""
        return self.algorithm.variables(x, y)

    def directions(self, oracle: Oracle, key: Key, t: Any) -> Any:
        """Return the method's maps."""
        return self.algorithm.directions(oracle, key, t)

    def step(self, t: Any) -> Any:
        """Return the method's steps."""
        return self.algorithm.step(t)

    def weight(self, t: Any) -> Any:
        """Return the method's weights."""
        return self.algorithm.weight(t)

    def order(self) -> Order:
        """Return the method's order."""
        return self.algorithm.order()

    def in_turn(self) -> Order:
        """Return the method's alternating order."""
        return self.algorithm.in_turn()

    def parts(self) -> tuple[Part, ...]:
        """Return the method's parts."""
        return self.algorithm.parts()

    def sent(self, end: Iterate, total: PyTree, turn: Turn) -> PyTree:
        """Return the method's reply."""
        return self.algorithm.sent(end, total, turn)

    def received(self, server: Iterate, mean: PyTree) -> tuple[Iterate, PyTree]:
        """Return what the method makes of a mean reply."""
        return self.algorithm.received(server, mean)


class With(Around):
    """A method of one loop with one more part."""

    variation: Part = part("what is varied")

    def __check_init__(self) -> None:
        method = check_one_loop(self.name(), self.algorithm)
        unequal = any(one.unequal for one in method.parts())
        if self.variation.corrects and unequal:
            raise InvalidInputError(
                f"`{self.name()}` of `{self.title}`: a correction is for equal numbers "
                "of local steps. Leave out one of the two."
            )

    def name(self) -> str:
        """Return what the part is called."""
        return type(self.variation).__name__

    def parts(self) -> tuple[Part, ...]:
        """Return the method's parts, and this one."""
        return (*self.algorithm.parts(), self.variation)

    def settings(self) -> dict[str, Any]:
        """Return those of the method, and of the part."""
        return {**self.algorithm.settings(), **self.variation.settings()}


def mapped(phases: Phases, change: Callable[[Phase], Phase]) -> Phases:
    """Change every phase, inside of repeats, too."""
    return tuple(
        change(entry)
        if isinstance(entry, Phase)
        else replace(entry, phases=mapped(entry.phases, change))
        for entry in phases
    )


def moving_phases(phases: Phases) -> list[Phase]:
    """Return the phases that send points back."""
    return [phase for phase in every_phase(phases) if phase.moves]


def inner_phase(phase: Phase) -> Phase:
    """Return an exchange of the method inside of an `Inside` state, as it is."""
    plain: Any = phase.down

    def down(server: Inside, turn: ServerTurn) -> PyTree:
        return phase.message(server.server, turn)

    def up(server: Inside, reply: PyTree, turn: ServerTurn) -> Inside:
        return replace(server, server=phase.taken_in(server.server, reply, turn))

    sees = isinstance(phase.down, SeesTurn)
    say = with_turn(down) if sees else lambda server: plain(server.server)
    return replace(phase, down=say, up=with_turn(up))
