"""Masks from single bits: their chances, their shapes, and what they refuse."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.errors import InvalidInputError


@pytest.mark.parametrize("keep", [0.0, 0.25, 0.5, 0.625, 1.0])
def test_a_mask_keeps_the_share_that_was_asked_for(keep):
    shape, entries = (70, 33), 16 * 70 * 33
    keys = jr.split(jr.key(3), 16)
    flags = np.asarray(jax.vmap(lambda key: fb.coin_mask(key, shape, keep))(keys))
    assert flags.shape == (16, *shape) and flags.dtype == bool
    spread = np.sqrt(entries * keep * (1 - keep))
    assert abs(flags.sum() - keep * entries) <= 4 * spread
    # Neighbors in a word, and the same places of two keys, are independent.
    for one, other in ((flags[..., 1:], flags[..., :-1]), (flags[1:], flags[:-1])):
        both = np.mean(one & other)
        assert abs(both - keep**2) <= 4 * np.sqrt(keep * (1 - keep) / one.size) + 1e-12


def test_half_of_a_mask_takes_one_bit_an_entry():
    words = jr.bits(jr.key(0), (1, 2), jnp.uint32)
    bits = [int(word) >> place & 1 for word in words[0] for place in range(32)]
    flags = fb.coin_mask(jr.key(0), (5, 8))
    assert np.array_equal(np.ravel(flags), np.asarray(bits[:40]) == 0)


@pytest.mark.parametrize(("keep", "near"), [(0.9, "0.898438"), (-0.5, "0"), (1.5, "1")])
def test_a_chance_that_bits_do_not_have_is_refused(keep, near):
    with pytest.raises(InvalidInputError, match=f"keep={keep}.*such as {near},"):
        fb.coin_mask(jr.key(0), (3,), keep)
