r"""Per-feature l2 strengths exp(x_j) of softmax regression, tuned on validation data.

    g_k(x, W) = mean of CE(W a_i, l_i) over training + 0.5 sum_j exp(x_j) ||W_:j||^2
    f_k(x, W) = mean of CE(W a_i, l_i) over validation

W has one row per class and one column per feature; rows a_i are scaled to a length of
about 1 and end with a constant feature. x is kept in [-9, 0] where it is used, so the
lower level is exp(-9)-strongly convex wherever x goes; a strength at the border feels
no more pull outwards.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedbilevel._types import Rows
from fedbilevel.datasets import Dataset
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _labeled
from fedbilevel.tasks._base import Task
from fedbilevel.tasks._labeled import CrossEntropy, HeldOut, Scaling

__all__ = ["make"]

_LOWEST, _HIGHEST = -9.0, 0.0
_RECOMMENDED = {
    "rounds": "200",
    "local_steps": "10",
    "batch": "32",
    "q": "10",
    "theta": "0.2",
    "upper_step": "20",
    "lower_step": "0.5",
    "upper_weight": "0.1",
    "lower_weight": "0.1",
}
# With many rows small strengths are right, and the slopes along x are small, too.
_MANY = 500
_RECOMMENDED_FOR_MANY = {"rounds": "600", "upper_step": "200", "lower_step": "1"}


@dataclass(frozen=True)
class _Scores:
    scaling: Scaling

    def __call__(self, x: Array, W: Array, features: Array) -> Array:
        del x
        if features.dtype == jnp.uint8:
            flat = self.scaling(features).reshape(len(features), -1)
            flat = flat / flat.shape[1] ** 0.5
            features = jnp.hstack([flat, jnp.ones_like(flat[:, :1])])
        # W @ a with features contiguous in both: XLA's fastest product on the CPU.
        return features @ W.T


@dataclass(frozen=True)
class _Lower(CrossEntropy):
    def __call__(self, x: Array, y: Array, rows: Rows) -> Array:
        strength = jnp.exp(jnp.clip(x, _LOWEST, _HIGHEST))
        return super().__call__(x, y, rows) + 0.5 * jnp.sum(strength * y**2)


def _completed(table: Dataset) -> Dataset:
    """Scale rows and append the constant; images have this done where they are used."""
    if table.features.dtype == np.uint8:
        return table
    flat = table.features.reshape(len(table.features), -1)
    flat = flat / np.sqrt(flat.shape[1])
    features = np.hstack([flat, np.ones((len(flat), 1), flat.dtype)])
    return replace(table, features=features)


def make(
    clients: int = 8,
    *,
    data: str = "digits",
    partition: str = "iid",
    train: float = 0.2,
    split: int = 0,
    rows: int = 0,
    start: float = -5.0,
) -> Task:
    """Build the task; `train` of all rows are for training, the others validate.

    All strengths start at exp(`start`); an algorithm that leaves x alone stays there.
    Tested is an official test part, or else a fifth. `split` seeds who gets which rows;
    with `rows` only so many are taken.
    """
    pool = _labeled.load(data, split=split, rows=rows)
    width = int(np.prod(pool.held.features.shape[1:])) + 1
    pool = replace(pool, held=_completed(pool.held), test=_completed(pool.test))
    upper, lower = _labeled.deal(
        pool, clients, scheme=partition, train=train, split=split
    )
    scores = _Scores(pool.scaling)
    held = ClientData.from_clients(upper, lower)
    many = int(held.lower_sizes.max()) > _MANY
    return Task(
        Problem(CrossEntropy(scores), _Lower(scores)),
        held,
        jnp.full(width, start),
        jnp.zeros((pool.classes, width)),
        HeldOut.of(pool, scores),
        headline="upper_loss",
        classes=pool.held.classes,
        preparation=pool.preparation,
        recommended=_RECOMMENDED | (_RECOMMENDED_FOR_MANY if many else {}),
    )
