"""Replies of an exchange, where not all clients that are asked give one."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedbilevel._types import Key
from fedbilevel.runtime import keys
from fedbilevel.runtime.job import Job, State

Replies = Callable[[int, int, int], int]  # of a phase's number, a turn and its cohort
_BLOCK = 1024  # turns whose replies are counted together


def attendance(
    job: Job, state: State, where: tuple[int, int], index: Array | int, asked: Array
) -> Array | None:
    """Return how those that are asked attend: as recorded, or drawn; None for all."""
    if job.attendance is not None:
        return job.attendance[state.exchanges, asked]
    if job.chances is None:
        return None
    drawn = keys.draw_replies(job.key, *where, index, job.chances, asked)
    return drawn.astype(jnp.uint8)


def counted_replies(job: Job, stage: int) -> Callable[[Key], Replies]:
    """Return what says how many reply in a stage, by seed; each is drawn once.

    Absent clients receive and compute nothing.
    """
    chances, found = job.chances, {}

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
                    _replies_of_turns(key, chances, where, turns, job.clients, cohort)
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
