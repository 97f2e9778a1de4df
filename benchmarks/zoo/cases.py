"""What a problem of the zoo consists of, and how its rows are split among clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import ClientData, Problem, Sampling

Columns = Mapping[str, np.ndarray]
Draw = np.random.Generator

PARTITIONS = ("iid", "label", "unequal")
SKEW = 0.1  # the Dirichlet parameter of a client's mix of labels
LARGEST_SHARE = 0.7  # of all rows, at the first client of unequal sizes


@dataclass(frozen=True)
class Case:
    """Everything that `fedbilevel.run` takes, but the algorithm and the seed.

    `wrap` puts constraints around a method. A minimax problem is `opposed`: its upper
    loss is judged at the y that solves the lower level, since any other y lowers it.
    """

    problem: Problem
    data: ClientData
    start: tuple[Any, Any]
    sampling: Sampling = Sampling(batch=8)
    local_steps: int = 5
    rounds: int = 150
    wrap: Callable[[Any], Any] = lambda method: method
    opposed: bool = False

    def __post_init__(self) -> None:
        def as_number(leaf: Any) -> Any:
            is_number = isinstance(leaf, np.ndarray | float)
            return jnp.asarray(leaf, float) if is_number else leaf

        object.__setattr__(self, "start", jax.tree.map(as_number, self.start))


Maker = Callable[[int, str], Case]
CATALOG: dict[str, Maker] = {}
SUMMARIES: dict[str, str] = {}


def listed(summary: str) -> Callable[[Maker], Maker]:
    """Add a problem to the catalog, with what is difficult about it."""

    def add(make: Maker) -> Maker:
        CATALOG[make.__name__], SUMMARIES[make.__name__] = make, summary
        return make

    return add


# Rows ---------------------------------------------------------------------------------


def halves(rows: Columns, draw: Draw) -> tuple[Columns, Columns]:
    """Divide rows at random between the upper and the lower level."""
    order = draw.permutation(len(next(iter(rows.values()))))
    middle = len(order) // 2
    return taken(rows, order[:middle]), taken(rows, order[middle:])


def taken(rows: Columns, which: np.ndarray) -> Columns:
    """Return some of the rows."""
    return {name: column[which] for name, column in rows.items()}


def split(
    levels: tuple[Columns, Columns],
    partition: str,
    draw: Draw,
    clients: int = 10,
    by: str = "t",
) -> tuple[list[Columns], list[Columns]]:
    """Return the upper and the lower rows of every client.

    Clients of the partition `label` have a mix of labels each, the same on both levels.
    The labels are the column `by`: classes, or fifths of a number. Sizes do not depend
    on the seed, so that one compiled program serves all seeds.
    """
    kinds = [_kinds(rows[by]) for rows in levels]
    mixes = draw.dirichlet(np.full(1 + max(map(np.max, kinds)), SKEW), clients)
    upper, lower = (
        [taken(rows, own) for own in _places(kind, partition, mixes, draw)]
        for rows, kind in zip(levels, kinds, strict=True)
    )
    return upper, lower


def federated(*arguments: Any, **named: Any) -> ClientData:
    """Return the rows of all clients, as `split` divides them."""
    return ClientData.from_clients(*split(*arguments, **named))


def _kinds(labels: np.ndarray) -> np.ndarray:
    if labels.dtype.kind in "iu":
        return labels
    return np.searchsorted(np.quantile(labels, [0.2, 0.4, 0.6, 0.8]), labels)


def _places(
    kinds: np.ndarray, partition: str, mixes: np.ndarray, draw: Draw
) -> list[np.ndarray]:
    order = draw.permutation(len(kinds))
    if partition == "label":
        order = _by_mix(kinds[order], order, mixes, draw)
    ends = np.cumsum(_sizes(partition, len(kinds), len(mixes)))
    return np.split(order[: ends[-1]], ends[:-1])


def _sizes(partition: str, rows: int, clients: int) -> np.ndarray:
    sizes = np.full(clients, max(rows // clients, 1))
    if partition == "unequal":
        largest = min(int(LARGEST_SHARE * rows), rows - clients + 1)
        sizes[:] = max((rows - largest - 1) // (clients - 2), 1)
        sizes[:2] = largest, 1
    return sizes


def _by_mix(
    kinds: np.ndarray, order: np.ndarray, mixes: np.ndarray, draw: Draw
) -> np.ndarray:
    """Order rows so that equal pieces have the clients' mixes while rows last."""
    pools = [list(order[kinds == kind]) for kind in range(mixes.shape[1])]
    found = []
    for mix in np.repeat(mixes, len(order) // len(mixes), axis=0):
        # A client whose labels have run out takes what is left.
        left = (mix + 1e-9) * [len(pool) > 0 for pool in pools]
        found.append(pools[draw.choice(len(pools), p=left / left.sum())].pop())
    return np.asarray(found)


# Losses -------------------------------------------------------------------------------


def row_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of every row."""
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    return jnp.mean(row_entropies(logits, labels))


def squares(tree: Any) -> jax.Array:
    """Return the sum of the squares of all entries."""
    return sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))


# Data ---------------------------------------------------------------------------------


def classes(
    draw: Draw, rows: int, columns: int, count: int, apart: float = 1.0
) -> Columns:
    """Draw rows of several classes, Gaussian around a center each."""
    centers = apart * draw.normal(size=(count, columns)) / columns**0.5 * 3
    labels = draw.integers(count, size=rows)
    return {"a": centers[labels] + draw.normal(size=(rows, columns)), "t": labels}


def line(draw: Draw, rows: int, columns: int, noise: float = 0.5) -> Columns:
    """Draw rows of a linear regression of which a quarter of the columns matter."""
    a, truth = draw.normal(size=(rows, columns)), draw.normal(size=columns)
    truth[columns // 4 :] = 0
    return {"a": a, "t": a @ truth + noise * draw.normal(size=rows)}


@cache
def _all_digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    return images, labels


def digits(draw: Draw, rows: int = 1000) -> Columns:
    """Draw some of scikit-learn's digits, with pixels between 0 and 1."""
    images, labels = _all_digits()
    order = draw.permutation(len(labels))[:rows]
    return {"a": images[order] / 16, "t": labels[order].astype(np.int32)}


def normal(draw: Draw, *shapes: Sequence[int]) -> list[np.ndarray]:
    """Draw weights with the usual scale, one over the root of the inputs."""
    return [draw.normal(size=shape) / shape[0] ** 0.5 for shape in shapes]
