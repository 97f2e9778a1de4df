r"""T1: one quadratic for all clients, noisy oracles, every answer in closed form.

    g_k(x, y) = 0.5 y'A_k y + x'C_k y + a_k'y
    f_k(x, y) = 0.5 ||y - b_k||^2 + (r/2) ||x||^2

With bars for weighted means over clients:

    y*(x)       = -Abar^-1 (Cbar'x + abar)
    grad Phi(x) = r x - Cbar Abar^-1 (y*(x) - bbar)
    x*  solves  (r I + Cbar Abar^-2 Cbar') x = -Cbar Abar^-1 (Abar^-1 abar + bbar)

The founding paper's criterion is ||grad Phi||^2 + Ltil^2 ||y - y*(x)||^2, with

    Ltil = L1 + L1^2/mu,   L1 = max(||d2 f||, ||d2 g||),   mu = lambda_min(Abar)

of the averaged problem, since second derivatives of quadratics do not change.

A sample perturbs a, b and the slope of f in x by N(0, s^2), A (symmetrically) and C by
N(0, (s/10)^2). The mean over samples is the problem itself, so closed forms stay exact.

dx = 5, dy = 6, A with the spectrum linspace(0.5, 2) in a random basis, C = 0.3 N(0, 1),
a and b standard normal, r = 0.5.

`spread` makes clients differ: A_k = A + 0.4 spread D_k with ||D_k|| <= 1, C_k, a_k and
b_k likewise by 0.3, 1 and 1 times a normal, all with mean zero over clients, so that
the averaged problem and its solution are those of spread 0 for every K.
"""

from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import Key, Rows
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks._base import MEASURED, Task, settings

_RECOMMENDED = MEASURED | {
    "auto:fedbio-controls": "lower_step=1/L auxiliary_step=1/L",
    **settings("rounds=200 local_steps=10 batch=1 q=20 theta=0.4 upper_step=0.05"),
    **settings("lower_step=0.05 upper_weight=0.1 lower_weight=0.1"),
}
# Steps small enough for the exponents of the corollaries to show from K = 1 to 16.
_SMALL = settings("clients=1 iterations=4000 local_steps=7 q=10 rho1=1 rho2=2")
_MOMENTUM = _SMALL | settings("eta=0.014 alpha=8 beta=8")
_STORM = _SMALL | settings("eta=0.02 alpha=2 beta=2 first_batch=64")
_CALIBRATION = {
    "local-bsgm": _MOMENTUM,
    "fednest": _MOMENTUM,
    "local-bsgvrm": _STORM,
    "fedbioacc": _STORM,
}


def _upper(x: Array, y: Array, rows: Rows) -> Array:
    distance = 0.5 * jnp.mean(jnp.sum((y - rows["b"]) ** 2, axis=-1))
    tilt = jnp.mean(rows["c"], axis=0) @ x
    return distance + 0.5 * jnp.mean(rows["r"]) * jnp.sum(x**2) + tilt


def _lower(x: Array, y: Array, rows: Rows) -> Array:
    # Linear in the coefficients, so their mean over the rows is the mean of the loss.
    A, C, a = (jnp.mean(rows[name], axis=0) for name in ("A", "C", "a"))
    return 0.5 * y @ A @ y + x @ C @ y + a @ y


def _normal(key: Key, like: Array, scale: Array) -> Array:
    shape = (-1,) + (1,) * (like.ndim - 1)
    return scale.reshape(shape) * jr.normal(key, like.shape, like.dtype)


def _upper_noise(key: Key, rows: Rows) -> Rows:
    for_b, for_c = jr.split(key)
    s = rows["s"]
    b = rows["b"] + _normal(for_b, rows["b"], s)
    c = rows["c"] + _normal(for_c, rows["c"], s)
    return {**rows, "b": b, "c": c}


def _lower_noise(key: Key, rows: Rows) -> Rows:
    hessian, cross, slope = jr.split(key, 3)
    s = rows["s"]
    half = _normal(hessian, rows["A"], 0.1 * s)
    # (N + N') / sqrt(2) is symmetric and keeps the variance off the diagonal.
    symmetric = (half + jnp.swapaxes(half, -1, -2)) / np.sqrt(2).astype(half.dtype)
    return {
        **rows,
        "A": rows["A"] + symmetric,
        "C": rows["C"] + _normal(cross, rows["C"], 0.1 * s),
        "a": rows["a"] + _normal(slope, rows["a"], s),
    }


PROBLEM = Problem(_upper, _lower, _upper_noise, _lower_noise)


def client_rows(
    A: np.ndarray, C: np.ndarray, a: np.ndarray, b: np.ndarray, r: float, noise: float
) -> tuple[Rows, Rows]:
    """Return one client's upper and lower rows: a single one, perturbed when drawn."""
    upper = {"b": b, "c": np.zeros(C.shape[0]), "r": np.asarray(r)}
    lower = {"A": A, "C": C, "a": a}
    s = np.asarray(float(noise))

    def as_rows(row: dict[str, np.ndarray]) -> Rows:
        return {name: value[None] for name, value in (row | {"s": s}).items()}

    return as_rows(upper), as_rows(lower)


