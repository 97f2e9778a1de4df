"""The contract of an algorithm: states, and phases of one exchange each.

An algorithm owns mathematics only. A runtime owns clients, cohorts, keys, averaging,
private blocks, devices, checkpoints and clocks, and changes none of the numbers.
"""

import abc
from collections.abc import Callable
from dataclasses import Field, fields, replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedbilevel._blocks import NOTHING
from fedbilevel._types import AbstractBlocks, Key, Keys, Lower, Pair, Upper
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.hypergradient import AbstractHypergradient, Neumann
from fedbilevel.problem import Oracle
from fedbilevel.schedules import check_fields, describe, documented, is_known
from fedbilevel.units import is_relative


class Turn(eqx.Module):
    """How often this phase ran before, and the randomness of one client in it.

    For a phase that runs once a round the index is the number of the round, from 0.
    `key` is the client's own, `shared` that of the server and all clients. Where `key`
    is another one in every exchange, `lasting` is not.
    """

    key: Key
    index: Int[Array, ""] | int
    shared: Key
    lasting: Key | None = None

    def steps(self, count: int) -> Int[Array, " count"]:
        """Return the `count` local iterations t of this turn, from the run's start."""
        return self.index * count + jnp.arange(count, dtype=jnp.int32)

    def keys(self, count: int) -> Keys:
        """Return a key per local iteration, which depends on t, not on `count`."""
        return jax.vmap(lambda t: jr.fold_in(self.key, t))(self.steps(count))

    def spare_keys(self, count: int) -> Keys:
        """Return keys that no local iteration uses."""
        return jr.split(jr.fold_in(self.key, 2**32 - 1), count)

    def lasting_key(self) -> Key:
        """Return a key that is the same in every round. No rows are drawn by it."""
        key = self.key if self.lasting is None else self.lasting
        return replace(self, key=key).spare_keys(1)[0]

    def channel_key(self) -> Key:
        """Return a key for what is done to the reply, another one in every turn."""
        return jr.fold_in(jr.fold_in(self.key, 2**32 - 2), self.index)


class ServerTurn(eqx.Module):
    """The server's view of an exchange.

    `index` counts how often the phase ran before and `shared` is a key that server and
    clients have in common, as in `Turn`. `ids` are the clients that were asked, in
    their places, `present` flags those that took part, and `clients` is K. Before the
    replies are there everybody counts as present. `weight` is the share of all clients'
    weight that took part, once that is known. A client that updates its private blocks
    as the server does knows no ids.
    """

    index: Int[Array, ""] | int
    shared: Key
    ids: Int[Array, " places"] | None
    present: Bool[Array, " places"]
    clients: int = eqx.field(static=True)
    weight: Float[Array, ""] | None = None

    def share(self) -> Float[Array, ""]:
        """Return the share of all clients, by weight, that took part: n/K if alike.

        Of its own blocks a client is all there is.
        """
        if self.ids is None:
            return jnp.ones((), float)
        if self.weight is not None:
            return self.weight
        return jnp.sum(self.present).astype(float) / self.clients


class SeesTurn(eqx.Module):
    """A server's function with the `ServerTurn` as one more argument."""

    function: Callable[..., PyTree]


def with_turn(function: Callable[..., PyTree]) -> SeesTurn:
    """Let `down(server, turn)` or `up(server, reply, turn)` see the server's turn."""
    return SeesTurn(function)


class Each(eqx.Module):
    """A part of a message that differs by participant.

    The leaves of `tree` have a leading axis over places: place j gets entry j.
    """

    tree: PyTree


class Gathered(eqx.Module):
    """The replies of a phase that gathers, one after the other, by place.

    `weights` are those of the clients, 0 where no client replied: the value in such a
    place is meaningless.
    """

    replies: PyTree
    weights: Float[Array, " places"]


