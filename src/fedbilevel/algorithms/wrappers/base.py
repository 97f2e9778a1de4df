"""The contract of wrappers: whatever a wrapper leaves out is the method's own.

`AroundServer` is for the round: it changes exchanges of any method, and its server
keeps numbers of its own. `With` adds a `Part` to a method of one loop, and is a method
of one loop itself. So wrappers nest, those of local steps inside of those of the round.
"""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedbilevel._types import AbstractBlocks
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    ServerTurn,
    every_phase,
    pairs,
    with_turn,
)
from fedbilevel.algorithms.one_loop import OneLoop
from fedbilevel.algorithms.parts import Part
from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import part


class _Inner:
    """The attribute, or method, of the same name of what is wrapped."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.algorithm, self.name)


class _InnerState(_Inner):
    """A function of the server's state, asked of the state inside of it."""

    def __get__(self, wrapper: Any, owner: type) -> Any:
        ask = super().__get__(wrapper, owner)
        return ask if wrapper is None else lambda server: ask(server.server)


_inner: Any = _Inner
_inner_state: Any = _InnerState

# Of what a method can be asked a wrapper answers these alone by itself.
_OWN = {"named", "parameters", "unwrapped"}
_ASKED = [one for one in vars(AbstractAlgorithm) if one[0] != "_" and one not in _OWN]


class AbstractWrapper(AbstractAlgorithm):
    """A method around a method. All that it does not change is the inner one's."""

    algorithm: AbstractAlgorithm = part("the method that is wrapped")
    init_server = _inner()
    phases = _inner()

    if not TYPE_CHECKING:
        vars().update({name: _Inner() for name in _ASKED})

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

    def settings(self) -> dict[str, Any]:
        """Return those of the method, and the wrapper's own."""
        return {**self.algorithm.settings(), **self._own()}

    def _own(self) -> dict[str, Any]:
        """Return the wrapper's parameters alone."""
        mine = {one.name for one in fields(self)} - {"algorithm", "named"}
        return {name: value for name, value in vars(self).items() if name in mine}

    def _written(self) -> str:
        """Return what is called to wrap a method."""
        return type(self).__name__

    def __repr__(self) -> str:
        """Show a chain from the outside in, one with a name as that method."""
        if self.named:
            return super().__repr__()
        inside = [repr(self.algorithm), *pairs(self._own())]
        return f"{self._written()}({', '.join(inside)})"


class Inside(eqx.Module):
    """A server's state with the state of the method inside of it."""

    server: PyTree


class AroundServer(AbstractWrapper):
    """A wrapper whose server keeps numbers of its own around the method's state."""

    point = _inner_state()
    blocks = _inner_state()
    watched = _inner_state()
    worked_on = _inner_state()
    events = _inner_state()
    best = _inner_state()
    finished = _inner_state()
    gave_up = _inner_state()

    def setup(self) -> Phases:
        """Return the method's own, as they are."""
        return mapped(self.algorithm.setup(), inner_phase)

    def at(self, server: Inside, blocks: AbstractBlocks) -> Inside:
        """Return the state with other blocks."""
        return replace(server, server=self.algorithm.at(server.server, blocks))

    def measured(self, server: Inside, columns: dict[str, Any], done: Any) -> Inside:
        """Let the method remember what was measured."""
        inner = self.algorithm.measured(server.server, columns, done)
        return replace(server, server=inner)

    def forgotten(self, server: Inside) -> Inside:
        """Let the method forget what clients no longer know."""
        return replace(server, server=self.algorithm.forgotten(server.server))


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

    unwrapped = _inner()
    local_steps = _inner()
    estimator = _inner()
    moves = _inner()
    sums = _inner()
    returns_point = _inner()
    variables = _inner()
    directions = _inner()
    step = _inner()
    weight = _inner()
    order = _inner()
    in_turn = _inner()
    parts = _inner()
    sent = _inner()
    received = _inner()

    def with_local_steps(self, count: int) -> Any:
        """Return the same around the method with another number of local steps."""
        inner = self.algorithm.with_local_steps(count)
        return eqx.tree_at(lambda one: one.algorithm, self, inner)


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

    def _written(self) -> str:
        """Return the function of a part, or of its set: `box`, `first_batch`."""
        kind = type(getattr(self.variation, "onto", self.variation))
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()

    def _own(self) -> dict[str, Any]:
        own = dict(vars(self.variation))
        bounds = own.pop("onto", None)
        return own if bounds is None else {**vars(bounds), **own}

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


def kind_of_numbers(x: PyTree) -> Any:
    """Return the type of what a wrapper measures: that of x, or single precision."""
    kind = jnp.result_type(jax.tree.leaves(x)[0])
    return kind if kind.itemsize > 2 else jnp.dtype(jnp.float32)


def moving_phases(phases: Phases) -> list[Phase]:
    """Return the phases that send points back."""
    return [phase for phase in every_phase(phases) if phase.moves]


def inner_phase(phase: Phase) -> Phase:
    """Return an exchange of the method inside of an `Inside` state, as it is."""

    def down(server: Inside, turn: Any) -> PyTree:
        return phase.message(server.server, turn)

    def up(server: Inside, reply: PyTree, turn: ServerTurn) -> Inside:
        return replace(server, server=phase.taken_in(server.server, reply, turn))

    return replace(phase.saying(down), up=with_turn(up))
