"""What an algorithm is: states, and phases that are run one exchange each.

An algorithm owns mathematics only. A runtime owns clients, cohorts, keys, averaging,
private blocks, devices, checkpoints and clocks, and changes none of the numbers.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int, PyTree

from fedbilevel._blocks import NOTHING
from fedbilevel._types import Key, Lower, Pair, Upper
from fedbilevel.problem import Oracle
from fedbilevel.schedules import describe

__all__ = [
    "AbstractAlgorithm",
    "Phase",
    "Phases",
    "Repeat",
    "Turn",
    "every_phase",
    "when",
]


class Turn(eqx.Module):
    """How often this phase ran before, and the randomness of one client in it.

    For a phase that runs once a round that is the number of the round, from 0.
    """

    key: Key
    round: Int[Array, ""] | int

    def steps(self, count: int) -> Int[Array, " count"]:
        """Return the `count` local iterations t of this turn, from the run's start."""
        return self.round * count + jnp.arange(count, dtype=jnp.int32)

    def keys(self, count: int) -> Key:
        """Return a key per local iteration; it depends on t, not on `count`."""
        return jax.vmap(lambda t: jr.fold_in(self.key, t))(self.steps(count))

    def spare_keys(self, count: int) -> Key:
        """Return keys that no local iteration uses, the same in every round."""
        return jr.split(jr.fold_in(self.key, 2**32 - 1), count)

    def channel_key(self) -> Key:
        """Return a key for what is done to the reply, another one in every turn."""
        return jr.fold_in(jr.fold_in(self.key, 2**32 - 2), self.round)


class Phase(eqx.Module):
    """One exchange: a message to every participant, work there, the mean reply back.

    down(server) -> message;  local(message, client, oracle, turn) -> client, reply;
    up(server, mean reply) -> server. What belongs to one level travels in a `Pair`.
    Where levels may be private, down is the identity: clients update their own blocks
    as the server updates the others.

    about(message) -> what both sides know of a reply beforehand, shaped like it; None
    stands for zeros. The difference is what a channel clips, compresses or blurs.
    """

    name: str = eqx.field(static=True)
    down: Callable[[PyTree], PyTree]
    local: Callable[[PyTree, PyTree, Oracle, Turn], tuple[PyTree, PyTree]]
    up: Callable[[PyTree, PyTree], PyTree]
    about: Callable[[PyTree], PyTree] | None = None


class Repeat(eqx.Module):
    """Phases that run `times` times in a round.

    With `random`, a number uniform on {0..times}, drawn anew in every round and shared
    by server and clients.
    """

    times: int = eqx.field(static=True)
    phases: tuple["Phase | Repeat", ...]
    random: bool = eqx.field(static=True, default=False)


Phases = tuple[Phase | Repeat, ...]


def every_phase(phases: Phases) -> list[Phase]:
    """List the phases in the order in which they first run; that is their number."""
    found = []
    for entry in phases:
        found += [entry] if isinstance(entry, Phase) else every_phase(entry.phases)
    return found


class AbstractAlgorithm(eqx.Module):
    """An algorithm as a pytree: numbers are leaves, counts are static.

    `answers` says whose lower level it solves. `private` marks the levels that it keeps
    on each client; `allows_private` is False where whole levels must be averaged.
    `inverts_locally` is True where a client's own Hessian stands in for the mean one,
    which is right only if clients are alike. `pools` puts all data on one machine.
    """

    reference: ClassVar[str]
    provenance: ClassVar[str]
    answers: ClassVar[str] = "shared y"
    private: ClassVar[Pair] = NOTHING
    allows_private: ClassVar[bool] = True
    inverts_locally: ClassVar[bool] = False
    pools: ClassVar[bool] = False

    @abc.abstractmethod
    def init_server(self, x: Upper, y: Lower) -> PyTree:
        """Return what the server carries between rounds."""

    @abc.abstractmethod
    def init_client(self, x: Upper, y: Lower) -> PyTree:
        """Return what stays on a client between rounds."""

    def setup(self) -> Phases:
        """Return the phases that run once, before the first round."""
        return ()

    @abc.abstractmethod
    def phases(self) -> Phases:
        """Return the phases of one round."""

    @abc.abstractmethod
    def point(self, server: PyTree) -> Pair:
        """Return the iterate (x, y) to report."""

    def check(self, curvature: float, client: int) -> None:
        """Raise if a parameter cannot work where the lower level curves this much."""
        del curvature, client

    def parameters(self) -> dict[str, Any]:
        """Return every parameter as plain numbers and text."""
        return {name: describe(value) for name, value in vars(self).items()}

    @classmethod
    @abc.abstractmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""

    @classmethod
    @abc.abstractmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from options as the command line gives them."""


def when(
    predicate: Any, then: Callable[[], PyTree], otherwise: Callable[[], PyTree]
) -> PyTree:
    """Branch on a value all clients share, in Python where it is already known."""
    if isinstance(predicate, bool):
        return then() if predicate else otherwise()
    return jax.lax.cond(predicate, then, otherwise)
