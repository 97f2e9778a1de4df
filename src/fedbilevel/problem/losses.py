r"""The two losses of a problem and how a batch of samples is scored by them.

    min_x  mean_k f_k(x, y*(x))   with   y*(x) = argmin_y mean_k g_k(x, y)

    f_k(x, y) = mean_i upper(x, y, row_i),   g_k(x, y) = mean_i lower(x, y, row_i)

`upper` and `lower` take a batch: a pytree whose leaves have one row per sample, and
return the mean over its rows. Terms without data (a regularizer) belong inside.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import NOTHING
from fedbilevel._types import Key, Loss, Lower, Noise, Pair, Rows, Scalar, Upper
from fedbilevel.errors import InvalidInputError

T = TypeVar("T")
_BITS = 8  # for one entry of a mask, at most


@dataclass(frozen=True)
class Fixed:
    """The parts of a level that are no numbers, such as an activation function."""

    leaves: tuple[Any, ...]
    structure: Any

    def completing(self, level: PyTree) -> PyTree:
        """Return a level of numbers with the rest put back."""
        return eqx.combine(level, jax.tree.unflatten(self.structure, self.leaves))


def _as_arrays(frozen: PyTree) -> PyTree:
    for leaf in jax.tree.leaves(frozen):
        if not eqx.is_array_like(leaf):
            raise InvalidInputError(
                f"`Problem(frozen=...)` holds a leaf of type {type(leaf).__name__}. "
                "Give arrays alone: of an Equinox module, `eqx.filter(module, "
                "eqx.is_array)`, and put it together inside the losses."
            )
    return jax.tree.map(jnp.asarray, frozen)


def _loss_name(loss: Any) -> str:
    """Return what a function is called, or the one that a partial is made of."""
    inner = getattr(loss, "func", loss)
    return getattr(inner, "__name__", type(inner).__name__)


class Problem(eqx.Module):
    """Two plain functions of pytrees: `upper(x, y, batch)` and `lower(x, y, batch)`.

    `upper` judges and `lower` trains: both return the mean loss over the rows of a
    batch. `upper_noise` and `lower_noise`, functions of (key, batch), may perturb a
    drawn batch (noisy oracles, augmentation). They see the bundle's key, so that two
    points of one bundle meet the same perturbation; evaluations over all data leave
    them out.

    `private` flags blocks of x and y that each client keeps to itself: True, False, or
    a tree of them, for each level; `Pair(False, True)` keeps all of y. `frozen` are
    arrays that are input and never optimized, such as a backbone: the losses, and the
    metrics of a run, get them as one more argument. All clients share one copy, and so
    do `model_devices` of the devices: each holds a part of every large array. `fixed`
    is what a start holds besides its numbers, for x and for y; a run fills it in from
    the start. `rows_at_once` bounds memory: losses and derivatives of
    more rows are taken in pieces, one client after the other. `separate` says that the
    lower loss is a sum over the first axis of all leaves of y, such as the folds of a
    cross-validation: its Hessian then has a block for each. `lower_hessian`, of x, y, a
    batch and weights, is that Hessian in closed form, if there is one, summed over rows
    by their weights: an array of blocks. Methods that need all of it take it there.
    """

    upper: Loss = eqx.field(static=True)
    lower: Loss = eqx.field(static=True)
    upper_noise: Noise | None = eqx.field(static=True, default=None)
    lower_noise: Noise | None = eqx.field(static=True, default=None)
    private: Pair = eqx.field(static=True, default=NOTHING)
    frozen: PyTree = eqx.field(converter=_as_arrays, default=None)
    fixed: tuple[Fixed, Fixed] | None = eqx.field(static=True, default=None)
    rows_at_once: int | None = eqx.field(static=True, default=None)
    model_devices: int = eqx.field(static=True, default=1)
    separate: bool = eqx.field(static=True, default=False)
    lower_hessian: Callable[..., Array] | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if self.rows_at_once is not None and self.rows_at_once < 1:
            raise InvalidInputError(
                f"`Problem(rows_at_once={self.rows_at_once})`: at least 1, or None."
            )
        if self.model_devices > 1 and self.frozen is None:
            raise InvalidInputError(
                f"model_devices={self.model_devices}: nothing of this problem is "
                "frozen, so that devices have no model to share. Leave it out."
            )

    def __repr__(self) -> str:
        """Name the losses, and whatever is not as usual."""
        shown = {"upper": _loss_name(self.upper), "lower": _loss_name(self.lower)}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in (*shown, "fixed") and value is not one.default:
                shown[one.name] = _loss_name(value) if callable(value) else repr(value)
        if self.frozen is not None:
            count = sum(leaf.size for leaf in jax.tree.leaves(self.frozen))
            shown["frozen"] = f"{count:,} numbers"
        return f"Problem({', '.join(f'{n}={text}' for n, text in shown.items())})"

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Further arguments of losses and metrics."""
        return () if self.frozen is None else (self.frozen,)

    @property
    def coarse_type(self) -> str:
        """The type of frozen numbers that are shorter than float32, or nothing."""
        for leaf in jax.tree.leaves(self.frozen):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
                return str(leaf.dtype)
        return ""

    def whole(self, x: Upper, y: Lower) -> tuple[Any, Any]:
        """Return x and y as they were given at the start: models, not numbers alone."""
        if self.fixed is None:
            return x, y
        return self.fixed[0].completing(x), self.fixed[1].completing(y)

    def scored(self, loss: Loss, x: Upper, y: Lower, rows: Rows) -> Any:
        """Return one of the losses on rows."""
        return loss(*self.whole(x, y), rows, *self.inputs)

    def functions(self) -> tuple[Any, ...]:
        """Return what distinguishes this problem from others, but for frozen arrays."""
        own = (self.upper, self.lower, self.upper_noise, self.lower_noise)
        return own if self.fixed is None else (*own, *self.fixed)


