r"""A decoder-only transformer that is read, not trained: logits of the next token.

A block adds to the states h of a sequence, N being a norm over their last axis,

    h <- h + output(attention(query(N h), key(N h), value(N h)))
    h <- h + down(silu(gate(N h)) * up(N h))          swiglu, as Llama and Qwen have it
    h <- h + down(gelu(up(N h)))                      gelu, as GPT-2 has it

where position t sees positions up to t, so that padding after the end of a row changes
nothing before it. Several query heads may share a head of keys and values. Positions
are rotations of queries and keys, or vectors that are added to the embeddings.

The arrays of all blocks are stacked, one array for each projection, and a scan goes
through them: the compiled program does not grow with the depth. Arrays may be bfloat16;
norms, attention weights and logits are float32 at least, and what flows back through a
product has the type of its factors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from fedbilevel._types import Key
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.models.adapters import Adapter, Adapters

_SPREAD = 0.02  # of random weights
_FEW = 2  # blocks
# Parts of a block that are kept, if not all: products with weights, which have no batch
# axes.
RECOMPUTED = {
    "nothing": None,
    "cheap": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "blocks": jax.checkpoint_policies.nothing_saveable,
}


@dataclass(frozen=True)
class RotaryScaling:
    """How Llama 3 slows down rotations that a longer context would not have seen."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Architecture:
    """The architecture of a transformer, without its numbers.

    `heads` are those of queries, `groups` those of keys and values, each with
    `head_width` entries. `positions` are rotary or learned, up to `longest`; `norm` is
    rms or layer (with a bias); `feed_forward` swiglu, gelu, or gelu-tanh, whose gelu is
    approximated as in GPT-2. `biased` names the projections with a bias. With
    `head_norm` every head of queries and keys is normalized (Qwen 3). With `tied` the
    embeddings are the output head, too.
    """

    vocabulary: int
    width: int
    blocks: int
    heads: int
    groups: int
    head_width: int
    hidden: int
    longest: int
    positions: str = "rotary"
    norm: str = "rms"
    feed_forward: str = "swiglu"
    biased: tuple[str, ...] = ()
    head_norm: bool = False
    tied: bool = True
    epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None


@dataclass(frozen=True)
class Passes:
    """How a transformer is evaluated, which changes its cost and not its numbers.

    `recomputed` says what the backward pass evaluates again in place of keeping it:
    `nothing`; what is `cheap`, all but the products with weights; or whole `blocks`, of
    which the states between them are kept: the least memory for a third more time.
    `fused` attention never holds the weights of all pairs of positions: on a GPU it is
    one kernel for half precision, which has first derivatives alone. Blocks that are
    `unrolled` are compiled one by one and not as a loop: that takes several times as
    long, and spares the copies that a loop makes of a block's weights and of what it
    keeps for the backward pass.
    """

    recomputed: str = "nothing"
    fused: bool = False
    unrolled: bool = False

    def __post_init__(self) -> None:
        if self.recomputed not in RECOMPUTED:
            raise unknown_name("value of recomputed", self.recomputed, RECOMPUTED)


