r"""Hidden layers x that serve everyone, under a linear head y.

    g_k(x, y) = mean of CE(y h(a_i; x), l_i) over client k's training rows
                + penalty ||y||^2
    f_k(x, y) = mean of CE(y h(a_i; x), l_i) over client k's validation rows

h are the features that the hidden layers make of a row. The lower level is strongly
convex in y. With `dropout` each feature of a drawn row is left out with that chance,
and the others are divided by what remains; which ones is part of the sample, so both
points of a correction meet the same. Nothing is left out where all rows are taken.
"""

import math
from typing import Annotated

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Rows, Scalar
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Pixels
from fedbilevel.problem import ClientData, Problem, coin_mask
from fedbilevel.tasks import _labeled, _parts, _rows
from fedbilevel.tasks._base import MEASURED, Task, settings
from fedbilevel.tasks._labeled import HeldOut, as_numbers, cross_entropy
from fedbilevel.tasks._networks import Hidden, apply, build, layers_of

_MODELS = ("mlp", "convolutional")
_PENALTIES = {
    "default": {"mlp": 0.005, "convolutional": 0.0001},
    "fednest": {"mlp": 0.05, "convolutional": 0.05},
}
_ALGORITHMS = {
    # One Hessian product a step, not q: with convolutions they are what it costs.
    "default": {"mlp": "fedbio-controls", "convolutional": "fedbio"},
    "fednest": {"mlp": "fednest", "convolutional": "fednest"},
}
_WEIGHTS = settings("upper_weight=0.1 lower_weight=0.1")
_RECOMMENDED = {
    "default": _WEIGHTS | settings("rounds=200 local_steps=5 batch=32 q=5"),
    "fednest": _WEIGHTS
    | settings("rounds=500 local_steps=5 batch=64 inner_rounds=1 q=5 theta=0.01")
    | settings("upper_step=0.01 lower_step=0.01"),
}


def _steps(model: str, inputs: int, features: int) -> dict[str, str]:
    """Return steps for a network; the curvature grows with what a layer sums up."""
    if model == "convolutional":  # it divides by that itself
        return settings("upper_step=0.05 lower_step=2 theta=0.2")
    return MEASURED | {
        "upper_step": f"{min(10 / inputs, 0.5):.2g}",  # or few inputs kill the units
        "lower_step": f"{10 / features:.2g}",
        "theta": f"{3 / features:.2g}",
    }


class _Losses(eqx.Module):
    """Both levels, and the draw of the features of each row that are kept."""

    pixels: Pixels | None
    penalty: float
    dropout: float
    width: int

    def scores(self, x: Hidden, y: eqx.nn.Linear, features: Array) -> Array:
        """Return a score for every class, of all features that hidden layers make."""
        return apply(y, x(as_numbers(features, self.pixels)))

    def upper(self, x: Hidden, y: eqx.nn.Linear, rows: Rows) -> Scalar:
        """Return the mean loss of rows, by the features that are kept."""
        hidden = x(as_numbers(rows["features"], self.pixels))
        if "kept" in rows:
            hidden = jnp.where(rows["kept"], hidden / (1 - self.dropout), 0)
        return cross_entropy(apply(y, hidden), rows["label"])

    def lower(self, x: Hidden, y: eqx.nn.Linear, rows: Rows) -> Scalar:
        """Return the same with the penalty."""
        return self.upper(x, y, rows) + self.penalty * _tree.dot(y, y)

    def noise(self, key: Key, rows: Rows) -> Rows:
        """Draw which features of each row are kept."""
        shape, keep = (len(rows["label"]), self.width), 1 - self.dropout
        if (2**8 * keep).is_integer():
            return {**rows, "kept": coin_mask(key, shape, keep)}
        return {**rows, "kept": jr.bernoulli(key, keep, shape)}


def make(
    clients: int = 0,
    *,
    setting: _rows.SettingName = "default",
    model: Annotated[str, "the hidden layers: mlp, or convolutional for images"] = (
        "mlp"
    ),
    width: Annotated[int, "units of the hidden layer of an mlp; 0: the setting's"] = 0,
    dropout: Annotated[float, "chance that a feature of a drawn row is left out"] = 0.0,
    penalty: Annotated[float, "l2 strength of the head; 0: the setting's"] = 0.0,
    data: _rows.Source = "digits",
    partition: _rows.PartitionText = "iid",
    train: _rows.TrainShare = 0.0,
    split: _rows.SplitSeed = 0,
    rows: _rows.RowLimit = 0,
    **table: _rows.TableOptions,
) -> Task:
    """Build the task; a 0 leaves clients, width, penalty and train to the `setting`.

    An mlp has one hidden layer of `width` units, a convolutional network two layers of
    3x3 windows. Tested is an official test part, or else a fifth. `split` seeds the
    first layers, too.

    setting=fednest is that of FedNest (arXiv 2205.02215) for MNIST, with squared norms
    in the penalty: a hidden layer of 200 units, 100 clients, half of the rows for
    training, or four fifths where clients differ. To run it, add --participants 10,
    dropout=0.5, and partition=shards:2 for clients that differ.
    """
    _labeled.check_choice("model", model, _MODELS)
    _labeled.check_choice("setting", setting, tuple(_rows.SETTINGS))
    _labeled.check_not_negative(penalty=penalty)
    if not 0 <= dropout < 1:
        raise InvalidInputError(f"dropout={dropout}: give a chance from 0 to below 1.")
    usual = _rows.SETTINGS[setting]
    pool = _rows.load(data, split, rows, table, "representation", usual.scaling)
    share = train or usual.train_share(partition)
    parts = _parts.partition_rows(
        pool, clients, partition, share, usual_clients=usual.clients
    )
    shape = pool.held.features.shape[1:]
    network = build(model, shape, pool.classes, width or usual.width, jr.key(split))
    features = network.head.weight.shape[1]
    penalty = penalty or _PENALTIES[setting][model]
    losses = _Losses(pool.pixels, penalty, dropout, features)
    noise = losses.noise if dropout else None
    return Task(
        Problem(losses.upper, losses.lower, noise, noise),
        ClientData.from_clients(parts.upper, parts.lower),
        network.hidden,
        network.head,
        HeldOut.of(pool.test, losses.scores),
        headline="test_error",
        recommended=_steps(model, math.prod(shape), features) | _RECOMMENDED[setting],
        algorithm=_ALGORITHMS[setting][model],
        **parts.about(layers_of),
    )
