"""A small transformer of our own, trained in seconds on rows of tokens by Adam."""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from fedbilevel.datasets.tokens import Bytes, token_rows
from fedbilevel.models.transformer import (
    Architecture,
    Transformer,
    initialize,
    token_losses,
)
from fedbilevel.tasks._generated_text import pretraining

__all__ = ["pretrained"]

_ROWS, _BATCH, _STEPS, _STEP = 512, 32, 300, 0.01
_LENGTH = 14  # of the longest text: its row has no padding
_FIRST, _SECOND, _TINY = 0.9, 0.99, 1e-8  # Adam's


@cache
def pretrained(width: int, blocks: int, longest: int) -> Transformer:
    """Return a transformer that knows the form of generated texts, but no answer."""
    made = Architecture(
        Bytes().vocabulary,
        width,
        blocks,
        heads=4,
        groups=2,
        head_width=width // 4,
        hidden=2 * width,
        longest=longest,
    )
    rows = token_rows(pretraining(_ROWS, 0), Bytes(), _LENGTH)
    return _trained(made, *map(jnp.asarray, (rows.tokens, rows.counted)))


@eqx.filter_jit
def _trained(made: Architecture, tokens: Array, counted: Array) -> Transformer:
    def loss(model: Transformer, chosen: Array) -> Array:
        losses = token_losses(model, {}, tokens[chosen])
        marks = counted[chosen, 1:].astype(losses.dtype)
        return jnp.sum(marks * losses) / jnp.sum(marks)

    def step(carry: tuple[Any, Any, Any], time: tuple[Array, Array]):
        model, first, second = carry
        number, chosen = time
        slope = jax.grad(loss)(model, chosen)
        first = jax.tree.map(lambda m, d: _FIRST * m + (1 - _FIRST) * d, first, slope)
        second = jax.tree.map(
            lambda v, d: _SECOND * v + (1 - _SECOND) * d**2, second, slope
        )
        shrink = _STEP * (1 - number / _STEPS)

        def moved(leaf: Array, m: Array, v: Array) -> Array:
            m = m / (1 - _FIRST ** (number + 1))
            v = v / (1 - _SECOND ** (number + 1))
            return leaf - shrink * m / (jnp.sqrt(v) + _TINY)

        return (jax.tree.map(moved, model, first, second), first, second), None

    model = initialize(made, jr.key(0))
    draw = np.random.default_rng(0)
    batches = jnp.asarray(draw.integers(0, len(tokens), (_STEPS, _BATCH)), jnp.int32)
    zeros = jax.tree.map(jnp.zeros_like, model)
    times = (jnp.arange(_STEPS, dtype=model.embeddings.dtype), batches)
    (model, _, _), _ = jax.lax.scan(step, (model, zeros, zeros), times)
    return model
