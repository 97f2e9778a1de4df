"""Random bits written out for the CPU are JAX's own, number for number."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import _evaluation
from fedbilevel.startup.random_bits import written_out

DRAWS = {
    "split": lambda key: jr.key_data(jr.split(key, (3, 2))),
    "fold_in": lambda key: jr.key_data(jr.fold_in(key, 7)),
    "bytes": lambda key: jr.bits(key, (3, 5), jnp.uint8),
    "shorts": lambda key: jr.bits(key, (7,), jnp.uint16),
    "words": lambda key: jr.bits(key, (3, 5), jnp.uint32),
    "long words": lambda key: jr.bits(key, (5,), jnp.uint64),
    "normal": lambda key: jr.normal(key, (2, 3), jnp.float32),
    "of many keys": lambda key: jax.vmap(jr.bits)(jr.split(key, 4)),
    "a permutation": lambda key: jr.permutation(jr.fold_in(key, 2**32 - 1), 9),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_jax(name):
    draw = jax.jit(DRAWS[name])
    key = jr.key(2**40 + 5)
    other = written_out(key)
    assert jr.key_impl(other) != jr.key_impl(key)
    np.testing.assert_array_equal(draw(other), draw(key))


def test_other_keys_and_other_devices_are_left_alone():
    unsafe = jr.key(0, impl="rbg")
    assert written_out(unsafe) is unsafe
    key = jr.key(0)
    with _evaluation.using(_evaluation.ACCELERATOR):
        assert written_out(key) is key


def test_a_hash_is_not_computed_in_every_kernel_that_reads_its_numbers():
    def rows_of(key, rows, client):
        drawn = jr.bits(jr.split(written_out(key))[0], (32,), jnp.uint32)
        return rows[client, drawn % jnp.uint32(48)]

    rows = jnp.zeros((4, 48, 65), jnp.float32)
    lowered = jax.jit(rows_of).lower(jr.key(0), rows, jnp.asarray(1))
    kernels = str(lowered.compile().as_text()).split("\n\n")
    assert any("gather(" in one for one in kernels)
    assert not any("gather(" in one and "xor(" in one for one in kernels)
    hashes = [one for one in kernels if one.count("xor(") > 20]
    assert len(hashes) == 2  # one of the split, one of the bits
