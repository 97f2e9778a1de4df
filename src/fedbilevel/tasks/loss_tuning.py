r"""A training loss tuned, class by class, for training rows with few of some classes.

    g_k(x, y) = mean of CE(sigmoid(s) * scores(y; a_i) + t, l_i) over training rows
                + penalty ||y||^2
    f_k(y)    = mean of w_{l_i} CE(scores(y; a_i), l_i) over validation rows

x = (s, t) are scales and shifts, one of each per class, and start at 0; y is the whole
classifier. f does not see x. w makes classes count alike: w_l is the mean size of a
class in the validation rows over the size of class l. The penalty gives the lower level
curvature along directions that the scores do not see.

The clients' rows are thinned to a long tail: of the classes 0..c-1, with n the mean
size of a class, class l keeps the first ceil(n r^l), where r^(c-1) = 1/imbalance; test
rows stay as they are, and classes count alike there, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Rows, Scalar
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _labeled
from fedbilevel.tasks._base import MEASURED, Task
from fedbilevel.tasks._labeled import (
    MNIST_SCALING,
    HeldOut,
    Scaling,
    balanced_accuracy,
    cross_entropies,
)
from fedbilevel.tasks._networks import Network, NetworkScores, build, network_layers
from fedbilevel.tasks._rows import (
    PartitionText,
    RowLimit,
    Source,
    SplitSeed,
    TableOptions,
    TrainShare,
    deal,
    load,
    thin,
)

__all__ = ["make", "tail"]


@dataclass(frozen=True)
class _Setting:
    """What is used where nothing is chosen; `train_apart` if clients differ."""

    clients: int
    model: str
    width: int
    train: float
    train_apart: float
    scaling: Scaling | None
    algorithm: str
    recommended: dict[str, str]


_WEIGHTS = {"upper_weight": "0.1", "lower_weight": "0.1"}
_SETTINGS = {
    "default": _Setting(
        clients=8,
        model="linear",
        width=64,
        train=0.4,
        train_apart=0.4,
        scaling=None,
        algorithm="fedbio-controls",
        recommended=_WEIGHTS
        | {"rounds": "200", "local_steps": "10", "batch": "32", "q": "10"},
    ),
    "fednest": _Setting(
        clients=100,
        model="mlp",
        width=200,
        train=0.5,
        train_apart=0.8,
        scaling=MNIST_SCALING,
        algorithm="fednest",
        recommended=_WEIGHTS
        | {"rounds": "500", "local_steps": "20", "batch": "10", "inner_rounds": "3"}
        | {"q": "3", "theta": "0.01", "upper_step": "0.001", "lower_step": "0.01"},
    ),
}
_STEPS = {
    "linear": MEASURED
    | {"auto:fedbio-controls": "upper_step=0.5*auto lower_step=1.5/L"}
    | {"upper_step": "1", "lower_step": "8", "theta": "0.5"}
    # Of rare classes f has a hundred times as much as g has.
    | {"nu": "0.001"},
    "mlp": MEASURED
    | {"auto:fedbio-controls": "lower_step=0.5/L auxiliary_step=0.5/L"}
    | {"upper_step": "0.1", "lower_step": "0.1", "theta": "0.02"},
}


@dataclass(frozen=True)
class _Upper:
    scores: NetworkScores

    def __call__(self, x: Mapping[str, Array], y: Network, rows: Rows) -> Scalar:
        scores = self.scores(x, y, rows["features"])
        return jnp.mean(rows["weight"] * cross_entropies(scores, rows["label"]))


@dataclass(frozen=True)
class _Lower:
    scores: NetworkScores
    penalty: float

    def __call__(self, x: Mapping[str, Array], y: Network, rows: Rows) -> Scalar:
        scores = self.scores(x, y, rows["features"])
        tuned = jax.nn.sigmoid(x["scales"]) * scores + x["shifts"]
        losses = cross_entropies(tuned, rows["label"])
        return jnp.mean(losses) + self.penalty * _tree.dot(y, y)


class _TestMetrics(HeldOut):
    def __call__(self, x: Mapping[str, Array], y: Network) -> dict[str, Array]:
        scores = self.all_scores(x, y)
        real = jnp.arange(len(self.label), dtype=self.size.dtype) < self.size
        balanced = balanced_accuracy(scores, jnp.where(real, self.label, -1))
        return {
            "balanced_error": 1 - balanced,
            "balanced_accuracy": balanced,
            "test_accuracy": self.accuracy(scores),
        }


def tail(
    label: np.ndarray, classes: int, imbalance: float, seed: int = 0
) -> np.ndarray:
    """Return the rows that a long tail keeps, in random order."""
    ratio = imbalance ** (-1 / max(classes - 1, 1))
    mean = len(label) / classes
    kept = [
        np.flatnonzero(label == number)[: math.ceil(mean * ratio**number)]
        for number in range(classes)
    ]
    # As found, all rows of rare classes would come first.
    return np.random.default_rng((seed, 1)).permutation(np.concatenate(kept))


def _class_weights(label: np.ndarray, classes: int) -> np.ndarray:
    sizes = np.bincount(label, minlength=classes)
    return len(label) / np.count_nonzero(sizes) / np.maximum(sizes, 1)


def _weights_by_rank(classes: int, imbalance: float) -> np.ndarray:
    weights = imbalance ** (np.arange(classes) / max(classes - 1, 1))
    return weights / np.linalg.norm(weights)


def _check(setting: str, model: str, imbalance: float) -> None:
    _labeled.check_choice("setting", setting, tuple(_SETTINGS))
    _labeled.check_choice("model", model, (*_STEPS, "auto"))
    if not (1 <= imbalance < np.inf or imbalance == 0):
        raise InvalidInputError(
            f"imbalance={imbalance}: the first class over the last is at least 1."
        )


def _usual_train(setting: str, partition: str) -> float:
    """Return the share for training of a setting that was chosen, else 0."""
    usual = _SETTINGS[setting]
    if setting == "default":
        return 0.0
    return usual.train if partition == "iid" else usual.train_apart


def make(
    clients: int = 0,
    *,
    setting: Annotated[
        str, "what is usual where nothing is chosen: default, or fednest (see above)"
    ] = "default",
    imbalance: Annotated[
        float,
        "how often the most frequent class is there against the rarest, after "
        "thinning; 0 is 100 for a built-in set, and 1, no thinning, for your own",
    ] = 0.0,
    model: Annotated[str, "the classifier: linear, mlp, or auto, the setting's"] = (
        "auto"
    ),
    width: Annotated[int, "units of the hidden layer of an mlp; 0: the setting's"] = 0,
    penalty: Annotated[float, "l2 strength below"] = 0.00001,
    data: Source = "digits",
    partition: PartitionText = "iid",
    train: TrainShare = 0.0,
    split: SplitSeed = 0,
    rows: RowLimit = 0,
    **table: TableOptions,
) -> Task:
    """Build the task; 0 and auto leave clients, model, width, train to the `setting`.

    Tested is an official test part, or else a fifth, which is not thinned; `rows` are
    taken before thinning.

    setting=fednest is that of FedNest (arXiv 2205.02215) for MNIST: an mlp with 200
    units, 100 clients, half of the rows for training, or four fifths where clients
    differ, and w_l of 1/r^l scaled to length 1. To run it, add --participants 10, and
    partition=shards:2 for clients that differ.
    """
    _check(setting, model, imbalance)
    _labeled.check_positive(penalty=penalty)
    usual = _SETTINGS[setting]
    model = usual.model if model == "auto" else model
    whole = load(
        data,
        split=split,
        rows=rows,
        scaling=usual.scaling,
        table=table,
        task="loss-tuning",
    )
    imbalance = imbalance or whole.usual(100.0, own=1.0)
    told = [f"rows are left out until the first class is {imbalance:g} times the last"]
    pool = whole
    if imbalance > 1 or not whole.is_own:
        kept = tail(whole.held.label, whole.classes, imbalance, split)
        pool = thin(whole, kept)
    dealt = deal(
        pool,
        clients,
        scheme=partition,
        train=train or _usual_train(setting, partition),
        split=split,
        usual_clients=usual.clients,
        usual_train=usual.train,
        remarks=told if imbalance > 1 else [],
    )
    if setting == "fednest":
        weights = _weights_by_rank(pool.classes, imbalance)
    else:
        everyone = np.concatenate([one["label"] for one in dealt.upper])
        weights = _class_weights(everyone, pool.classes)
    shape, scores = pool.held.features.shape[1:], NetworkScores(pool.scaling)
    return Task(
        Problem(_Upper(scores), _Lower(scores, penalty)),
        ClientData.from_clients(
            [{**one, "weight": weights[one["label"]]} for one in dealt.upper],
            dealt.lower,
        ),
        {name: _tree.filled(pool.classes) for name in ("scales", "shifts")},
        build(model, shape, pool.classes, width or usual.width, jr.key(split)),
        _TestMetrics.of(pool.test, scores),
        headline="balanced_error",
        recommended=_STEPS[model] | usual.recommended,
        convex=model == "linear",
        algorithm=usual.algorithm,
        predictor=pool.predictor(network_layers),
        **dealt.about,
    )