def projection_shapes(made: Architecture) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every projection of a block, by its name."""
    of_heads, of_groups = (n * made.head_width for n in (made.heads, made.groups))
    shapes = {
        "query": (of_heads, made.width),
        "key": (of_groups, made.width),
        "value": (of_groups, made.width),
        "output": (made.width, of_heads),
        "up": (made.hidden, made.width),
        "down": (made.width, made.hidden),
    }
    if made.feed_forward == "swiglu":
        shapes["gate"] = (made.hidden, made.width)
    return shapes


def norm_widths(made: Architecture) -> dict[str, int]:
    """Return how wide the norms of a block are, by their names."""
    widths: dict[str, int] = dict.fromkeys(("attention", "feed_forward"), made.width)
    of_heads = dict.fromkeys(("query", "key"), made.head_width)
    return {**widths, **of_heads} if made.head_norm else widths


class Norm(eqx.Module):
    """Scales vectors to length about 1 for each entry; with a bias, centers them."""

    weight: Array
    bias: Array | None = None

    def __call__(self, states: Array, epsilon: float) -> Array:
        """Return the states, normalized over the last axis, in their own type."""
        wide = _widened(states)
        if self.bias is not None:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        square = jnp.mean(wide**2, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(square + epsilon) * self.weight.astype(wide.dtype)
        if self.bias is not None:
            wide = wide + self.bias.astype(wide.dtype)
        return wide.astype(states.dtype)


class Transformer(eqx.Module):
    """The numbers of a transformer; those of all blocks are stacked.

    `weights` and `biases` are by the names of projections, (blocks, outputs, inputs)
    and (blocks, outputs); `norms` are `attention` and `feed_forward`, and with
    `head_norm` those of `query` and `key`. `passes` say how it is evaluated.
    """

    embeddings: Float[Array, "vocabulary width"]
    positions: Float[Array, "longest width"] | None
    weights: Mapping[str, Array]
    biases: Mapping[str, Array]
    norms: Mapping[str, Norm]
    last_norm: Norm
    head: Float[Array, "vocabulary width"] | None
    architecture: Architecture = eqx.field(static=True)
    passes: Passes = eqx.field(static=True, default=Passes())


@partial(jax.jit, static_argnums=0)
def initialize(made: Architecture, key: Key) -> Transformer:
    """Return a transformer of small random weights."""
    shapes = projection_shapes(made)
    keys = iter(jr.split(key, len(shapes) + 3))
    kind = jnp.zeros((), float).dtype

    def drawn(*shape: int) -> Array:
        return _SPREAD * jr.normal(next(keys), shape, kind)

    def norm(*shape: int) -> Norm:
        bias = jnp.zeros(shape, kind) if made.norm == "layer" else None
        return Norm(jnp.ones(shape, kind), bias)

    learned = made.positions == "learned"
    return Transformer(
        drawn(made.vocabulary, made.width),
        drawn(made.longest, made.width) if learned else None,
        {name: drawn(made.blocks, *shape) for name, shape in shapes.items()},
        {name: jnp.zeros((made.blocks, shapes[name][0]), kind) for name in made.biased},
        {name: norm(made.blocks, width) for name, width in norm_widths(made).items()},
        norm(made.width),
        None if made.tied else drawn(made.vocabulary, made.width),
        made,
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def draw_adapters(
    made: Architecture, chosen: tuple[str, ...], rank: int, scale: float, key: Key
) -> dict[str, Adapter]:
    """Return adapters of chosen projections, with a random A and B = 0."""
    shapes, kind = projection_shapes(made), jnp.zeros((), float).dtype
    found = {}
    for name, own in zip(chosen, jr.split(key, len(chosen)), strict=True):
        outputs, inputs = shapes[name]
        a = jr.normal(own, (made.blocks, rank, inputs), kind) / inputs**0.5
        found[name] = Adapter(a, jnp.zeros((made.blocks, outputs, rank), kind), scale)
    return found


def logits(
    base: Transformer, adapters: Adapters, tokens: Int[Array, "rows length"]
) -> Float[Array, "rows length vocabulary"]:
    """Return the logits of the token after every one, with adapters on projections."""
    made = base.architecture
    length = tokens.shape[-1]
    if length > made.longest:
        raise InvalidInputError(
            f"rows of {length} tokens: the transformer takes {made.longest} at most."
        )
    states = base.embeddings[tokens]
    if base.positions is not None:
        states = states + base.positions[:length]
    turns = _rotations(made, length) if made.positions == "rotary" else None

    def through(states: Array, block: Any) -> tuple[Array, None]:
        own = _Block(*block, fused=base.passes.fused)
        normal = own.norms["attention"](states, made.epsilon)
        states = states + _attention(made, own, turns, normal)
        normal = own.norms["feed_forward"](states, made.epsilon)
        return states + _feed_forward(made, own, normal), None

    # To compile a loop takes longer than to compile a few blocks.
    unrolled = base.passes.unrolled or made.blocks <= _FEW
    if base.passes.recomputed != "nothing":
        # A loop keeps what is evaluated twice apart, as a barrier otherwise must.
        through = jax.checkpoint(
            through, prevent_cse=unrolled, policy=RECOMPUTED[base.passes.recomputed]
        )
    stacked = (base.weights, base.biases, base.norms, dict(adapters))
    states, _ = jax.lax.scan(through, states, stacked, unroll=unrolled)
    states = base.last_norm(states, made.epsilon)
    head = base.embeddings if base.head is None else base.head
    return _wide_product("btw,vw->btv", states, head)


def token_losses(
    base: Transformer, adapters: Adapters, tokens: Int[Array, "rows length"]
) -> Float[Array, "rows length-1"]:
    """Return the cross entropy of every token but the first, given those before it."""
    scores = logits(base, adapters, tokens[:, :-1])
    found = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - found


class _Block(NamedTuple):
    """One block's part of everything that is stacked."""

    weights: Mapping[str, Array]
    biases: Mapping[str, Array]
    norms: Mapping[str, Norm]
    adapters: Mapping[str, Adapter]
    fused: bool

    def project(self, name: str, states: Array) -> Array:
        """Return W h + b, and what an adapter adds."""
        made = jnp.einsum("btw,ow->bto", states, self.weights[name])
        if name in self.biases:
            made = made + self.biases[name]
        if name in self.adapters:
            made = made + self.adapters[name](states)
        return made


