r"""Which texts help? Weights softmax(x) of sources, below which adapters are trained.

    g(x, y) = sum_s softmax(x)_s mean over the tokens of source s of CE(y; token)
              + penalty/2 ||y||^2
    f(y)    = mean over the trusted tokens of CE(y; token)

CE is the cross entropy of a token given those before it, by a transformer whose base
is frozen, one copy for all clients; y are the B of low-rank adapters W + scale B A, or
A and B. Only responses count, what was asked is given. A client's loss has the factor
that makes the mean over clients the sum above, however many tokens of a source it has:

    g_k = K sum over its rows of softmax(x)_s (loss of the row's tokens) / T_s

with K clients, which hold T_s tokens of source s together; f_k likewise.

Sources of `data=generated` are right answers about `colors` and `sounds`, `wrong` ones,
and random `letters`, for a transformer that was pretrained on all of them within
seconds. Texts of your own are a folder of JSON lines for each site; a real checkpoint
is a folder, too, `model=FOLDER`.

Reference: ScaleBiO, arXiv 2406.19976; the clients are ours.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Int

from fedbilevel import _tree
from fedbilevel._types import Rows, Scalar
from fedbilevel.datasets.tokens import Bytes, Subwords, Tokenizer, token_rows
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import transformer
from fedbilevel.models.adapters import Adapters, joined, parted
from fedbilevel.models.checkpoints import read_checkpoint
from fedbilevel.models.peft import packed_adapters
from fedbilevel.models.transformer import Architecture, Transformer, token_losses
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _texts
from fedbilevel.tasks._base import OWN_PLACE, Listed, Origin, Point, Task, settings
from fedbilevel.tasks._labeled import check_choice, check_not_negative, held_array
from fedbilevel.tasks._rows import SplitSeed

_RECOMMENDED = {
    **settings("rounds=60 local_steps=5 batch=16 q=10 nu=0.1 upper_step=1.0"),
    **settings("lower_step=0.1 auxiliary_step=0.05 theta=0.1"),
    **settings("upper_weight=0.1 lower_weight=0.1"),
}
_PRECISIONS = {"float32": None, "bfloat16": jnp.bfloat16}
_TRAINED = ("b", "both")
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
    rows = token_rows(_texts.pretraining(_ROWS, 0), Bytes(), _LENGTH)
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

    model = transformer.initialize(made, jr.key(0))
    draw = np.random.default_rng(0)
    batches = jnp.asarray(draw.integers(0, len(tokens), (_STEPS, _BATCH)), jnp.int32)
    zeros = jax.tree.map(jnp.zeros_like, model)
    times = (jnp.arange(_STEPS, dtype=model.embeddings.dtype), batches)
    (model, _, _), _ = jax.lax.scan(step, (model, zeros, zeros), times)
    return model


class _Frozen(eqx.Module):
    """Frozen parts: the base, and the parts of adapters that are not in y.

    `family` and `folder` say what others call its tensors, and where it is from, and
    `tokenizer` is the fingerprint of what makes tokens for it.
    """

    base: Transformer
    adapters: Adapters
    family: str = eqx.field(static=True)
    folder: str = eqx.field(static=True)
    tokenizer: str = eqx.field(static=True)


def _of_rows(y: Adapters, rows: Rows, frozen: _Frozen, kind: Any) -> Array:
    """Return for each row the sum of the losses of what it has to learn."""
    adapters = joined(y, frozen.adapters)
    losses = token_losses(frozen.base, adapters, rows["tokens"]).astype(kind)
    return jnp.sum(jnp.where(rows["counted"][:, 1:], losses, 0), axis=-1)


def _upper(x: Array, y: Adapters, rows: Rows, frozen: _Frozen) -> Scalar:
    return jnp.mean(rows["factor"] * _of_rows(y, rows, frozen, x.dtype))


@dataclass(frozen=True)
class _Lower:
    penalty: float

    def __call__(self, x: Array, y: Adapters, rows: Rows, frozen: _Frozen) -> Scalar:
        weight = jax.nn.softmax(x)[rows["source"]] * rows["factor"]
        losses = weight * _of_rows(y, rows, frozen, x.dtype)
        return jnp.mean(losses) + 0.5 * self.penalty * _tree.dot(y, y)


class _TestMetrics(eqx.Module):
    """The loss on tokens that neither train nor validate, and the weights."""

    tokens: Int[Array, "rows length"]
    counted: Bool[Array, "rows length"]
    sources: tuple[str, ...] = eqx.field(static=True)
    rows_at_once: int | None = eqx.field(static=True)

    def __call__(self, x: Array, y: Adapters, frozen: _Frozen) -> dict[str, Array]:
        rows = {"tokens": self.tokens, "counted": self.counted}

        def one(row: Rows) -> Array:
            alone = jax.tree.map(lambda leaf: leaf[None], row)
            return _of_rows(y, alone, frozen, x.dtype)[0]

        size = self.rows_at_once or len(self.tokens)
        total = jnp.sum(jax.lax.map(one, rows, batch_size=size))
        tokens = jnp.sum(self.counted[:, 1:].astype(x.dtype))
        weights = jax.nn.softmax(x)
        found = {f"weight_{name}": weights[k] for k, name in enumerate(self.sources)}
        return {"test_loss": total / tokens, **found}


def make(
    clients: int = 0,
    *,
    data: Annotated[
        str,
        "generated, or a folder with SITE/SOURCE.jsonl and SITE/trusted.jsonl, lines "
        'with "prompt" and "response", or "text"',
    ] = "generated",
    source: Annotated[
        str, "what has a weight: file (of one name, at all sites), site, or both"
    ] = "file",
    model: Annotated[
        str,
        "built-in, or the folder of a checkpoint: Llama, Qwen, SmolLM or GPT-2",
        OWN_PLACE,
    ] = "built-in",
    tokenizer: Annotated[
        str,
        "file tokenizer.json; without one bytes, or the checkpoint's own",
        OWN_PLACE,
    ] = "",
    length: Annotated[
        int, "tokens of a row; 0 is 14 for generated texts, and 256 for your own"
    ] = 0,
    rank: Annotated[int, "rank of the adapters, the width of B"] = 4,
    scale: Annotated[float, "what B A is multiplied by, alpha over the rank"] = 2.0,
    adapted: Annotated[
        str, "projections with adapters: query,key,value,output,gate,up,down"
    ] = "query,value,up,down",
    trained: Annotated[
        str,
        "b: A is frozen, so that the mean of B is the mean of B A; both: A and B, "
        "whose mean is not",
    ] = "b",
    penalty: Annotated[float, "strength that holds adapters near 0"] = 0.001,
    precision: Annotated[
        str, "numbers of the frozen base: float32 or bfloat16; y stays as it is"
    ] = "float32",
    rows_at_once: Annotated[
        int, "most rows worked on at a time; 0 is 8 for a checkpoint, else all"
    ] = 0,
    recomputed: Annotated[
        str,
        "what the backward pass evaluates again: nothing; cheap, all but products; "
        "blocks, whole ones, the least memory for a third more time",
    ] = "nothing",
    fused: Annotated[
        bool, "attention by one kernel: in bfloat16 on a GPU, for gradients alone"
    ] = False,
    unrolled: Annotated[
        bool, "blocks are compiled one by one: a long wait, then faster on a GPU"
    ] = False,
    width: Annotated[int, "width of the built-in transformer, a multiple of 8"] = 32,
    blocks: Annotated[int, "number of blocks of the built-in transformer"] = 1,
    tokens: Annotated[
        str, "tokens of all sites, where each has its own texts: notes:1200,trusted:96"
    ] = "",
    sites: Annotated[int, "of how many sites this is one; a node says it itself"] = 0,
    split: SplitSeed = 0,
) -> Task:
    """Build the task; 8 clients of generated texts, or those that a folder names."""
    check_choice("value of trained", trained, _TRAINED)
    check_choice("value of precision", precision, tuple(_PRECISIONS))
    if rank < 1:
        raise InvalidInputError(f"rank={rank}: it is at least 1.")
    check_not_negative(penalty=penalty)
    usual = 14 if data == "generated" else 256
    counts = _texts.TokenCounts(sites, _texts.read_counts(tokens) if tokens else None)
    texts = _texts.texts_of(data, clients, split, counts)  # before what takes long
    kind = _PRECISIONS[precision]
    base = base_of(model, tokenizer, length or usual, (width, blocks), kind)
    held = _texts.held_texts(texts, base.tokenizer, length or usual, source, counts)
    chosen, made = _chosen(adapted, base), base.transformer.architecture
    drawn = transformer.draw_adapters(made, chosen, rank, scale, jr.key(0))
    y, rest = parted(drawn, trained == "both")
    passes = transformer.Passes(recomputed, fused, unrolled)
    whole = replace(base.transformer, passes=passes)
    known = (base.family, base.folder, base.tokenizer.fingerprint)
    frozen = _Frozen(whole, rest, *known)
    if kind is not None:
        frozen = jax.tree.map(lambda leaf: leaf.astype(kind), frozen)
    at_once = rows_at_once or (8 if base.folder else None)
    # Rows that pad have no token that counts.
    tested = held_array(held.test.tokens, np.int32), held_array(held.test.counted, bool)
    return Task(
        Problem(_upper, _Lower(penalty), frozen=frozen, rows_at_once=at_once),
        ClientData.from_clients(held.upper, held.lower),
        _tree.filled(len(held.sources)),
        y,
        _TestMetrics(*tested, held.sources, at_once),
        headline="test_loss",
        recommended=_RECOMMENDED,
        convex=False,
        algorithm="fed-f2sa",
        names=held.names,
        origin=Origin(held.summary, by_rows=False),
        listing=_listing,
        files=_files,
        alike=_alike,
    )


def _alike(task: Task) -> dict[str, str]:
    """Return fingerprints of the frozen numbers and of the tokenizer."""
    frozen: _Frozen = task.problem.frozen
    digest = hashlib.sha256(frozen.family.encode())
    for leaf in jax.tree.leaves(frozen):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.view(np.uint8).data)
    return {"model": digest.hexdigest()[:32], "tokenizer": frozen.tokenizer}


def _chosen(adapted: str, base: Base) -> tuple[str, ...]:
    known = transformer.projection_shapes(base.transformer.architecture)
    names = tuple(name.strip() for name in adapted.split(",") if name.strip())
    for name in names:
        check_choice("projection", name, tuple(known))
    if not names or len(set(names)) != len(names):
        raise InvalidInputError(
            f"adapted='{adapted}': name one or more of {', '.join(known)}, each once."
        )
    return names


def _listing(task: Task, point: Point) -> dict[str, Listed]:
    """List the sources by their weights, the largest first."""
    assert task.origin is not None
    weights = np.asarray(jax.nn.softmax(jnp.asarray(point["x"])), float)
    sources = task.origin.summary["sources"]
    rows = [
        (one["name"], float(weight), one["rows"], one["tokens"])
        for one, weight in zip(sources, weights, strict=True)
    ]
    rows.sort(key=lambda row: (-row[1], row[0]))
    return {"weights.csv": Listed(("source", "weight", "rows", "tokens"), rows)}


def _files(task: Task, point: Point) -> dict[str, bytes]:
    """Return the adapters as PEFT has them, in a folder of their own."""
    frozen: _Frozen = task.problem.frozen
    leaves = [point[f"y.{name}"] for name in _tree.leaf_names(task.y)]
    y = jax.tree.unflatten(jax.tree.structure(task.y), leaves)
    whole = joined(y, frozen.adapters)
    packed = packed_adapters(whole, frozen.family, frozen.folder)
    return {f"adapter/{name}": content for name, content in packed.items()}
