r"""Weights sigmoid(x_i) of training rows, some of whose labels are wrong.

    g_k(x, y) = mean over client k's training rows of sigmoid(x_i) CE(y; a_i, l_i)
                + penalty ||y||^2
    f_k(y)    = mean of CE(y; a_i, l_i) over client k's clean validation rows

With `trusted=false`, as for your own data, labels of validation rows may be wrong, too,
and f_k is the mean of 1 - p(l_i | a_i; y): cross entropy would prefer a model that
repeats the wrong labels.

x_i belongs to the client that has row i and never leaves it; y, the classifier, is
shared. As an experiment, a share `corrupted` of each client's training labels is
replaced before, once, by (label + U{1..c-1}) mod c with c classes, so that each of them
is wrong; `data.lower["corrupted"]` marks the rows. `weight_auc` and `mean_weights`
compare the learned weights with these marks, which no loss reads. Your own data are
left as they are; `suspicious_rows` lists the rows by their weights, or by the chance
that their labels are right, which `_noise` estimates.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from fedbilevel import _tree
from fedbilevel._types import Pair, Rows, Scalar
from fedbilevel.datasets import shrink
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _labeled, _parts, _rows
from fedbilevel.tasks._base import Listed, Point, Task, settings
from fedbilevel.tasks._labeled import HeldOut, MeanLoss, cross_entropies
from fedbilevel.tasks._networks import Network, NetworkScores, build, network_layers
from fedbilevel.tasks._noise import label_noise

_SIZES = settings("rounds=200 local_steps=10 batch=64 q=10")
_SIZES |= settings("upper_weight=0.1 lower_weight=0.1")
_RECOMMENDED = {
    "linear": settings("upper_step=100 lower_step=16 theta=0.5"),
    # z must move slower than y: the Hessian of a network has negative directions.
    "mlp": {
        "auto": "theta lower_step",
        "auto:fedbio": "lower_step=1/L",
        **settings("upper_step=30 lower_step=0.2 theta=0.02 auxiliary_step=0.02"),
    },
}
# With less, z of a network grows along the directions in which its loss is flat.
_PENALTY = {"linear": 0.00001, "mlp": 0.0003}
# Judges that err pull weights about: shorter steps, and a smoother y, average that out.
_DISTRUSTING = {
    "auto:fedbio": "lower_step=0.5/L auxiliary_step=0.5/L",
    **settings("upper_step=10 lower_step=8"),
}
_PENALTY_DISTRUSTING = 0.001
# Of rows that are images the most suspicious ones are kept, each side so long at most.
_MOST_PICTURES, _LARGEST_PICTURE = 24, 96


@dataclass(frozen=True)
class _Lower:
    scores: NetworkScores
    penalty: float

    def __call__(self, x: Array, y: Network, rows: Rows) -> Scalar:
        scores = self.scores(x, y, rows["features"])
        weight = jax.nn.sigmoid(x[rows["index"]])
        losses = weight * cross_entropies(scores, rows["label"])
        return jnp.mean(losses) + self.penalty * _tree.dot(y, y)


def _corrupt(rows: Rows, share: float, classes: int, draw: np.random.Generator) -> Rows:
    """Replace a share of the labels by wrong ones; mark and number the rows."""
    size = len(rows["label"])
    marks = np.zeros(size, bool)
    marks[draw.permutation(size)[: round(share * size)]] = True
    wrong = (rows["label"] + draw.integers(1, classes, size)) % classes
    return {
        "features": rows["features"],
        "label": np.where(marks, wrong, rows["label"]).astype(np.int32),
        "index": np.arange(size, dtype=np.int32),
        "corrupted": marks,
    }


def _clean(
    parts: _parts.Partition, lower: list[Rows]
) -> tuple[_parts.Partition, list[Rows]]:
    """Leave the corrupted rows out, and number the others again."""
    sound = [~one["corrupted"] for one in lower]
    numbers = [rows[own] for rows, own in zip(parts.numbers, sound, strict=True)]
    kept = [
        {name: leaf[own] for name, leaf in one.items()}
        | {"index": np.arange(own.sum(), dtype=np.int32)}
        for one, own in zip(lower, sound, strict=True)
    ]
    return replace(parts, numbers=numbers), kept


def rank_statistic(
    score: Float[Array, " rows"],
    positive: Bool[Array, " rows"],
    counted: Bool[Array, " rows"],
) -> Scalar:
    """Return the chance that a positive row has a higher score than a negative one.

    Ties count half; rows that are not `counted` do not matter. NaN where there is no
    pair to compare.
    """
    score = jnp.where(counted, score, jnp.inf)
    order = jnp.sort(score)
    below = jnp.searchsorted(order, score, side="left")
    rank = (below + jnp.searchsorted(order, score, side="right") + 1) / 2
    rank = rank.astype(score.dtype)
    ours = (positive & counted).astype(score.dtype)
    count = jnp.sum(ours)
    others = jnp.sum(counted.astype(score.dtype)) - count
    # As means: sums of ranks outgrow single precision.
    mean_rank = jnp.sum(ours * (rank / count))
    return jnp.where(
        count * others > 0, (mean_rank - (count + 1) / 2) / others, jnp.nan
    )


def _compared(task: Task, point: Point) -> tuple[Array, Array, Array]:
    """Return weights, marks of corrupted rows, and marks of rows that are there."""
    marks = task.data.lower["corrupted"]
    x = jnp.asarray(point["x"])
    if x.shape != marks.shape:
        raise InvalidInputError(
            f"x has shape {x.shape}, but the task has {marks.shape[0]} clients with up "
            f"to {marks.shape[1]} rows. Build the task with the run's options."
        )
    position = jnp.arange(marks.shape[1], dtype=jnp.int32)
    real = position < task.data.lower_sizes[:, None]
    return jax.nn.sigmoid(x), marks, real


def weight_auc(task: Task, point: Point) -> float:
    """Return the chance that a clean row weighs more than a corrupted one.

    `point` is that of a result; all clients' rows are compared with each other.
    """
    weights, marks, real = (one.ravel() for one in _compared(task, point))
    return float(rank_statistic(weights, ~marks, real))


def mean_weights(task: Task, point: Point) -> tuple[float, float]:
    """Return the mean weight of clean rows, and of corrupted ones."""
    weights, marks, real = _compared(task, point)
    chosen = (real & ~marks, real & marks)
    clean, corrupted = (float(jnp.mean(weights, where=where)) for where in chosen)
    return clean, corrupted


_CONCLUDES = ("weight_auc", "weight_clean", "weight_corrupted")


def _conclude(task: Task, point: Point) -> dict[str, float]:
    if not bool(jnp.any(task.data.lower["corrupted"])):
        return {}  # no weights to compare
    values = (weight_auc(task, point), *mean_weights(task, point))
    return dict(zip(_CONCLUDES, values, strict=True))


def _chances(task: Task, point: Point) -> list[np.ndarray] | None:
    """Return for each client the chance that its training labels are right.

    None where judges are trusted, where rows are images, and where clients have no
    model in common: weights say it there.
    """
    names = [f"y.{name}" for name in _tree.leaf_names(task.y)]
    judge: Any = task.problem.upper
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(task.y)]
    if (
        judge.losses is cross_entropies
        or task.data.lower["features"].dtype == np.uint8
        or [np.shape(point[name]) for name in names if name in point] != shapes
    ):
        return None
    y = jax.tree.unflatten(
        jax.tree.structure(task.y), [jnp.asarray(point[name]) for name in names]
    )
    data, parts = task.data, []
    levels = ((data.lower, data.lower_sizes), (data.upper, data.upper_sizes))
    for rows, sizes in levels:
        for client, size in enumerate(map(int, sizes)):
            scores = judge.scores(None, y, jnp.asarray(rows["features"][client]))
            p = np.asarray(jax.nn.softmax(scores), float)[:size]
            label = np.asarray(rows["label"][client])[:size]
            parts.append((p, label, np.full(size, client)))
    found = label_noise(*map(np.concatenate, zip(*parts, strict=True)))
    ends = np.cumsum([len(label) for _, label, _ in parts])
    return np.split(found.right, ends)[: data.clients]


def suspicious_rows(task: Task, point: Point) -> Listed:
    """List the training rows, those with the smallest weights first.

    A row is listed with its number in its file, its site, its weight and its label.
    Rows are numbered from 0, lines of text from 1. An image has a file of its own,
    where it was read from one; the first of the list are shown. Rows of a table whose
    judges may err have the chance that the label is right, too, and are listed by it:
    a weight is small for every row of a class that the judges give up.
    """
    if task.origin is None:
        raise InvalidInputError("the task does not say where its rows are from.")
    weights, source = _compared(task, point)[0], task.origin.summary["source"]
    chances, found = _chances(task, point), []
    for client, places in enumerate(task.origin.places):
        name = task.names[client] if task.names else f"client {client}"
        files = task.origin.names[client] if task.origin.names else [""] * len(places)
        weight = np.asarray(weights[client], float)
        label = np.asarray(task.data.lower["label"][client])
        for row, (place, file) in enumerate(zip(places, files, strict=True)):
            path = "/".join(filter(None, (source.rstrip("/"), str(file))))
            known = (int(place), name, float(weight[row]), task.classes[label[row]])
            more = () if chances is None else (float(chances[client][row]),)
            found.append(((path, *known, *more), (client, row)))
    by = 3 if chances is None else 5
    found.sort(key=lambda one: (one[0][by], one[0][1], one[0][2]))
    header = ("file", task.origin.unit, "site", "weight", "label")
    header = header if chances is None else (*header, "right")
    shown = _pictures(task, [where for _, where in found[:_MOST_PICTURES]])
    return Listed(header, [one for one, _ in found], shown)


def _pictures(task: Task, rows: list[tuple[int, int]]) -> np.ndarray | None:
    """Return rows that are images, by client and number, in bytes and small."""
    held = task.data.lower["features"]
    channels = held.shape[4:]
    if held.dtype != np.uint8 or held.ndim not in (4, 5) or channels not in ((), (3,)):
        return None
    images = np.stack([np.asarray(held[client, row]) for client, row in rows])
    largest = max(images.shape[1:3])
    if largest <= _LARGEST_PICTURE:
        return images
    # Both sides by the same share, and no side vanishes.
    sides = [max(side * _LARGEST_PICTURE // largest, 1) for side in images.shape[1:3]]
    return shrink(images, *sides)


def _listing(task: Task, point: Point) -> dict[str, Listed]:
    return {"suspicious.csv": suspicious_rows(task, point)}


def make(
    clients: int = 0,
    *,
    corrupted: Annotated[
        float,
        "share of the training labels that is replaced by wrong ones, to see whether "
        "they are found; -1 is 0.5 for a built-in set, and 0 for your own",
    ] = -1.0,
    model: Annotated[str, "the classifier: linear, or mlp with a hidden layer"] = (
        "linear"
    ),
    width: Annotated[int, "units of the hidden layer of an mlp"] = 200,
    penalty: Annotated[
        float,
        "l2 strength below; 0 is 0.00001, or 0.001 if validation labels are not "
        "trusted; 0.0003 for an mlp",
    ] = 0.0,
    data: _rows.Source = "digits",
    partition: _rows.PartitionText = "iid",
    train: _rows.TrainShare = 0.0,
    split: _rows.SplitSeed = 0,
    rows: _rows.RowLimit = 0,
    trusted: Annotated[
        str,
        "true: the validation labels are right; false: some are wrong, too, and what "
        "is judged is 1 - the probability of a label, which no wrong one can dominate; "
        "auto: true for a built-in set, and false for your own",
    ] = "auto",
    kept: Annotated[
        str, "all, or clean: without the corrupted rows, the best one can hope for"
    ] = "all",
    **table: _rows.TableOptions,
) -> Task:
    """Build the task; 8 clients, and two fifths of a built-in set for training.

    Tested is an official test part, or else a fifth; the other rows validate. `split`
    seeds the corruption, too.
    """
    _labeled.check_choice("model", model, tuple(_RECOMMENDED))
    _labeled.check_choice("kept", kept, ("all", "clean"))
    _labeled.check_choice("trusted", trusted, ("auto", "true", "false"))
    _labeled.check_not_negative(penalty=penalty)
    if not (0 <= corrupted < 1 or corrupted == -1):
        raise InvalidInputError(
            f"corrupted={corrupted}: give the share of wrong labels, from 0 to below 1."
        )
    pool = _rows.load(data, split, rows, table, "cleaning")
    share = pool.usual(0.5, own=0.0) if corrupted == -1 else corrupted
    remark = f"{share:.0%} of the training labels are replaced by wrong ones"
    parts = _parts.partition_rows(
        pool, clients, partition, train, remarks=[remark] if share else []
    )
    draw = np.random.default_rng((split, 1))
    lower = [_corrupt(one, share, pool.classes, draw) for one in parts.lower]
    if kept == "clean":
        parts, lower = _clean(parts, lower)
    held = ClientData.from_clients(parts.upper, lower)
    right = trusted == "true" or (trusted == "auto" and not pool.is_own)
    recommended, usual = _SIZES | _RECOMMENDED[model], _PENALTY[model]
    if model == "linear" and not right:
        recommended, usual = recommended | _DISTRUSTING, _PENALTY_DISTRUSTING
    shape, scores = pool.held.features.shape[1:], NetworkScores(pool.pixels)
    return Task(
        Problem(
            MeanLoss(scores, cross_entropies if right else _labeled.improbabilities),
            _Lower(scores, penalty or usual),
            private=Pair(True, False),
        ),
        held,
        _tree.filled(held.lower["label"].shape[1]),
        build(model, shape, pool.classes, width, jr.key(split)),
        HeldOut.of(pool.test, scores),
        headline="test_error",
        recommended=recommended,
        convex=model == "linear",
        conclusion=_conclude,
        concludes=dict.fromkeys(_CONCLUDES, "number"),
        # z is shared: it moves y as the validation rows of all clients ask for.
        algorithm="fedbio",
        listing=_listing,
        **parts.about(network_layers),
    )