class Phase(eqx.Module):
    """One exchange: a message to every participant, work there, the mean reply back.

    down(server) -> message;  local(message, client, oracle, turn) -> client, reply;
    up(server, mean reply) -> server. Values of one level travel in a `Pair`.

    Where blocks are private, the server has None in their place. So do the state and
    the mean reply that its `up` sees. A client gets the server's state without its own
    blocks, puts them in, and applies `down` itself. After its work it applies `up` to
    this whole state and its own reply, and keeps its blocks of the outcome. So `up`
    must work on any part of the blocks: on trees, not on named leaves.

    about(message) -> what both sides know of a reply beforehand, shaped like it. None
    stands for zeros. A channel clips, compresses or blurs the difference. With `moves`
    a reply is a point, or an `Iterate` with one, and the difference is a step that a
    server's optimizer may change.

    `down` and `up` may be `with_turn` functions. A message may hold `Each`. A phase
    that `gathers` hands `up` all replies, as `Gathered`, in place of their mean. With
    `everyone` all clients take part, whatever the size of a cohort is. A phase with
    `every` runs in the first of so many rounds only, and its turns count those.
    """

    name: str = eqx.field(static=True)
    down: Callable[[PyTree], PyTree] | SeesTurn
    local: Callable[[PyTree, PyTree, Oracle, Turn], tuple[PyTree, PyTree]]
    up: Callable[[PyTree, PyTree], PyTree] | SeesTurn
    about: Callable[[PyTree], PyTree] | None = None
    moves: bool = eqx.field(static=True, default=False)
    gathers: bool = eqx.field(static=True, default=False)
    everyone: bool = eqx.field(static=True, default=False)
    every: int = eqx.field(static=True, default=1)

    def message(self, server: PyTree, turn: ServerTurn | None) -> PyTree:
        """Return what the server says; of no turn where the message sees none."""
        if isinstance(self.down, SeesTurn):
            return self.down.function(server, turn)
        return self.down(server)

    def known(self, server: PyTree) -> PyTree | None:
        """Return what is known of a reply, where the server's state alone decides."""
        if self.about is None or isinstance(self.down, SeesTurn):
            return None
        return self.about(self.down(server))

    def saying(self, down: Callable[[PyTree, Any], PyTree]) -> "Phase":
        """Return the exchange with another message, by a turn if this one sees it."""
        sees = isinstance(self.down, SeesTurn)
        say = with_turn(down) if sees else lambda server: down(server, None)
        return replace(self, down=say)

    def taken_in(self, server: PyTree, reply: PyTree, turn: ServerTurn) -> PyTree:
        """Return the server's state after the replies."""
        if isinstance(self.up, SeesTurn):
            return self.up.function(server, reply, turn)
        return self.up(server, reply)


class Repeat(eqx.Module):
    """Phases that run `times` times in a round.

    With `random`, a number uniform on {0..times}, drawn anew in every round and shared
    by server and clients. With a `chance`, a coin is thrown before each repetition, and
    heads ends the loop. `times` is then the maximum.
    """

    times: int = eqx.field(static=True)
    phases: tuple["Phase | Repeat", ...]
    random: bool = eqx.field(static=True, default=False)
    chance: Float[Array, "..."] | float | None = None


Phases = tuple[Phase | Repeat, ...]
Balance = Callable[[float], tuple[float, float]]


def every_phase(phases: Phases) -> list[Phase]:
    """List the phases in the order in which they first run, which is their number."""
    found = []
    for entry in phases:
        found += [entry] if isinstance(entry, Phase) else every_phase(entry.phases)
    return found


class Pointed(eqx.Module):
    """A server's state with a point in it."""

    point: eqx.AbstractVar[Any]


