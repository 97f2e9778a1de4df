r"""Parts of a loop of local steps: its state, its parts, and small functions.

A `Part` is a variation of the loop in `one_loop.py`: it corrects directions, changes
one local step, or shares numbers with the server. The loop asks every part in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import AbstractBlocks, Key, Lower, Pair, Triple, Upper
from fedbilevel.algorithms import base
from fedbilevel.algorithms.directions import with_z
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Effective, Schedule, check_fields, count

Order = tuple[tuple[str, ...], ...]  # names of the blocks that move together, in turn
_BLOCKS = {"upper": "x", "lower": "y", "auxiliary": "z"}  # that a level moves


class Iterate(base.Pointed):
    """A point and the directions it moved along, as they travel.

    `shared` has what each part of a method shares: the server's numbers sent to the
    clients, the clients' answers in return.
    """

    point: Any
    direction: Any = None
    shared: tuple[Any, ...] = ()

    def sharing(self, place: int, value: PyTree) -> "Iterate":
        """Return the same with another value of the part with this number."""
        before, after = self.shared[:place], self.shared[place + 1 :]
        return replace(self, shared=(*before, value, *after))


class Memory(eqx.Module):
    """Where a client last evaluated its directions, in which turn, and what parts keep.

    `control` is for methods with a correction of their own.
    """

    evaluated: Any = None
    index: Int[Array, ""] | None = None
    control: Any = None
    own: tuple[Any, ...] = ()


class Begin(NamedTuple):
    """A client's view when its local steps begin; `method` is a `OneLoop`."""

    method: Any
    message: Iterate
    memory: Memory
    oracle: Oracle
    turn: base.Turn


class Step(eqx.Module):
    """Where a client is between two local steps; `total` sums samples, if asked for."""

    point: Any
    direction: Any
    evaluated: Any
    total: Any = None


class Part(eqx.Module):
    """A variation of the loop. The method decides all that a part leaves out.

    `sums` asks for the mean sample of a turn. `corrects` marks a part that corrects
    directions for drift, which parts that bound local steps ask for. `unequal` marks
    unequal numbers of steps.
    """

    sums: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    unequal: ClassVar[bool] = False

    def __check_init__(self) -> None:
        check_fields(self)

    def settings(self) -> dict[str, Any]:
        """Return the parameters by the names of options."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def shared(self, start: Iterate) -> PyTree:
        """Return what the server shares with clients at the start."""

    def own(self, w: PyTree) -> PyTree:
        """Return what stays on a client at the start."""

    def setup(self, method: Any, place: int) -> base.Phases:
        """Return exchanges before the first round; the part's number is `place`."""
        return ()

    def before(self, method: Any, place: int) -> base.Phases:
        """Return exchanges of a round before its local steps."""
        return ()

    def begun(self, begin: Begin, shared: PyTree, own: PyTree) -> PyTree:
        """Return what the hooks below see as `state` in this turn."""

    def previous(self, begin: Begin, seen: Any, fallback: Any) -> tuple[Any, Any]:
        """Return where directions were evaluated, and where by one that was away."""
        return seen, fallback

    def first(self, begin: Begin, G: Callable[[Key], Callable], d: PyTree) -> PyTree:
        """Return the direction that local steps begin with."""
        return d

    def corrected(self, state: PyTree, maps: Any) -> Any:
        """Return the maps of a local step."""
        return maps

    def weights(self, state: PyTree, weights: PyTree, t: Array) -> PyTree:
        """Return the weights of iteration t."""
        return weights

    def scaled(self, state: PyTree, d: PyTree) -> PyTree:
        """Return the direction that blocks move along."""
        return d

    def projected(self, w: PyTree) -> PyTree:
        """Return the point after blocks have moved."""
        return w

    def stepped(
        self, state: PyTree, old: Step, new: Step, t: Array
    ) -> tuple[PyTree, Step]:
        """Return the state, and where a whole local step ends."""
        return state, new

    def answer(self, shared: PyTree, mean: PyTree) -> PyTree:
        """Return what of the mean sample is sent back."""

    def ended(self, state: PyTree, answer: PyTree) -> tuple[PyTree, PyTree]:
        """Return what stays on the client, and what is sent back."""
        return None, answer

    def known(self, shared: PyTree) -> PyTree:
        """Return what both sides know of the answer beforehand."""

    def taken(
        self, shared: PyTree, answer: PyTree, server: Iterate, turn: base.ServerTurn
    ) -> PyTree:
        """Return what the server shares after the mean answer."""
        return shared

    def forgotten(self, shared: PyTree) -> PyTree:
        """Return what is shared with clients that have lost their memory."""
        return shared


def own_number(turn: base.Turn, fewest: int, tau: int) -> Array:
    """Return tau_i, the same in every round."""
    return jr.randint(turn.lasting_key(), (), fewest, tau + 1, jnp.int32)


class OwnNumber(Part):
    """A number of local steps that differs by client."""

    unequal = True

    fewest_steps: int = count("fewest local steps of a client")
    most: int = count("most local steps, tau")

    def __check_init__(self) -> None:
        if self.fewest_steps > self.most:
            raise InvalidInputError(
                f"fewest_steps={self.fewest_steps}: at most local_steps, which is "
                f"{self.most}."
            )

    def begun(self, begin, shared, own):
        """Draw tau_i; return the iteration at which it ends."""
        first = begin.turn.steps(self.most)[0]
        return first + own_number(begin.turn, self.fewest_steps, self.most)

    def stepped(self, state, old, new, t):
        """Return the old place once tau_i steps are made."""
        return state, _tree.select(t < state, new, old)


