r"""Per-feature l2 strengths exp(x_j) of softmax regression, tuned on validation data.

    g_k(x, W) = mean of CE(W a_i, l_i) over training + 0.5 sum_j exp(x_j) ||W_:j||^2
    f_k(x, W) = mean of CE(W a_i, l_i) over validation

W has one row per class and one column per feature, a constant feature included. x is
kept in [-9, 0] where it is used, so the lower level is exp(-9)-strongly convex wherever
x goes; a strength at the border feels no more pull outwards.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedbilevel._types import Rows
from fedbilevel.errors import FedbilevelError, unknown_name
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks._base import Task

__all__ = ["PROBLEM", "make"]

_LOWEST, _HIGHEST, _START = -9.0, 0.0, -5.0
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


def _cross_entropy(W: Array, rows: Rows) -> Array:
    # W @ a with features contiguous in both: XLA's fastest product on the CPU.
    logits = rows["features"] @ W.T
    chosen = jnp.take_along_axis(logits, rows["label"][:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def _upper(x: Array, y: Array, rows: Rows) -> Array:
    del x
    return _cross_entropy(y, rows)


def _lower(x: Array, y: Array, rows: Rows) -> Array:
    strength = jnp.exp(jnp.clip(x, _LOWEST, _HIGHEST))
    return _cross_entropy(y, rows) + 0.5 * jnp.sum(strength * y**2)


PROBLEM = Problem(_upper, _lower)


class _TestMetrics(eqx.Module):
    features: Float[Array, "rows features"]
    label: Int[Array, " rows"]

    def __call__(self, x: Array, y: Array) -> dict[str, Array]:
        rows = {"features": self.features, "label": self.label}
        guess = jnp.argmax(self.features @ y.T, axis=1).astype(self.label.dtype)
        return {
            "test_loss": _cross_entropy(y, rows),
            "test_accuracy": jnp.mean((guess == self.label).astype(y.dtype)),
        }


def _table(dataset: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn import datasets
    except ImportError:
        raise FedbilevelError(
            "the task regularization takes its data from scikit-learn: install "
            "fedbilevel[data]."
        ) from None
    loaders = {
        "digits": datasets.load_digits,
        "breast_cancer": datasets.load_breast_cancer,
    }
    if dataset not in loaders:
        raise unknown_name("dataset", dataset, loaders)
    features, label = loaders[dataset](return_X_y=True)
    # Constant pixels have no spread to divide by; they stay zero.
    spread = features.std(axis=0)
    features = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1)
    features = features / np.sqrt(features.shape[1])
    return np.hstack([features, np.ones((len(features), 1))]), label.astype(np.int32)


def make(
    clients: int = 8, *, dataset: str = "digits", train: float = 0.2, split: int = 0
) -> Task:
    """Build the task; a fifth is for testing, `train` of all rows for training.

    The other rows validate. `split` seeds who gets which rows.
    """
    features, label = _table(dataset)
    order = np.random.default_rng(split).permutation(len(label))
    tested, trained = int(0.2 * len(label)), int(train * len(label))
    test, rest = order[:tested], order[tested:]

    def shares(rows: np.ndarray) -> list[Rows]:
        parts = np.array_split(rows, clients)
        return [{"features": features[part], "label": label[part]} for part in parts]

    data = ClientData.from_clients(shares(rest[trained:]), shares(rest[:trained]))
    metrics = _TestMetrics(
        jnp.asarray(features[test], dtype=float), jnp.asarray(label[test])
    )
    width = features.shape[1]
    return Task(
        PROBLEM,
        data,
        jnp.full(width, _START),
        jnp.zeros((int(label.max()) + 1, width)),
        metrics,
        headline="upper_loss",
        recommended=_RECOMMENDED,
    )
