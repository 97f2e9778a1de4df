"""Random bits written out for the CPU are JAX's own, number for number."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import _evaluation
from fedbilevel.runtime.random_bits import folds_written_out, written_out

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
    folds_too = folds_written_out(other)
    assert jr.key_impl(folds_too) != jr.key_impl(other)
    np.testing.assert_array_equal(draw(folds_too), draw(key))


def test_folds_of_many_names_have_no_loop():
    folds = jax.vmap(jr.fold_in, (None, 0))
    key, names = written_out(jr.key(1)), jnp.arange(12)
    loops = [
        jax.jit(folds).lower(one, names).as_text().count("stablehlo.while")
        for one in (key, folds_written_out(key))
    ]
    assert loops == [1, 0]


def test_other_keys_and_other_devices_are_left_alone():
    unsafe = jr.key(0, impl="rbg")
    assert written_out(unsafe) is unsafe and folds_written_out(unsafe) is unsafe
    key = jr.key(0)
    with _evaluation.using(_evaluation.ACCELERATOR):
        assert written_out(key) is key and folds_written_out(key) is key