def only(tree: Any, names: Sequence[str]) -> Any:
    """Return the named blocks, None in the place of the others."""
    if not isinstance(tree, AbstractBlocks):
        return tree
    others = {one.name: None for one in fields(tree) if one.name not in names}
    return replace(tree, **others)


def stacked_zeros(tree: PyTree, count: int) -> PyTree:
    """Return so many zeros of each kind, all shaped like a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), tree)


def averaged(
    local: Callable, about: Callable[[Any], Any] = lambda sent: sent
) -> base.Phase:
    """Return an exchange of local steps, then the mean of what moved.

    `about` chooses the part of the server's state that is sent back. The rest stays.
    """

    def up(server: PyTree, mean: PyTree) -> PyTree:
        return combine(mean, server)

    return base.Phase("local", lambda server: server, local, up, about, moves=True)


def no_memory(point: PyTree, control: Any = None, own: tuple = ()) -> Memory:
    """Return the memory of a client that has no usable previous point."""
    return Memory(point, jnp.asarray(-2, jnp.int32), control, own)


def local_steps(iterate: Callable, carry: Any, turn: base.Turn, count: int) -> Any:
    """Repeat carry <- iterate(carry, (t, key of t)) over the iterations of a turn."""

    def body(carry: Any, time: Any) -> tuple[Any, None]:
        return iterate(carry, time), None

    return jax.lax.scan(body, carry, (turn.steps(count), turn.keys(count)))[0]


def move(point: PyTree, steps: PyTree, directions: PyTree) -> PyTree:
    """Return point - steps * directions; `steps` has a number for each block."""

    def block(step: Array, w: PyTree, d: PyTree) -> PyTree:
        return _tree.add_scaled(w, -step, d)

    return jax.tree.map(block, steps, point, directions)


def previous_point(received: Any, memory: Memory, turn: base.Turn) -> Any:
    """Return where this client stood before, if it took part in the last turn.

    One that did not has no previous point on the averaged path: at the received one
    the correction vanishes and momentum remains.
    """
    current = memory.index == turn.index - 1
    return _tree.select(current, memory.evaluated, received)


def evaluate(maps: Any) -> Callable[[Any], Any]:
    """Return w -> the value of every block's map at w, where there is one."""
    return lambda w: jax.tree.map(lambda G: G(w), maps)


def at_time(schedule: Schedule, t: Any, like: Array) -> Array:
    """Return a schedule's value; one of another library chooses its own precision."""
    return jnp.asarray(schedule(t), like.dtype)


def momentum_weight(
    factor: Array, schedule: Schedule | None, t: Any, power: int
) -> Array:
    """Return factor * schedule(t-1)^power; 1 at t = 0, where there is no momentum."""
    weight = factor
    if schedule is not None:
        earlier = jnp.maximum(jnp.asarray(t) - 1, 0)
        weight = factor * at_time(schedule, earlier, factor) ** power
    return jnp.where(t == 0, jnp.ones((), weight.dtype), weight)


class Stepping(base.AbstractAlgorithm):
    """A method whose fields declare the steps, and the weights, of blocks that move."""

    moves: ClassVar[Any] = ("x", "y")  # a tuple of names

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Let fields of methods, local_steps among them, be of any type."""

    def variables(self, x: Upper, y: Lower) -> Any:
        """Return the blocks at the start: (x, y), with z = 0 where z moves."""
        return with_z(x, y) if "z" in self.moves else Pair(x, y)

    def step(self, t: Any) -> Any:
        """Return the step size of every block that moves, as fields declare them."""

        def step(letter: Array, schedule: Any, power: int) -> Array:
            return letter if schedule is None else letter * at_time(schedule, t, letter)

        steps = self.of_blocks(self._declared("step", step))
        for name in self.moves:
            if getattr(steps, name) is None:
                raise InvalidInputError(
                    f"`{self.title}` declares no step for {name}. Give it a field "
                    "`schedules.step(...)` for it, or a method `step(t)`."
                )
        return steps

    def weight(self, t: Any) -> Any:
        """Return the weight of the newest sample in every direction; 1 at t = 0."""

        def weight(letter: Array, schedule: Any, power: int) -> Array:
            return momentum_weight(letter, schedule, t, power)

        found = self._declared("weight", weight)
        return self.of_blocks(dict.fromkeys(self.moves, 1.0) | found) if found else 1.0

    def of_blocks(self, found: dict[str, Any]) -> Any:
        """Return what was found for the blocks, None for others."""
        kind = Triple if "z" in self.moves else Pair
        return kind(*(found.get(one.name) for one in fields(kind)))

    def _declared(self, kind: str, value: Callable[..., Any]) -> dict[str, Any]:
        """Return value(number, schedule, power) for every block that a field declares.

        `kind` is "step" or "weight", and of two fields of a level the first one counts.
        """
        found = {}
        for one in fields(self):
            how = one.metadata.get("effective", Effective(("",)))
            level, _, what = how.names[0].partition("_")
            if what == kind and _BLOCKS[level] not in found:
                schedule = getattr(self, how.over, None) if how.over else None
                letter = getattr(self, one.name)
                found[_BLOCKS[level]] = value(letter, schedule, how.power)
        return found