def _attention(
    made: Architecture, block: _Block, turns: Array | None, states: Array
) -> Array:
    def heads(name: str) -> Array:
        split = block.project(name, states)
        split = split.reshape(*split.shape[:2], -1, made.head_width)
        if name in block.norms:
            split = block.norms[name](split, made.epsilon)
        return split if turns is None or name == "value" else _turned(split, turns)

    query, key, value = map(heads, ("query", "key", "value"))
    seen = (_fused if block.fused else _seen)(query, key, value)
    return block.project("output", seen.reshape(*seen.shape[:2], -1))


def _seen(query: Array, key: Array, value: Array) -> Array:
    """Return the values of all earlier positions by their weights, for each head."""
    groups, width = key.shape[2:]
    # All heads of a group of queries share a head of keys and values.
    query = query.reshape(*query.shape[:2], groups, -1, width)
    scores = _wide_product("btghw,bsgw->bghts", query, key)
    before = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(before, scores * width**-0.5, -jnp.inf)
    share = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bghts,bsgw->btghw", share, value)


def _fused(query: Array, key: Array, value: Array) -> Array:
    """Return the same, by one kernel where there is one."""
    one_kernel = jax.default_backend() == "gpu" and query.dtype.itemsize == 2
    kernel = "cudnn" if one_kernel else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=kernel
    )


def _feed_forward(made: Architecture, block: _Block, states: Array) -> Array:
    up = block.project("up", states)
    if made.feed_forward == "swiglu":
        inner = jax.nn.silu(block.project("gate", states)) * up
    else:
        inner = jax.nn.gelu(up, approximate=made.feed_forward == "gelu-tanh")
    return block.project("down", inner)


def _rotations(made: Architecture, length: int) -> Array:
    """Return the angles of all positions, (length, half of a head)."""
    # By NumPy in double precision: they are constants, and large positions need it.
    even = np.arange(0, made.head_width, 2) / made.head_width
    speed = made.rotary_base**-even
    scaling = made.rotary_scaling
    if scaling is not None:
        turns = scaling.original * speed / (2 * np.pi)  # in the context it was made for
        share = (turns - scaling.low) / (scaling.high - scaling.low)
        kept = np.clip(share, 0, 1)
        speed = kept * speed + (1 - kept) * speed / scaling.factor
    angles = np.arange(length)[:, None] * speed
    return jnp.asarray(angles, float)


def _turned(heads: Array, angles: Array) -> Array:
    """Rotate every pair of entries, one of the first and one of the second half."""
    wide = _widened(heads)
    first, second = jnp.split(wide, 2, axis=-1)
    angles = angles.astype(wide.dtype)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _wide_product(summed: str, left: Array, right: Array) -> Array:
    """Return an einsum of which the sums are kept as wide as they are taken."""
    kind = _wide(left.dtype)
    return jnp.einsum(summed, left, right, preferred_element_type=kind)


@partial(_wide_product.defjvp, symbolic_zeros=True)
def _narrow_tangents(summed: str, factors: Any, tangents: Any) -> tuple[Array, Array]:
    # Transposed, these products take what flows back in the type of the factors: one
    # factor of float32 would make a float32 product, several times slower, of them.
    (left, right), (of_left, of_right) = factors, tangents
    made = _wide_product(summed, left, right)
    parts = [
        jnp.einsum(summed, *pair).astype(made.dtype)
        for pair in ((of_left, right), (left, of_right))
        if not any(isinstance(one, SymbolicZero) for one in pair)
    ]
    return made, sum(parts[1:], start=parts[0])


def _wide(kind: Any) -> Any:
    """Return the type in which sums are taken: float32 in place of a half one."""
    return jnp.dtype(jnp.float32) if kind.itemsize < 4 else kind


def _widened(values: Array) -> Array:
    return values.astype(_wide(values.dtype))
