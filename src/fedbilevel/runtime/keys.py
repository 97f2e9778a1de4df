"""Where randomness comes from. Keys are folded from names, never split in sequence.

    root -> stage (rounds, setup) -> phase -> client -> t      samples of a client
    root -> stage -> phase -> client -> 2^32 - 2 -> turn       noise on its reply
    root -> stage -> phase -> turn                             cohort of an exchange
    root -> stage -> phase -> turn                             which of it reply
    root -> stage -> phase -> turn                             what all have in common
    root -> stage -> first phase -> turn                       length of a repeat

A turn counts how often a phase ran before. So a trajectory depends on neither the
runtime nor the order of clients, and a client's samples at local iteration t do not
depend on how often it communicates.

The root is known to everybody. A site with masks or noise draws its rows by a secret of
its own instead, from another key for every question that it is asked.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from fedbilevel._types import Key
from fedbilevel.algorithms import Turn

ROUNDS, SETUP = 0, 1
_COHORTS, _LENGTHS, _SHARED = 16, 32, 48  # apart from all stages
_REPLIES = 64


# Returns the values of a function at each of some keys.
AtKeys = Callable[[Callable[[Key], Array], Sequence[Key]], Iterable[Array]]


def one_by_one(
    function: Callable[[Key], Array], some: Sequence[Key]
) -> Iterable[Array]:
    """Return the values of a function at some keys."""
    return [function(key) for key in some]


def client_key(root: Key, stage: int, phase: int, client: Array | int) -> Key:
    """Return the key of one client in one phase, the same in every round."""
    return _folded(root, stage, phase, client)


def shared_key(root: Key, stage: int, phase: int, turn: Array | int) -> Key:
    """Return the key that server and clients have in common in one exchange."""
    return _folded(root, _SHARED + stage, phase, turn)


def client_turn(
    root: Key, where: tuple[int, int], client: Array | int, index: Array | int
) -> Turn:
    """Return the turn of one client in one exchange."""
    own, shared = client_key(root, *where, client), shared_key(root, *where, index)
    return Turn(own, index, shared)


def by_secret(turn: Turn, drawn: bytes) -> Turn:
    """Return a turn with another key, made of bits that are secret."""
    like = jr.key_data(turn.key)
    bits = np.frombuffer(drawn, like.dtype, like.size).reshape(like.shape)
    key = jr.wrap_key_data(jnp.asarray(bits), impl=jr.key_impl(turn.key))
    return replace(turn, key=key, lasting=turn.key)


def draw_cohort(
    root: Key,
    stage: Array | int,
    phase: Array | int,
    turn: Array | int,
    clients: int,
    participants: int,
    at_keys: AtKeys = one_by_one,
) -> Int[Array, " participants"]:
    """Draw the participants of one exchange, uniformly without replacement.

    `at_keys` may let several devices share the work.
    """
    key = _folded(root, _COHORTS + stage, phase, turn)
    return _shuffled(key, clients, at_keys)[:participants]


def draw_replies(
    root: Key,
    stage: Array | int,
    phase: Array | int,
    turn: Array | int,
    chances: Float[Array, " clients"],
    asked: Int[Array, " participants"],
) -> Bool[Array, " participants"]:
    """Draw which of those that are asked reply, each by a chance of its own.

    Where none would, the one that came nearest does.
    """
    key = _folded(root, _REPLIES + stage, phase, turn)
    # Drawn for all: whether a client replies does not depend on the others asked.
    drawn = jr.uniform(key, chances.shape, jnp.float32)
    drawn = (drawn / chances.astype(jnp.float32))[asked]
    return (drawn < 1) | (drawn == jnp.min(drawn))


def _shuffled(key: Key, count: int, at_keys: AtKeys) -> Int[Array, " count"]:
    """Return what `jr.permutation(key, count)` does, in a third of the time.

    That sorts numbers by random bits, twice where they are many, and XLA is slow at
    sorting pairs on a CPU. Here a pair is one number of 64 bits.
    """
    drawn = []
    # As many sorts as JAX thinks enough against equal bits.
    for _ in range(math.ceil(3 * math.log(count) / math.log(2**32 - 1))):
        key, mine = jr.split(key)
        drawn.append(mine)
    order = jnp.arange(count, dtype=jnp.int32)
    for rank in at_keys(
        lambda mine: _ranked(jr.bits(mine, (count,), jnp.uint32)), drawn
    ):
        order = order[rank]
    return order


def _ranked(bits: UInt32[Array, " count"]) -> Int[Array, " count"]:
    """Return the places of numbers in their order, of equal ones the first first."""
    with jax.enable_x64(True):
        places = jnp.arange(bits.shape[0], dtype=jnp.uint64)
        pairs = (bits.astype(jnp.uint64) << jnp.uint64(32)) | places
        return jax.lax.sort(pairs).astype(jnp.int32)


def draw_length(
    root: Key, stage: int, phase: int, turn: Array | int, most: int
) -> Int[Array, ""]:
    """Draw how often phases are repeated, uniformly on {0..most}."""
    key = _folded(root, _LENGTHS + stage, phase, turn)
    return jr.randint(key, (), 0, most + 1, jnp.int32)


def draw_streak(
    root: Key, stage: int, phase: int, turn: Array | int, most: int, chance: Any
) -> Int[Array, ""]:
    """Draw how many coins show tails before the first heads, at most `most`.

    A coin shows heads with this chance, so that a chance of 1 is a streak of 0.
    """
    key = _folded(root, _LENGTHS + stage, phase, turn)
    tails = jr.uniform(key, (most,)) >= jnp.asarray(chance)
    return jnp.sum(jnp.cumprod(tails.astype(jnp.int32)), dtype=jnp.int32)


def _folded(key: Key, *numbers: Array | int) -> Key:
    return functools.reduce(jr.fold_in, numbers, key)