@jax.jit
def _means(data: ClientData) -> tuple[Array, ...]:
    """Return A, C, a, b and r of the averaged problem."""
    share = data.weights / jnp.sum(data.weights)

    def mean(leaf: Array, sizes: Array) -> Array:
        real = jnp.arange(leaf.shape[1], dtype=sizes.dtype) < sizes[:, None]
        each = jnp.where(real, (share / sizes.astype(share.dtype))[:, None], 0)
        return jnp.tensordot(each, leaf, 2)

    below = [mean(data.lower[name], data.lower_sizes) for name in ("A", "C", "a")]
    return *below, *(mean(data.upper[name], data.upper_sizes) for name in ("b", "r"))


class ClosedForm(eqx.Module):
    """The exact answers of the averaged problem, as metrics."""

    A: Float[Array, "dy dy"]
    C: Float[Array, "dx dy"]
    a: Float[Array, " dy"]
    b: Float[Array, " dy"]
    r: Float[Array, ""]
    l_tilde: Float[Array, ""]

    @staticmethod
    def of(data: ClientData) -> "ClosedForm":
        """Average the coefficients over each client's rows, then over clients."""
        A, C, a, b, r = _means(data)
        hessian, cross = np.asarray(A), np.asarray(C)
        corner = np.zeros((cross.shape[0], cross.shape[0]))
        lower = np.linalg.norm(np.block([[corner, cross], [cross.T, hessian]]), 2)
        l1 = max(float(lower), 1.0, float(r))
        mu = float(np.linalg.eigvalsh(hessian)[0])
        return ClosedForm(A, C, a, b, r, jnp.asarray(l1 + l1**2 / mu, A.dtype))

    of_data = of  # by this name, answers of another average are asked for

    def lower_solution(self, x: Array) -> Array:
        """Return y*(x)."""
        return -jnp.linalg.solve(self.A, self.C.T @ x + self.a)

    def gradient(self, x: Array) -> Array:
        """Return grad Phi(x)."""
        z = jnp.linalg.solve(self.A, self.lower_solution(x) - self.b)
        return self.r * x - self.C @ z

    def solution(self) -> Array:
        """Return x*."""
        inverse = jnp.linalg.inv(self.A)
        identity = jnp.eye(self.C.shape[0], dtype=self.C.dtype)
        matrix = self.r * identity + self.C @ inverse @ inverse @ self.C.T
        return jnp.linalg.solve(matrix, -self.C @ inverse @ (inverse @ self.a + self.b))

    def __call__(self, x: Array, y: Array) -> dict[str, Array]:
        """Return ||grad Phi(x)||^2, ||y - y*(x)||, and the paper's criterion."""
        slope = jnp.sum(self.gradient(x) ** 2)
        error = jnp.linalg.norm(y - self.lower_solution(x))
        criterion = slope + (self.l_tilde * error) ** 2
        return {"grad_norm_sq": slope, "lower_error": error, "criterion": criterion}


def make(
    clients: int = 8,
    *,
    noise: Annotated[float, "s, the deviation of the noise in a sample"] = 0.5,
    instance: Annotated[int, "random seed of the coefficients"] = 0,
    spread: Annotated[float, "how much clients differ, from 0, alike, to 1"] = 0.0,
) -> Task:
    """Build the task."""
    if not 0 <= spread <= 1:
        raise InvalidInputError(
            f"spread={spread}: between 0, clients alike, and 1. Beyond, a client's "
            "lower level would not be strongly convex."
        )
    draw = np.random.default_rng(instance)
    dx, dy, r = 5, 6, 0.5
    basis, _ = np.linalg.qr(draw.standard_normal((dy, dy)))
    A = basis @ np.diag(np.linspace(0.5, 2, dy)) @ basis.T
    C = 0.3 * draw.standard_normal((dx, dy))
    a, b = draw.standard_normal(dy), draw.standard_normal(dy)
    apart = (spread * part for part in _deviations(draw, clients, dx, dy))
    rows = [
        client_rows(A + A_k, C + C_k, a + a_k, b + b_k, r, noise)
        for A_k, C_k, a_k, b_k in zip(*apart, strict=True)
    ]
    data = ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])
    return Task(
        PROBLEM,
        data,
        _tree.filled(dx),
        _tree.filled(dy),
        ClosedForm.of(data),
        headline="grad_norm_sq",
        tuned_by="grad_norm_sq",
        recommended=_RECOMMENDED,
        shows_point=True,
        calibration=_CALIBRATION,
    )


def _deviations(draw: np.random.Generator, clients: int, dx: int, dy: int):
    """Return what is added to A, C, a and b of every client at spread 1."""
    shapes = ((dy, dy), (dx, dy), (dy,), (dy,))
    D, C, a, b = (draw.standard_normal((clients, *shape)) for shape in shapes)
    D = D + np.swapaxes(D, 1, 2)
    D, C, a, b = (leaf - leaf.mean(axis=0) for leaf in (D, C, a, b))
    # One client has no deviation to scale.
    largest = max(np.linalg.norm(D, 2, axis=(1, 2)).max(), np.finfo(float).tiny)
    return 0.4 * D / largest, 0.3 * C, a, b
