"""The hypergradient of one machine: a function of arrays, without clients or a run."""

import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel._types import Key, Lower, Rows, Upper
from fedbilevel.hypergradient._base import AbstractHypergradient
from fedbilevel.hypergradient.conjugate_gradient import ConjugateGradient
from fedbilevel.problem import Batch, ClientData, Oracle, Problem, split_start

_TOLERANCE, _MOST = 1e-6, 1000  # of the solve by default, and its steps


class _AllRows(Oracle):
    """The oracle of one client whose samples are all of its rows, none of them padding.

    So a loss sees the batch as it was given, and not row by row.
    """

    def all_upper(self) -> Batch:
        """Return all upper rows."""
        return Batch(jax.tree.map(lambda leaf: leaf[0], self.data.upper))

    def all_lower(self) -> Batch:
        """Return all lower rows."""
        return Batch(jax.tree.map(lambda leaf: leaf[0], self.data.lower))


def hypergradient(
    problem: Problem,
    x: Upper,
    y: Lower,
    upper_rows: Rows,
    lower_rows: Rows,
    estimator: AbstractHypergradient | None = None,
    *,
    key: Key | None = None,
) -> Upper:
    """Return fx - (d2g/dxdy) [d2g/dydy]^-1 fy at (x, y) over all of the rows.

    At the lower solution, y = y*(x), it is the gradient of f(x, y*(x)). Rows are
    pytrees of arrays with one row per sample. The `estimator` says what stands for the
    inverse, by default conjugate gradient to a relative residual of 1e-6; `key` is for
    those that draw something. It is a pure function, for `jax.jit`, `jax.vmap` and
    `jax.grad`; of an Equinox module the arrays count, as with `equinox.filter_jit`.
    """
    problem, (x, y) = split_start(problem, (x, y))
    x, y = jax.tree.map(jnp.asarray, (x, y))
    if estimator is None:
        size = sum(leaf.size for leaf in jax.tree.leaves(y))
        estimator = ConjugateGradient(min(size, _MOST), tolerance=_TOLERANCE)
    upper, lower = (
        jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], rows)
        for rows in (upper_rows, lower_rows)
    )
    counts = [jnp.asarray(jax.tree.leaves(one)[0].shape[1:2]) for one in (upper, lower)]
    data = ClientData(upper, lower, counts[0], counts[1], jnp.ones(1))
    oracle = _AllRows(problem, data, 0, None, None)
    bundle = estimator.draw(oracle, jr.key(0) if key is None else key)
    return estimator(oracle, x, y, bundle)
