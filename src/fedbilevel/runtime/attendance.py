"""Replies of an exchange, where not all clients that are asked give one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

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


def counted_replies(job: Job, stage: int, key: Key) -> Replies:
    """Return what says how many reply; absent clients receive and compute nothing."""
    chances, found = job.chances, {}
    if chances is None:
        return lambda number, turn, cohort: cohort

    def of_turn(turn: Int[Array, ""], number: int, cohort: int) -> Array:
        asked = jnp.arange(job.clients, dtype=jnp.int32)
        if cohort < job.clients:
            asked = keys.draw_cohort(key, stage, number, turn, job.clients, cohort)
        drawn = keys.draw_replies(key, stage, number, turn, chances, asked)
        return jnp.sum(drawn.astype(jnp.int32))

    def replies(number: int, turn: int, cohort: int) -> int:
        block, place = divmod(turn, _BLOCK)
        if (number, block) not in found:
            turns = jnp.arange(_BLOCK, dtype=jnp.int32) + block * _BLOCK
            every = jax.lax.map(lambda one: of_turn(one, number, cohort), turns)
            found[number, block] = np.asarray(every)
        return int(found[number, block][place])

    return replies
