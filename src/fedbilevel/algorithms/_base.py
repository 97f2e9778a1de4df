"""What an algorithm is: states, and phases that are run one exchange each.

An algorithm owns mathematics only. A runtime owns clients, cohorts, keys, averaging,
devices, checkpoints and clocks, and changes none of the numbers.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int, PyTree

from fedbilevel._types import Key, Lower, Pair, Upper
from fedbilevel.problem import Oracle

__all__ = ["AbstractAlgorithm", "Phase", "Turn", "when"]


class Turn(eqx.Module):
    """Which round this is, and the randomness of one client in one phase."""

    key: Key
    round: Int[Array, ""] | int

    def steps(self, count: int) -> Int[Array, " count"]:
        """Return the `count` local iterations t of this round, from the run's start."""
        return self.round * count + jnp.arange(count, dtype=jnp.int32)

    def keys(self, count: int) -> Key:
        """Return a key per local iteration; it depends on t, not on `count`."""
        return jax.vmap(lambda t: jr.fold_in(self.key, t))(self.steps(count))

    def spare_keys(self, count: int) -> Key:
        """Return keys that no local iteration uses, the same in every round."""
        return jr.split(jr.fold_in(self.key, 2**32 - 1), count)


class Phase(eqx.Module):
    """One exchange: a message to every participant, work there, the mean reply back.

    down(server) -> message;  local(message, client, oracle, turn) -> client, reply;
    up(server, mean reply) -> server.
    """

    name: str = eqx.field(static=True)
    down: Callable[[PyTree], PyTree]
    local: Callable[[PyTree, PyTree, Oracle, Turn], tuple[PyTree, PyTree]]
    up: Callable[[PyTree, PyTree], PyTree]


class AbstractAlgorithm(eqx.Module):
    """An algorithm as a pytree: numbers are leaves, counts are static."""

    reference: ClassVar[str]
    provenance: ClassVar[str]

    @abc.abstractmethod
    def init_server(self, x: Upper, y: Lower) -> PyTree:
        """Return what the server carries between rounds."""

    @abc.abstractmethod
    def init_client(self, x: Upper, y: Lower) -> PyTree:
        """Return what stays on a client between rounds."""

    @abc.abstractmethod
    def setup(self) -> tuple[Phase, ...]:
        """Return the phases that run once, before the first round."""

    @abc.abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of one round."""

    @abc.abstractmethod
    def point(self, server: PyTree) -> Pair:
        """Return the iterate (x, y) to report."""

    @abc.abstractmethod
    def check(self, curvature: float, client: int) -> None:
        """Raise if a parameter cannot work where the lower level curves this much."""

    @abc.abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Return every parameter as plain numbers and text."""

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
