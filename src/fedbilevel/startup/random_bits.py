"""JAX's random bits, number for number, written for programs on the CPU.

JAX compiles a hash (Threefry 2x32) into a loop there, of five turns with sixteen small
kernels each: almost 20 us, however few the bits, four times in a step that draws two
batches. Written out it is one kernel. Keys of this kind stand for the same numbers
as those they were made of.

A single draw is a function of its own in the program, since XLA fuses what it inlines:
into a gather of 32 rows of 65 numbers it put all of a hash, and LLVM took a fifth of
its time for that kernel among 240.

It gains 18 % of a client step in the smallest case of `benchmarks/speed.py`, 322 us
instead of 392, and 8 % of its start. 200 rounds of `local-bsgvrm` on `quadratic` take
2.16 processor seconds instead of 3.57.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as extension
from jaxtyping import Array, UInt32

from fedbilevel import _evaluation
from fedbilevel._evaluation import apart
from fedbilevel._types import Key, Keys

Words = UInt32[Array, "..."]

_USUAL = extension.threefry_prng_impl
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def written_out(key: Key | Keys) -> Key | Keys:
    """Return a key for the same numbers, drawn without a loop where that is faster."""
    # Other kinds of keys, and the older numbering of bits, are left to JAX.
    usual = str(jax.random.key_impl(key)) == "threefry2x32"
    usual &= jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if not (usual and _evaluation.current().writes_out_hashes):
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_WRITTEN_OUT)


def _word(value: int) -> Words:
    return jnp.asarray(value, jnp.uint32)


def _rotated(word: Words, by: int) -> Words:
    left = lax.shift_left(word, lax.full_like(word, by))
    return left | lax.shift_right_logical(word, lax.full_like(word, 32 - by))


def _hash(key: Words, high: Words, low: Words) -> tuple[Words, Words]:
    """Return Threefry 2x32 of two counters, in 20 rounds."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _word(_PARITY))
    a, b = high + schedule[0], low + schedule[1]
    for block in range(5):
        for by in _ROTATIONS[block % 2]:
            a = a + b
            b = a ^ _rotated(b, by)
        a = a + schedule[(block + 1) % 3]
        b = b + schedule[(block + 2) % 3] + _word(block + 1)
    return a, b


def _hashed(key: Words, shape: tuple[int, ...]) -> tuple[Words, Words]:
    low = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _hash(key, jnp.zeros_like(low), low)


@partial(jax.jit, static_argnames="shape")
def _pairs(key: Words, shape: tuple[int, ...]) -> Words:
    return jnp.stack(_hashed(key, shape), axis=-1)


@jax.jit
def _folded(key: Words, data: Words) -> Words:
    return jnp.stack(_hash(key, jnp.zeros_like(data), data), axis=-1)


@partial(jax.jit, static_argnames="shape")
def _mixed(key: Words, shape: tuple[int, ...]) -> Words:
    a, b = _hashed(key, shape)
    return a ^ b


def _is_countable(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) < 2**32


def _split(key: Words, shape: tuple[int, ...]) -> Words:
    if not _is_countable(shape):
        return _USUAL.split(key, shape)
    with apart():
        return _pairs(key, shape)


def _random_bits(key: Words, bit_width: int, shape: tuple[int, ...]) -> Array:
    # Twice as many bits need more care, and are drawn where doubles are: in tests.
    if bit_width == 64 or not _is_countable(shape):
        return _USUAL.random_bits(key, bit_width, shape)
    with apart():
        words = _mixed(key, shape)
    return words.astype(jnp.dtype(f"uint{bit_width}"))


def _fold_in(key: Words, data: Any) -> Words:
    with apart():
        return _folded(key, data)


_WRITTEN_OUT = extension.define_prng_impl(
    key_shape=(2,),
    seed=_USUAL.seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32_written_out",
    tag="two",
)