def split_start(
    problem: Problem, start: tuple[Upper, Lower]
) -> tuple[Problem, tuple[Upper, Lower]]:
    """Return a start of numbers alone, and the problem that knows the rest of it.

    Of an Equinox module the arrays are optimized, of any other tree all numbers. What
    else a model holds, such as activation functions, flags and texts, is put back
    wherever a loss or a metric sees the model.
    """
    (x, rest_x), (y, rest_y) = (_split(level) for level in start)
    if not jax.tree.leaves((rest_x, rest_y)):
        return problem, (x, y)
    fixed = (_fixed("x", rest_x), _fixed("y", rest_y))
    return replace(problem, fixed=fixed), (x, y)


def _split(level: PyTree) -> tuple[PyTree, PyTree]:
    def is_module(node: Any) -> bool:
        return isinstance(node, eqx.Module)

    def numbers(node: Any) -> Any:
        if not is_module(node):
            return eqx.is_array_like(node)
        return jax.tree.map(
            lambda a: eqx.is_array(a) or isinstance(a, np.ndarray), node
        )

    return eqx.partition(level, jax.tree.map(numbers, level, is_leaf=is_module))


def _fixed(name: str, rest: PyTree) -> Fixed:
    leaves, structure = jax.tree.flatten(rest)
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            raise InvalidInputError(
                f"the start {name} holds a leaf of type {type(leaf).__name__}, which "
                "is neither a number nor something that can be kept as it is. Make it "
                "a static field of its module (`eqx.field(static=True)`), or leave it "
                "out."
            ) from None
    return Fixed(tuple(leaves), structure)


class Batch(eqx.Module):
    """Samples, and weights where rows may be padding; over all rows they sum to one."""

    rows: Rows
    weights: Float[Array, " *rows"] | None = None


def _score(level: str, problem: Problem, x: Upper, y: Lower, batch: Batch) -> Scalar:
    loss = problem.upper if level == "upper" else problem.lower
    if batch.weights is None:
        return problem.scored(loss, x, y, batch.rows)

    def score_row(row: Rows) -> Scalar:
        one = jax.tree.map(lambda leaf: leaf[None], row)
        return problem.scored(loss, x, y, one)

    return jnp.vdot(batch.weights, jax.vmap(score_row)(batch.rows))


# f and g on a batch, functions of (problem, x, y, batch).
upper_loss, lower_loss = partial(_score, "upper"), partial(_score, "lower")


