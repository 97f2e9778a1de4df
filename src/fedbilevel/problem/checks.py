"""Looks at a problem before anything runs, so that mistakes are named at the start."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Lower, Rows, Upper
from fedbilevel.errors import ClientInputError, InvalidInputError, coarse_cure
from fedbilevel.problem.data import Data
from fedbilevel.problem.every_client import map_clients, weight_of_client
from fedbilevel.problem.losses import Problem
from fedbilevel.problem.oracle import Oracle
from fedbilevel.problem.running_once import runs_once
from fedbilevel.problem.stored_rows import fetched


def check_problem(problem: Problem, data: Data, x: Upper, y: Lower) -> None:
    """Raise `InvalidInputError` for losses or a start that no algorithm could use."""
    _check_start(x, "x")
    _check_start(y, "y")
    axes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(y)}
    if problem.separate and (len(axes) != 1 or () in axes):
        raise InvalidInputError(
            "`Problem(separate=True)`: the lower level is a sum over the first axis of "
            "y, so all of its leaves need a first axis of one length."
        )
    for name in ("upper", "lower"):
        score = partial(problem.scored, getattr(problem, name))
        _check_scalar(name, score, x, y, getattr(data, name))
    probes = jax.tree.map(np.asarray, _probe(problem, data, x, y))
    for name, probe in probes.items():
        both, mean = float(probe["both"]), float(np.mean(probe["singles"]))
        if np.isfinite(both) and not np.isclose(both, mean, rtol=1e-3, atol=1e-5):
            raise InvalidInputError(
                f"`{name}(x, y, batch)` is {both:.6g} on two rows, but the mean of the "
                f"two rows is {mean:.6g}. A loss must average over the rows of its "
                "batch (`jnp.mean`, not `jnp.sum`), else step sizes depend on the "
                "batch size."
            )
        if (probe["elsewhere"] == probe["singles"][0]).all():
            raise InvalidInputError(
                f"`{name}(x, y, batch)` does not depend on y. A bilevel problem needs "
                "both losses to see the lower variable. For one level, optimize it "
                "directly."
            )
        _check_finite(name, probe["clients"], problem.coarse_type)


# Of y: none for two rows, then others for the first. NaN passes through most
# computations that use y, whatever its value at the start; what compares y with
# something, a hinge, shows at other values.
_SHIFTS = (0.0, 0.0, math.nan, 1.0, -1.0, 100.0, -100.0)


@runs_once
def _probe(
    problem: Problem, data: Data, x: Upper, y: Lower
) -> dict[str, dict[str, Array]]:
    """Return values of each loss at the start.

    Two rows of client 0, together and one by one; one row at other y; every client
    over all its rows.
    """

    def of_level(level: str, clients: Array) -> dict[str, Array]:
        rows, sizes = getattr(data, level), getattr(data, f"{level}_sizes")
        last = jnp.minimum(1, sizes[0] - 1)
        one, two = (
            fetched(jax.tree.map(lambda a, i=i: a[0, i][None], rows)) for i in (0, last)
        )
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), one, two)
        score = partial(problem.scored, getattr(problem, level))

        # A loop, so that the loss is compiled once for all single rows.
        def alone(case: tuple[Array, Array]) -> Array:
            second, shift = case
            row = _tree.select(second, two, one)
            there = jax.tree.map(lambda leaf: leaf + shift.astype(leaf.dtype), y)
            return score(x, there, row)

        cases = (jnp.arange(len(_SHIFTS)) == 1, jnp.asarray(_SHIFTS))
        values = jax.lax.map(alone, cases)
        return {
            "both": score(x, y, both),
            "singles": values[:2],
            "elsewhere": values[2:],
            "clients": clients,
        }

    def of_client(client: Array) -> tuple[Array, Array]:
        oracle = Oracle(problem, data, client)
        return (
            oracle.upper_loss(x, y, oracle.all_upper()),
            oracle.lower_loss(x, y, oracle.all_lower()),
        )

    everybody, weight = jnp.arange(data.clients), weight_of_client(problem, data, x, y)
    upper, lower = map_clients(of_client, everybody, weight)
    return {"upper": of_level("upper", upper), "lower": of_level("lower", lower)}


def _check_start(start: PyTree, name: str) -> None:
    leaves = jax.tree.leaves(start)
    kinds = [jnp.asarray(leaf).dtype for leaf in leaves]
    if not leaves or not all(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        raise InvalidInputError(
            f"the start {name} must be a pytree of floating-point arrays, got leaves "
            f"of type {[str(kind) for kind in kinds]}."
        )


def _check_scalar(
    name: str, score: Callable[..., Any], x: Upper, y: Lower, rows: Rows
) -> None:
    def on_first_row(x: Upper, y: Lower, rows: Rows) -> Any:
        return score(x, y, fetched(jax.tree.map(lambda leaf: leaf[0, :1], rows)))

    try:
        shape = eqx.filter_eval_shape(on_first_row, x, y, rows)
    except Exception as error:
        raise ClientInputError(
            0, f": {error}", f"`{name}(x, y, batch)` fails on a batch of one row of "
        ) from error
    if not (isinstance(shape, jax.ShapeDtypeStruct) and shape.shape == ()):
        raise InvalidInputError(
            f"`{name}(x, y, batch)` must return one number, the mean over the batch, "
            f"got {shape}. Take `jnp.mean` of the per-sample losses."
        )


def _check_finite(name: str, clients: np.ndarray, coarse_type: str) -> None:
    bad = np.flatnonzero(~np.isfinite(clients))
    if bad.size:
        value = float(clients[bad[0]])
        cure = (
            "Check this client's data, the start, and the loss for a logarithm or "
            "division that meets zero."
        )
        if coarse_type:
            cure = f"{coarse_cure(coarse_type)} or look for NaN in the model's files."
        raise ClientInputError(
            int(bad[0]),
            f": the {name} loss is {value} at the start, before the first round. "
            f"{cure}",
        )


def broken_derivative(oracle: Oracle, x: Upper, y: Lower, second: bool) -> str:
    """Say which derivative of a client is not finite at a point, and what to do.

    With `second` those of second order count, too. The text is empty if all are finite.
    """
    batches = {"upper": oracle.all_upper(), "lower": oracle.all_lower()}
    fx, fy = oracle.upper_gradients(x, y, batches["upper"])
    gx, gy = oracle.lower_gradients(x, y, batches["lower"])
    # By order, level and variable; the second ones along ones.
    found = {("", "upper", "x"): fx, ("", "upper", "y"): fy}
    found |= {("", "lower", "x"): gx, ("", "lower", "y"): gy}
    if second:
        point = (x, y, jax.tree.map(jnp.ones_like, y), batches["lower"])
        found[("second ", "lower", "y")] = oracle.hessian_product(*point)
        found[("mixed second ", "lower", "x")] = oracle.cross_product(*point)
    for (order, level, by), tree in found.items():
        leaves = zip(_tree.leaf_names(tree), jax.tree.leaves(tree), strict=True)
        for leaf, values in leaves:
            bad = np.asarray(values)[~np.isfinite(values)]
            if not bad.size:
                continue
            where = f"{by}.{leaf}" if leaf else by
            cure = _too_large(level, batches[level].rows) or (
                "A norm or a root has no derivative at 0: add a small number under "
                "it, as in `jnp.sqrt(jnp.sum(a**2) + 1e-12)`, or start elsewhere."
            )
            return (
                f"No step size is to blame: at the start the {order}derivative of the "
                f"{level} loss with respect to {where} is {bad[0]}. {cure}"
            )
    return ""


def _too_large(level: str, rows: Rows) -> str:
    """Name the column of a level's rows whose square is no number any more, if any."""
    for name, leaf in zip(_tree.leaf_names(rows), jax.tree.leaves(rows), strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        columns = np.abs(np.asarray(leaf)).reshape(len(leaf), -1).max(axis=0)
        worst = int(np.argmax(columns))
        if columns[worst] > math.sqrt(float(jnp.finfo(leaf.dtype).max)):
            return (
                f"The {level} rows hold numbers up to {columns[worst]:.2g} "
                f"('{name}', column {worst}), whose square {leaf.dtype} cannot hold: "
                "rescale this column."
            )
    return ""
