"""The transformer against a second program of it, position by position, in NumPy."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from fedbilevel.errors import InvalidInputError
from fedbilevel.models.adapters import Adapter, joined, parted
from fedbilevel.models.transformer import (
    Architecture,
    Passes,
    RotaryScaling,
    draw_adapters,
    initialize,
    logits,
    token_losses,
)

LLAMA = Architecture(
    vocabulary=19,
    width=12,
    blocks=3,
    heads=4,
    groups=2,
    head_width=6,
    hidden=10,
    longest=16,
    biased=("query", "key", "value"),
    head_norm=True,
    tied=False,
    rotary_base=50.0,
    rotary_scaling=RotaryScaling(factor=4.0, low=1.0, high=2.0, original=20),
)
GPT2 = Architecture(
    vocabulary=19,
    width=12,
    blocks=2,
    heads=3,
    groups=3,
    head_width=4,
    hidden=10,
    longest=8,
    positions="learned",
    norm="layer",
    feed_forward="gelu-tanh",
    biased=("query", "key", "value", "output", "up", "down"),
)
TOKENS: Any = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]], np.int32)


def drawn(made, kind=jnp.float64):
    """Return a transformer and adapters in which no number is 0 or 1."""
    base = initialize(made, jr.key(0))
    chosen = ("query", "value", "down")
    adapters = draw_adapters(made, chosen, 2, 0.7, jr.key(1))
    leaves, structure = jax.tree.flatten((base, adapters))
    keys = jr.split(jr.key(2), len(leaves))
    moved = [
        (leaf + 0.3 * jr.normal(key, leaf.shape, leaf.dtype)).astype(kind)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def normal(norm, block, h, epsilon):
    def part(a):
        return np.asarray(a if block is None else a[block])

    if norm.bias is None:
        return h / math.sqrt(np.mean(h * h) + epsilon) * part(norm.weight)
    return (h - h.mean()) / math.sqrt(h.var() + epsilon) * part(norm.weight) + part(
        norm.bias
    )


def turned(made, head, position):
    """Rotate entry i with entry i + half by position times the speed of the pair."""
    half, made_for = made.head_width // 2, made.rotary_scaling
    out = np.empty_like(head)
    for i in range(half):
        speed = made.rotary_base ** (-2 * i / made.head_width)
        if made_for is not None:
            length = 2 * math.pi / speed
            if length > made_for.original / made_for.low:
                speed /= made_for.factor
            elif length >= made_for.original / made_for.high:
                smooth = (made_for.original / length - made_for.low) / (
                    made_for.high - made_for.low
                )
                speed = (1 - smooth) * speed / made_for.factor + smooth * speed
        turn = complex(head[i], head[i + half]) * np.exp(1j * position * speed)
        out[i], out[i + half] = turn.real, turn.imag
    return out


def own_logits(base, adapters, row):
    """Return the logits of one row, one position after the other."""
    made, length = base.architecture, len(row)
    states = [np.asarray(base.embeddings[token], float) for token in row]
    if base.positions is not None:
        states = [h + np.asarray(base.positions[t]) for t, h in enumerate(states)]
    for n in range(made.blocks):

        def project(name, h, n=n):
            out = np.asarray(base.weights[name][n]) @ h
            if name in base.biases:
                out = out + np.asarray(base.biases[name][n])
            if name in adapters:
                one = adapters[name]
                out = out + one.scale * (np.asarray(one.b[n]) @ (one.a[n] @ h))
            return out

        def heads(name, h, t, n=n):
            found = list(project(name, h).reshape(-1, made.head_width))
            if name in base.norms:
                norm = base.norms[name]
                found = [normal(norm, n, one, made.epsilon) for one in found]
            if made.positions == "rotary" and name != "value":
                found = [turned(made, one, t) for one in found]
            return found

        inner = [normal(base.norms["attention"], n, h, made.epsilon) for h in states]
        q, k, v = (
            [heads(name, h, t) for t, h in enumerate(inner)]
            for name in ("query", "key", "value")
        )
        for t in range(length):
            seen = []
            for head in range(made.heads):
                group = head // (made.heads // made.groups)
                scores = np.array([q[t][head] @ k[s][group] for s in range(t + 1)])
                share = np.exp(scores / math.sqrt(made.head_width))
                share /= share.sum()
                seen.append(sum(share[s] * v[s][group] for s in range(t + 1)))
            states[t] = states[t] + project("output", np.concatenate(seen))
        for t in range(length):
            h = normal(base.norms["feed_forward"], n, states[t], made.epsilon)
            up = project("up", h)
            if made.feed_forward == "swiglu":
                gate = project("gate", h)
                up = up * gate / (1 + np.exp(-gate))
            else:
                wave = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
                up = up * (1 + np.tanh(wave)) / 2
            states[t] = states[t] + project("down", up)
    head = base.embeddings if base.head is None else base.head
    return np.stack(
        [
            np.asarray(head) @ normal(base.last_norm, None, h, made.epsilon)
            for h in states
        ]
    )


@pytest.mark.parametrize("made", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_logits_are_those_of_the_second_program(made):
    base, adapters = drawn(made)
    expected = np.stack([own_logits(base, adapters, row) for row in TOKENS])
    found = jax.jit(logits)(base, adapters, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    short = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (base, adapters))
    found = jax.jit(logits)(*short, TOKENS)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base)
    found = np.asarray(logits(half, short[1], TOKENS))
    assert found.dtype == np.float32
    size = np.abs(expected).max()
    # Rounding the base alone moves a logit by 0.02 of the largest; rounded activations
    # three times as far, and the usual one by a hundredth.
    apart = np.abs(found - expected) / size
    assert 1e-5 < apart.max() < 0.1 and np.sqrt(np.mean(apart**2)) < 0.02


def test_losses_are_of_the_next_token_and_see_nothing_after_it():
    base, adapters = drawn(LLAMA)
    losses = np.asarray(token_losses(base, adapters, TOKENS))
    scores = own_logits(base, adapters, TOKENS[0])[:-1]
    share = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    expected = -np.log([share[t, token] for t, token in enumerate(TOKENS[0, 1:])])
    np.testing.assert_allclose(losses[0], expected, atol=1e-10)
    padded = TOKENS.copy()
    padded[:, 5:] = 0
    np.testing.assert_allclose(
        token_losses(base, adapters, padded)[:, :4], losses[:, :4], atol=1e-12
    )


def test_adapters_start_as_nothing_and_are_parted_and_joined():
    base, _ = drawn(GPT2)
    fresh = draw_adapters(GPT2, ("key", "up"), 3, 2.0, jr.key(0))
    plain = logits(base, {}, TOKENS)
    np.testing.assert_array_equal(logits(base, fresh, TOKENS), plain)
    trained, frozen = parted(fresh, both=False)
    assert [leaf.shape for leaf in jax.tree.leaves(trained)] == [(2, 12, 3), (2, 10, 3)]
    moved = jax.tree.map(lambda leaf: leaf + 1, trained)
    whole = joined(moved, frozen)
    assert isinstance(whole["key"], Adapter) and whole["key"].a is not None
    assert np.abs(np.asarray(logits(base, whole, TOKENS) - plain)).max() > 0.01
    assert not jax.tree.leaves(parted(fresh, both=True)[1])


def test_rows_that_are_too_long_are_refused():
    base = initialize(replace(LLAMA, longest=4), jr.key(0))
    with pytest.raises(InvalidInputError, match="7 tokens.* takes 4 at most"):
        logits(base, {}, TOKENS)


def total(adapters, base):
    return jnp.sum(token_losses(base, adapters, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "passes", [Passes("blocks"), Passes("cheap", True), Passes("blocks", unrolled=True)]
)
def test_other_passes_have_the_same_losses_and_slopes(passes):
    base, adapters = drawn(LLAMA, jnp.float32)
    slope = jax.jit(jax.value_and_grad(total))
    expected = slope(adapters, base)
    found = slope(adapters, replace(base, passes=passes))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
        found,
        expected,
    )


def test_unrolled_blocks_are_no_loop():
    base, adapters = drawn(LLAMA, jnp.float32)
    lower = jax.jit(jax.grad(total)).lower
    assert "while" in lower(adapters, base).as_text()
    unrolled = replace(base, passes=Passes(unrolled=True))
    assert "while" not in lower(adapters, unrolled).as_text()


def products_of(jaxpr):
    """Return the factors' types of every product of a program, also inside of loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield {str(factor.aval.dtype) for factor in equation.invars}
        for inner in jaxprs_in_params(equation.params):
            yield from products_of(inner)


@pytest.mark.slow
def test_no_product_of_a_half_precision_base_has_a_wide_factor():
    base, adapters = drawn(LLAMA, jnp.bfloat16)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), adapters)

    program = jax.make_jaxpr(jax.grad(total))(wide, base)
    found = list(products_of(program.jaxpr))
    assert len(found) > 20 and all(types == {"bfloat16"} for types in found)
    # The slopes are float32 again, near those of the wide base.
    slopes = jax.tree.leaves(jax.grad(total)(wide, base))
    base = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), base)
    for a, b in zip(slopes, jax.tree.leaves(jax.grad(total)(wide, base)), strict=True):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)
