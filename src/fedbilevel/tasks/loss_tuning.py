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
from dataclasses import replace
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Rows, Scalar
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _labeled, _parts, _rows
from fedbilevel.tasks._base import MEASURED, Task, settings
from fedbilevel.tasks._labeled import HeldOut, balanced_accuracy, cross_entropies
from fedbilevel.tasks._networks import Network, NetworkScores, build, network_layers

_MODELS = {"default": "linear", "fednest": "mlp"}
_ALGORITHMS = {"default": "fedbio-controls", "fednest": "fednest"}
_WEIGHTS = settings("upper_weight=0.1 lower_weight=0.1")
_RECOMMENDED = {
    "default": _WEIGHTS | settings("rounds=200 local_steps=10 batch=32 q=10"),
    "fednest": _WEIGHTS
    | settings("rounds=500 local_steps=20 batch=10 inner_rounds=3 q=3 theta=0.01")
    | settings("upper_step=0.001 lower_step=0.01"),
}
_STEPS = {
    "linear": MEASURED
    | {"auto:fedbio-controls": "upper_step=0.5*auto lower_step=1.5/L"}
    # Of rare classes f has a hundred times as much as g has: a small nu.
    | settings("upper_step=1 lower_step=8 theta=0.5 nu=0.001"),
    "mlp": MEASURED
    | {"auto:fedbio-controls": "lower_step=0.5/L auxiliary_step=0.5/L"}
    | settings("upper_step=0.1 lower_step=0.1 theta=0.02"),
}


class _Losses(eqx.Module):
    """Both levels."""

    scores: NetworkScores
    penalty: float

    def upper(self, x: Mapping[str, Array], y: Network, rows: Rows) -> Scalar:
        """Return the mean loss of rows, by the weights of their classes."""
        scores = self.scores(x, y, rows["features"])
        return jnp.mean(rows["weight"] * cross_entropies(scores, rows["label"]))

    def lower(self, x: Mapping[str, Array], y: Network, rows: Rows) -> Scalar:
        """Return the tuned loss of rows."""
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


def _check(setting: str, model: str, imbalance: float, penalty: float) -> None:
    _labeled.check_choice("setting", setting, tuple(_rows.SETTINGS))
    _labeled.check_choice("model", model, (*_STEPS, "auto"))
    if not (1 <= imbalance < np.inf or imbalance == 0):
        raise InvalidInputError(
            f"imbalance={imbalance}: the first class over the last is at least 1."
        )
    if not 0 < penalty < np.inf:
        raise InvalidInputError(f"penalty={penalty}: it must be a positive number.")


def make(
    clients: int = 0,
    *,
    setting: _rows.SettingName = "default",
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
    data: _rows.Source = "digits",
    partition: _rows.PartitionText = "iid",
    train: _rows.TrainShare = 0.0,
    split: _rows.SplitSeed = 0,
    rows: _rows.RowLimit = 0,
    **table: _rows.TableOptions,
) -> Task:
    """Build the task; 0 and auto leave clients, model, width, train to the `setting`.

    Tested is an official test part, or else a fifth, which is not thinned; `rows` are
    taken before thinning.

    setting=fednest is that of FedNest (arXiv 2205.02215) for MNIST: an mlp with 200
    units, 100 clients, half of the rows for training, or four fifths where clients
    differ, and w_l of 1/r^l scaled to length 1. To run it, add --participants 10, and
    partition=shards:2 for clients that differ.
    """
    _check(setting, model, imbalance, penalty)
    usual = _rows.SETTINGS[setting]
    model = _MODELS[setting] if model == "auto" else model
    pool = _rows.load(data, split, rows, table, "loss-tuning", usual.scaling)
    imbalance = imbalance or pool.usual(100.0, own=1.0)
    if imbalance > 1 or not pool.is_own:
        kept = tail(pool.held.label, pool.classes, imbalance, split)
        total = pool.total * len(kept) / len(pool.held.label)
        pool = replace(pool, held=_rows.take(pool.held, kept), total=total)
    thinned = f"rows are left out until the first class is {imbalance:g} times the last"
    parts = _parts.partition_rows(
        pool,
        clients,
        partition,
        train or usual.train_share(partition),
        usual_clients=usual.clients,
        remarks=[thinned] if imbalance > 1 else [],
    )
    if setting == "fednest":
        rank = np.arange(pool.classes) / max(pool.classes - 1, 1)
        weights = imbalance**rank / np.linalg.norm(imbalance**rank)
    else:
        label = np.concatenate([one["label"] for one in parts.upper])
        sizes = np.bincount(label, minlength=pool.classes)
        weights = len(label) / np.count_nonzero(sizes) / np.maximum(sizes, 1)
    shape, scores = pool.held.features.shape[1:], NetworkScores(pool.pixels)
    losses = _Losses(scores, penalty)
    return Task(
        Problem(losses.upper, losses.lower),
        ClientData.from_clients(
            [{**one, "weight": weights[one["label"]]} for one in parts.upper],
            parts.lower,
        ),
        {name: _tree.filled(pool.classes) for name in ("scales", "shifts")},
        build(model, shape, pool.classes, width or usual.width, jr.key(split)),
        _TestMetrics.of(pool.test, scores),
        headline="balanced_error",
        recommended=_STEPS[model] | _RECOMMENDED[setting],
        convex=model == "linear",
        algorithm=_ALGORITHMS[setting],
        **parts.about(network_layers),
    )