def lower_hessian(problem: Problem, x: Upper, y: Lower, batch: Batch) -> Array | None:
    """Return the blocks of d2 g / dy dy on a batch, where they have a closed form."""
    if (closed := problem.lower_hessian) is None:
        return None

    def summed(problem: Problem, x: Upper, y: Lower, piece: Batch) -> Array:
        count = jax.tree.leaves(piece.rows)[0].shape[0]
        alike = jnp.full(count, 1 / count, jax.tree.leaves(y)[0].dtype)
        weights = alike if piece.weights is None else piece.weights
        return closed(*problem.whole(x, y), piece.rows, weights, *problem.inputs)

    return over_pieces(summed, problem, x, y, batch)


def over_pieces(
    function: Callable[..., T], problem: Problem, x: Upper, y: Lower, batch: Batch
) -> T:
    """Return what a function of these makes of a batch, a loss or a derivative of it.

    Both are means over rows, so that those of pieces add up, and only one piece's
    intermediate values are ever held.
    """
    count = jax.tree.leaves(batch.rows)[0].shape[0]
    most = problem.rows_at_once or count
    if count <= most:
        return function(problem, x, y, batch)
    number = -(-count // most)
    if batch.weights is None:
        # Pieces of one size, so that the mean of their means is that of all rows.
        number = next(n for n in range(number, count + 1) if count % n == 0)
        pieces, each = divided(batch, number)[0], 1 / number
    else:
        pieces, real = divided(batch, number)
        # Rows that fill up the last piece weigh nothing.
        weights = jnp.where(real, pieces.weights, 0)
        pieces, each = Batch(pieces.rows, weights), 1.0

    def taken(total: Any, piece: Batch) -> Any:
        return _tree.add_scaled(total, each, function(problem, x, y, piece))

    def add(total: Any, piece: Batch) -> tuple[Any, None]:
        if piece.weights is None:
            return taken(total, piece), None
        # A small client has pieces that are all padding.
        real = jnp.any(piece.weights > 0)
        return jax.lax.cond(real, taken, lambda total, _: total, total, piece), None

    first = jax.tree.map(lambda leaf: leaf[0], pieces)
    value = jax.eval_shape(lambda piece: function(problem, x, y, piece), first)
    zeros = _tree.zeros_like(value)
    return jax.lax.scan(add, zeros, pieces)[0]


def divided(items: PyTree, number: int) -> tuple[PyTree, Bool[Array, "parts entries"]]:
    """Divide entries into so many parts of one size, the last entry filling up.

    Also say which places are not such fillings.
    """
    count = jax.tree.leaves(items)[0].shape[0]
    size = -(-count // number)
    places = jnp.arange(number * size, dtype=jnp.int32).reshape(number, size)
    taken = jnp.minimum(places, count - 1)
    return jax.tree.map(lambda leaf: leaf[taken], items), places < count


def coin_mask(
    key: Key, shape: tuple[int, ...], keep: float = 0.5
) -> Bool[Array, "..."]:
    """Return independent flags that are True with the chance `keep`.

    Use it in `Problem(lower_noise=...)` for dropout. `jax.random.bernoulli` hashes 32
    bits for each flag; this takes one bit where `keep` is 1/2, two for quarters, and so
    on down to 1/256.
    """
    bits = next((n for n in range(_BITS + 1) if float(keep * 2**n).is_integer()), None)
    if bits is None or not 0 <= keep <= 1:
        raise InvalidInputError(
            f"keep={keep}: give a chance from 0 to 1 in steps of 1/{2**_BITS}, such as "
            f"{min(max(round(keep * 2**_BITS), 0), 2**_BITS) / 2**_BITS:g}, or use "
            "`jax.random.bernoulli`."
        )
    count = math.prod(shape)
    words = jr.bits(key, (max(bits, 1), -(-count // 32)), jnp.uint32)
    planes = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & jnp.uint32(1)
    drawn = planes[0]
    for plane in planes[1:]:
        drawn = 2 * drawn + plane
    flags = drawn < jnp.uint32(round(keep * 2 ** max(bits, 1)))
    return flags.reshape(-1)[:count].reshape(shape)
