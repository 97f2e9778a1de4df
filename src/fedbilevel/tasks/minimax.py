r"""A saddle point as a bilevel problem: the lower level is the upper one's opponent.

    f_k(x, y) = y'A_k x - b_k'y - 0.5 ||y||^2 + (r/2) ||x||^2,    g_k = -f_k

so that y*(x) is the maximizer of f. With bars for weighted means over clients:

    y*(x)       = Abar x - bbar
    grad Phi(x) = Abar'y*(x) + r x = fx(x, y*(x)), because fy = 0 there
    x*          = (Abar'Abar + r I)^-1 Abar'bbar

dx = dy = 10, Abar with the singular values linspace(0.5, 1.5) in random bases, bbar
standard normal, r = 0.1. A_k differs from Abar by `spread` N(0, 1/10) and b_k from bbar
by `spread` N(0, 1), shifted so that the means are Abar and bbar. A sample perturbs b by
N(0, noise^2), on each level by itself.
"""

from typing import Annotated

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import Key, Rows
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks._base import MEASURED, Task, settings

_SIZE, _PULL, _FAR = 10, 0.1, 10.0
_RECOMMENDED = MEASURED | {
    "auto:fedbio-controls": "lower_step=1/L auxiliary_step=1/L",
    **settings("rounds=200 local_steps=10 batch=1 q=5 theta=0.8 upper_step=0.05"),
    **settings("lower_step=0.2 upper_weight=0.1 lower_weight=0.1"),
}


def _upper(x: Array, y: Array, rows: Rows) -> Array:
    # Linear in the coefficients, so their mean over the rows is the mean of the loss.
    A, b, r = (jnp.mean(rows[name], axis=0) for name in ("A", "b", "r"))
    return y @ A @ x - b @ y - 0.5 * jnp.sum(y**2) + 0.5 * r * jnp.sum(x**2)


def _lower(x: Array, y: Array, rows: Rows) -> Array:
    return -_upper(x, y, rows)


def _noise(key: Key, rows: Rows) -> Rows:
    b = rows["b"]
    shift = rows["noise"][:, None] * jr.normal(key, b.shape, b.dtype)
    return {**rows, "b": b + shift}


PROBLEM = Problem(_upper, _lower, _noise, _noise)


class SaddlePoint(eqx.Module):
    """The exact answers of the averaged problem, as metrics."""

    A: Float[Array, "dy dx"]
    b: Float[Array, " dy"]
    r: Float[Array, ""]

    def lower_solution(self, x: Array) -> Array:
        """Return y*(x)."""
        return self.A @ x - self.b

    def gradient(self, x: Array) -> Array:
        """Return grad Phi(x)."""
        return self.A.T @ self.lower_solution(x) + self.r * x

    def solution(self) -> Array:
        """Return x*."""
        identity = jnp.eye(self.A.shape[1], dtype=self.A.dtype)
        matrix = self.A.T @ self.A + self.r * identity
        return jnp.linalg.solve(matrix, self.A.T @ self.b)

    def __call__(self, x: Array, y: Array) -> dict[str, Array]:
        """Return ||grad Phi(x)||^2, ||x - x*|| and ||y - y*(x)||."""
        return {
            "grad_norm_sq": jnp.sum(self.gradient(x) ** 2),
            "upper_error": jnp.linalg.norm(x - self.solution()),
            "lower_error": jnp.linalg.norm(y - self.lower_solution(x)),
        }


def make(
    clients: int = 8,
    *,
    spread: Annotated[float, "how much clients differ; 0: they are alike"] = 0.1,
    noise: Annotated[float, "deviation of the noise in a sample"] = 0.1,
    instance: Annotated[int, "random seed of the coefficients"] = 0,
) -> Task:
    """Build the task."""
    if not (spread >= 0 and noise >= 0):
        raise InvalidInputError(
            f"spread={spread}, noise={noise}: neither may be negative."
        )
    draw = np.random.default_rng(instance)
    left, _ = np.linalg.qr(draw.standard_normal((_SIZE, _SIZE)))
    right, _ = np.linalg.qr(draw.standard_normal((_SIZE, _SIZE)))
    A = left @ np.diag(np.linspace(0.5, 1.5, _SIZE)) @ right
    b = draw.standard_normal(_SIZE)
    A_off = draw.standard_normal((clients, _SIZE, _SIZE)) / np.sqrt(_SIZE)
    b_off = draw.standard_normal((clients, _SIZE))
    constants = {"r": np.full(1, _PULL), "noise": np.full(1, float(noise))}
    rows = [
        {"A": (A + spread * A_k)[None], "b": (b + spread * b_k)[None], **constants}
        for A_k, b_k in zip(A_off - A_off.mean(0), b_off - b_off.mean(0), strict=True)
    ]
    return Task(
        PROBLEM,
        ClientData.from_clients(rows, rows),
        _tree.filled(_SIZE, _FAR),
        _tree.filled(_SIZE, _FAR),
        SaddlePoint(*(jnp.asarray(value, dtype=float) for value in (A, b, _PULL))),
        headline="grad_norm_sq",
        tuned_by="grad_norm_sq",
        recommended=_RECOMMENDED,
        shows_point=True,
    )
