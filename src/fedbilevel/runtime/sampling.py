"""Draws of a run: rows for a sample, and clients for an exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedbilevel._types import Key
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Data
from fedbilevel.runtime import keys

Replies = Callable[[int, int, int], int]  # of a phase's number, a turn and its cohort
_MANY_ROWS, _SOME_ROWS = 1000, 32  # of a client, and of a sample then
_BLOCK = 1024  # turns whose replies are counted together


@dataclass(frozen=True)
class Sampling:
    """Draws: rows for a sample, and clients for an exchange.

    `batch` is the number of rows per sample on both levels; None takes all rows, so
    that oracles are deterministic, and "auto" does so where no client holds 1,000, else
    32. `participants` take part in each exchange, drawn anew, uniformly and without
    replacement; None asks all clients. `participation` is the chance that a client that
    is asked replies, one for all or a list with one for each; None lets all reply.
    """

    batch: int | None | Literal["auto"] = "auto"
    participants: int | None = None
    participation: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batch, int) and self.batch < 1:
            raise InvalidInputError(f"batch={self.batch}: draw at least one row.")

    def chances(self, data: Data) -> Any:
        """Return the chance of each client to reply; None where all always do."""
        if self.participation is None:
            return None
        given = np.asarray(self.participation, np.float32)
        if given.shape not in ((), (data.clients,)) or not data.travels:
            raise InvalidInputError(
                f"participation has {given.size} chances for {data.clients} clients: "
                "give one number, or one for each client whose rows are its own."
            )
        if not ((given > 0) & (given <= 1)).all():
            raise InvalidInputError(
                "participation: every chance is above 0 and at most 1, got "
                f"{given.min():g} to {given.max():g}."
            )
        every = np.broadcast_to(given, (data.clients,))
        return None if (every == 1).all() else jnp.asarray(every)

    def rows(self, data: Data) -> int | None:
        """Return the rows per sample where the data are these; None for all."""
        if self.batch != "auto":
            return self.batch
        sizes = [np.asarray(data.upper_sizes), np.asarray(data.lower_sizes)]
        held = [one.max() if data.travels else one.sum() for one in sizes]
        return None if max(held) < _MANY_ROWS else _SOME_ROWS


def counted_replies(
    chances: Array | None, clients: int, stage: int
) -> Callable[[Key], Replies]:
    """Return what says how many reply in a stage, by seed; each is drawn once.

    Absent clients receive and compute nothing.
    """
    found: dict[tuple[bytes, int, int], np.ndarray] = {}

    def of_seed(key: Key) -> Replies:
        if chances is None:
            return lambda number, turn, cohort: cohort
        seed = np.asarray(jax.random.key_data(key)).tobytes()

        def replies(number: int, turn: int, cohort: int) -> int:
            block, place = divmod(turn, _BLOCK)
            here = (seed, number, block)
            if here not in found:
                turns = np.arange(_BLOCK, dtype=np.int32) + block * _BLOCK
                where = (np.int32(stage), np.int32(number))
                found[here] = np.asarray(
                    _replies_of_turns(key, chances, where, turns, clients, cohort)
                )
            return int(found[here][place])

        return replies

    return of_seed


@partial(jax.jit, static_argnums=(4, 5))
def _replies_of_turns(
    key: Key,
    chances: Float[Array, " clients"],
    where: tuple[Int[Array, ""], Int[Array, ""]],
    turns: Int[Array, " turns"],
    clients: int,
    cohort: int,
) -> Int[Array, " turns"]:
    """Return how many reply in each turn: one program for all phases and seeds."""

    def of_turn(turn: Int[Array, ""]) -> Array:
        asked = jnp.arange(clients, dtype=jnp.int32)
        if cohort < clients:
            asked = keys.draw_cohort(key, *where, turn, clients, cohort)
        drawn = keys.draw_replies(key, *where, turn, chances, asked)
        return jnp.sum(drawn.astype(jnp.int32))

    return jax.lax.map(of_turn, turns)
