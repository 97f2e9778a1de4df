"""Counts what a run costs from shapes and the traced program, without running it.

Floats and bytes come from the shapes of messages and replies. Oracle calls and
samples come from the traced local program of one client: every oracle call is a named
inner function there, loops are multiplied by their length, and a call on stacked points
counts once per point. Totals are over all participants.
"""

import math
from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedbilevel.algorithms import Phase, Turn
from fedbilevel.runtime import _keys
from fedbilevel.runtime.job import Job

__all__ = ["count"]

_GRADIENTS = {
    "_upper_gradients": "upper_gradients",
    "_lower_gradient": "lower_gradient",
    "_lower_gradient_upper": "lower_gradient_upper",
    "_hessian_product": "hessian_product",
    "_cross_product": "cross_product",
    "_unrolled_gradient": "unrolled_gradient",
}
_DRAWS = {"_draw_upper": "upper_samples", "_draw_lower": "lower_samples"}


def count(job: Job, rounds: int) -> dict[str, Any]:
    """Return rounds, exchanges, traffic, oracle calls and samples of a run."""
    algorithm, n = job.algorithm, job.participants
    before = _one_pass(job, algorithm.setup(), _keys.SETUP, 0)
    first = _one_pass(job, algorithm.phases(), _keys.ROUNDS, 0)
    later = _one_pass(job, algorithm.phases(), _keys.ROUNDS, 1)
    total: Counter[str] = Counter()
    for tally, times in ((before, 1), (first, min(rounds, 1)), (later, rounds - 1)):
        for name, value in tally.items():
            total[name] += value * max(times, 0)
    exchanges = total.pop("exchanges")
    kinds = ("floats_down", "floats_up", "bytes_down", "bytes_up")
    return {
        "rounds": rounds,
        "participants": n,
        "exchanges": exchanges,
        **{kind: total.pop(kind) * n for kind in kinds},
        "per_client_and_round": {kind: later[kind] for kind in kinds},
        "samples": {name: total.pop(name, 0) * n for name in _DRAWS.values()},
        "calls": {name: value * n for name, value in sorted(total.items())},
    }


def _one_pass(
    job: Job, phases: tuple[Phase, ...], stage: int, round_index: int
) -> Counter[str]:
    tally: Counter[str] = Counter()
    server = job.algorithm.init_server(job.x, job.y)
    client = job.algorithm.init_client(job.x, job.y)
    for index, phase in enumerate(phases):
        message = phase.down(server)
        turn = Turn(_keys.client_key(job.key, stage, index, 0), round_index)

        def local(message: PyTree, client: PyTree, phase=phase, turn=turn):
            return phase.local(message, client, job.oracle(0), turn)

        traced, shapes = jax.make_jaxpr(local, return_shape=True)(message, client)
        _walk(traced.jaxpr, 1, job, tally)
        for name, tree in (("down", message), ("up", shapes[1])):
            floats, size = _weigh(tree)
            tally[f"floats_{name}"] += floats
            tally[f"bytes_{name}"] += size
        tally["exchanges"] += 1
        server = eqx.filter_eval_shape(phase.up, server, shapes[1])
        server = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), server)
    return tally


def _weigh(tree: PyTree) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return (
        sum(leaf.size for leaf in floats),
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )


def _walk(jaxpr: Any, times: int, job: Job, tally: Counter[str]) -> None:
    for equation in jaxpr.eqns:
        name = equation.params.get("name")
        sizes = [variable.aval.size for variable in equation.outvars]
        if name in _GRADIENTS:
            tally[_GRADIENTS[name]] += times * _points(name, sizes, job)
        elif name in _DRAWS:
            rows = job.data.upper if name == "_draw_upper" else job.data.lower
            one_row = math.prod(jax.tree.leaves(rows)[0].shape[2:])
            tally[_DRAWS[name]] += times * (sizes[0] // one_row)
        else:
            inner = times * equation.params.get("length", 1)
            for body in _bodies(equation.params):
                _walk(body, inner, job, tally)


def _points(name: str, sizes: list[int], job: Job) -> int:
    """Return at how many stacked points a call is evaluated."""
    like_x = [leaf.size for leaf in jax.tree.leaves(job.x)]
    like_y = [leaf.size for leaf in jax.tree.leaves(job.y)]
    expected = {
        "_upper_gradients": like_x + like_y,
        "_lower_gradient": like_y,
        "_hessian_product": like_y,
    }.get(name, like_x)
    # Outputs that do not depend on the point stay unstacked; the others tell.
    return max(size // one for size, one in zip(sizes, expected, strict=True))


def _bodies(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                found.append(item)
            elif hasattr(item, "jaxpr"):
                found.append(item.jaxpr)
    return found
