"""The frozen transformer of a task: a checkpoint, or a small one trained in seconds."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from fedbilevel.datasets.tokens import Bytes, Subwords, Tokenizer, token_rows
from fedbilevel.errors import InvalidInputError
from fedbilevel.models.checkpoints import read_checkpoint
from fedbilevel.models.transformer import (
    Architecture,
    Transformer,
    initialize,
    token_losses,
)
from fedbilevel.tasks._texts import pretraining

_BUILT_IN, _TOKENIZER = "built-in", "tokenizer.json"
_LONGEST = 256  # rows of the built-in transformer, or what is asked for
# How it is trained, by Adam.
_ROWS, _BATCH, _STEPS, _STEP = 512, 32, 300, 0.01
_LENGTH = 14  # of the longest text: its row has no padding
_FIRST, _SECOND, _TINY = 0.9, 0.99, 1e-8  # Adam's


class Base(NamedTuple):
    """A transformer, how texts become its tokens, its family, and its folder."""

    transformer: Transformer
    tokenizer: Tokenizer
    family: str
    folder: str


def base_of(
    model: str, tokenizer: str, length: int, sizes: tuple[int, int], kind: Any
) -> Base:
    """Return the transformer of a name or a folder, for rows of a length.

    `sizes` are the width and the blocks of the built-in one, `kind` the type of the
    numbers of a folder, or None for the usual one.
    """
    if length < 2:
        raise InvalidInputError(f"length={length}: a row has 2 tokens or more.")
    if model == _BUILT_IN:
        width, blocks = sizes
        if width < 8 or width % 8 or blocks < 1:
            raise InvalidInputError(
                f"width={width}, blocks={blocks}: give a multiple of 8, and at least "
                "one."
            )
        known = Subwords(Path(tokenizer)) if tokenizer else Bytes()
        base = Base(pretrained(*sizes, max(length, _LONGEST)), known, "llama", "")
    else:
        found, path = read_checkpoint(model, kind), tokenizer or f"{model}/{_TOKENIZER}"
        known = Subwords(Path(path), found.end)
        base = Base(found.transformer, known, found.family, str(Path(model)))
    made = base.transformer.architecture
    if base.tokenizer.vocabulary > made.vocabulary:
        raise InvalidInputError(
            f"{tokenizer or Path(model) / _TOKENIZER} has {base.tokenizer.vocabulary} "
            f"tokens, but the vocabulary of model={model} has {made.vocabulary}: it is "
            "the tokenizer of another model."
        )
    if length > made.longest:
        raise InvalidInputError(
            f"length={length}: rows of model={model} have {made.longest} tokens at "
            "most."
        )
    return base


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