class AbstractAlgorithm(eqx.Module):
    """An algorithm as a pytree: numbers are leaves, counts are static.

    `answers` says which lower level it solves. `allows_private` is False where whole
    levels must be averaged. `inverts_locally` is True where a client's own Hessian
    stands in for the mean one, which is right only if clients are alike.
    `counts_clients` is True where it solves the mean over clients, whatever their
    weights. `pools` asks for the rows of all clients on one machine, where the method
    is chosen by its name, and `rule` is the hypergradient estimator that is then built
    from Q and theta. `needs_hessian` is False where gradients of the losses are all
    that a method asks for. `finishes` is True where a method says itself when a run is
    over, and `bears_noise` False where noise in replies would break it. `sends_hessian`
    is True where a reply has second derivatives over all rows, which say much about
    few.
    """

    reference: ClassVar[str] = "none given"
    provenance: ClassVar[str] = "not stated"
    answers: ClassVar[str] = "shared y"
    allows_private: ClassVar[bool] = True
    inverts_locally: ClassVar[bool] = False
    counts_clients: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    needs_hessian: ClassVar[bool] = True
    finishes: ClassVar[bool] = False
    bears_noise: ClassVar[bool] = True
    sends_hessian: ClassVar[bool] = False
    rule: ClassVar[type[AbstractHypergradient]] = Neumann

    named: str = eqx.field(
        static=True,
        default="",
        kw_only=True,
        metadata={"meaning": "the name of the preset that made it, if one did"},
    )

    def __init_subclass__(cls, **more: Any) -> None:
        """Let `help` say what the parameters mean."""
        super().__init_subclass__(**more)
        cls.__doc__ = documented(cls)

    @abc.abstractmethod
    def init_server(self, x: Upper, y: Lower) -> PyTree:
        """Return what the server carries between rounds."""

    def __check_init__(self) -> None:
        check_fields(self)

    def init_client(self, x: Upper, y: Lower) -> PyTree:
        """Return what stays on a client between rounds: nothing."""

    def setup(self) -> Phases:
        """Return the phases that run once, before the first round."""
        return ()

    @abc.abstractmethod
    def phases(self) -> Phases:
        """Return the phases of one round."""

    def point(self, server: PyTree) -> Pair:
        """Return the iterate (x, y) to report."""
        return Pair(server.point.x, server.point.y)

    def blocks(self, server: PyTree) -> AbstractBlocks | None:
        """Return all blocks that move, z too, if the server carries them as a point."""
        return server.point if isinstance(server, Pointed) else None

    def at(self, server: PyTree, blocks: AbstractBlocks) -> PyTree:
        """Return the server's state with other blocks."""
        return replace(server, point=blocks)

    def watched(self, server: PyTree) -> PyTree:
        """Return the blocks that go far when a run diverges: the reported y."""
        return Pair(None, self.point(server).y)

    def measured(self, server: PyTree, columns: dict[str, Array], done: Any) -> PyTree:
        """Return the server's state once a point was measured after so many rounds."""
        return server

    def best(self, server: PyTree) -> Any:
        """Return the best point that was measured, where a method remembers it."""

    def finished(self, server: PyTree) -> Bool[Array, ""] | bool:
        """Say whether a run is over, by the method's own tolerance."""
        return False

    def gave_up(self, server: PyTree) -> str:
        """Say what a method could not hold, if it was so."""
        return ""

    def worked_on(self, server: PyTree) -> PyTree:
        """Return the part of what the server carries that clients work on: all."""
        return server

    def forgotten(self, server: PyTree) -> PyTree:
        """Return the server's state for clients that have lost their memory."""
        return server

    def private_blocks(self) -> Pair:
        """Flag the levels that each client keeps to itself."""
        return NOTHING

    def channel(self) -> Channel:
        """Return what the method itself does to replies: compress them, say.

        What is chosen for a run comes before it.
        """
        return PLAIN

    @property
    def title(self) -> str:
        """The method's name, for people."""
        return self.named or type(self).__name__

    def __repr__(self) -> str:
        """Show the values of parameters; those of a traced program have none."""
        shown = self.settings() if self.named else dict(vars(self))
        shown.pop("named", None)
        return f"{self.named or type(self).__name__}({', '.join(pairs(shown))})"

    def events(self, server: PyTree) -> list[str]:
        """Describe automatic interventions."""
        return []

    def check(self, curvature: float, client: int) -> None:
        """Raise if a part cannot work where the lower level curves this much."""
        for field in fields(self):
            check = getattr(getattr(self, field.name), "check", None)
            if check is not None:
                check(curvature, client)

    def check_balance(self, curvatures: Balance) -> None:
        """Raise if the upper level curves too much for what is taken from the lower.

        `curvatures(factor)` has how much f and g curve where g - factor f does least.
        """

    def drifts(self) -> bool:
        """Say whether clients that differ drift apart in many local steps."""
        return False

    def unwrapped(self) -> "AbstractAlgorithm":
        """Return the method whose local steps wrappers vary: itself."""
        return self

    def settings(self) -> dict[str, Any]:
        """Return every parameter by its name, with those of what is wrapped."""
        return {name: value for name, value in vars(self).items() if name != "named"}

    def parameters(self) -> dict[str, Any]:
        """Return every parameter as plain numbers and text."""
        return {name: describe(value) for name, value in self.settings().items()}


def declared(kind: type[AbstractAlgorithm]) -> dict[str, Field]:
    """Return the fields of a method that are its parameters, by their names."""
    return {one.name: one for one in fields(kind) if one.name != "named"}


def pairs(values: dict[str, Any]) -> list[str]:
    """Write parameters as they are passed, with numbers in few digits."""
    return [
        f"{name}={jax.tree.map(_rounded, one, is_leaf=is_relative)!r}"
        for name, one in values.items()
    ]


def _rounded(leaf: Any) -> Any:
    """Return a number in few digits."""
    scalar = is_known(leaf) and eqx.is_inexact_array(leaf) and leaf.ndim == 0
    return float(f"{float(leaf):.6g}") if scalar else leaf
