r"""Measures, along a run, the numbers that the theory takes as given.

    mu     smallest eigenvalue of d2 g_k / dy dy
    L1     largest norm of the full Hessians of f_k and g_k in (x, y)
    L0     largest ||grad f_k(x, y; xi)||
    L21    largest D3 g_k [d, v, u] over unit vectors d in (x, y), v in y, u in x
    L22    the same with u in y
    sigma  the larger of the two noises, since G^2 takes it as a bound of both

    noise_gradient           sqrt mean ||grad g_k(x, y; zeta) - grad g_k(x, y)||^2
    noise_hessian            the same of the Hessian's columns in y, in spectral norm
    heterogeneity_gradient   sqrt mean_k ||gy_k - gybar||^2
    heterogeneity_hessian    max_k ||H_k - Hbar||  with  H = d2 g / dy dy

They hold at the given points: elsewhere mu can be smaller and the others larger. Where
a Hessian jumps no third derivative shows it, so L21 and L22 also take the differences
between consecutive points into account.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Pair, Upper
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.theory._probes import STEPS, at_point, between, draw_directions

_NOISES = ("noise_gradient", "noise_hessian")


@dataclass(frozen=True)
class Estimate:
    """A measured constant and how it was measured.

    `low` and `high` are the range over clients, points and samples.
    """

    value: float
    low: float
    high: float
    how: str


def estimate_inputs(
    problem: Problem,
    data: ClientData,
    points: Sequence[tuple[Upper, Lower]],
    *,
    upper_batch: int | None = 1,
    lower_batch: int | None = 1,
    key: Key,
    samples: int = 8,
) -> dict[str, Estimate]:
    """Measure mu, L1, L0, L21, L22, sigma and the heterogeneity at points (x, y).

    `samples` batches are drawn per client and point. mu, L1, L21 and L22 are those of
    each client's losses over all its rows. The theory assumes them of every sample. The
    ranges show those of single batches.
    """
    places = _check_points(points)
    sizes: dict[str, Any] = {"upper_batch": upper_batch, "lower_batch": lower_batch}
    sizes["samples"] = samples
    for name, count in sizes.items():
        if count is None and name == "samples":
            raise InvalidInputError("`samples` must be a number of draws, at least 1.")
        if count is not None and count < 1:
            raise InvalidInputError(f"`{name}` must be at least 1, got {count}.")
    for_directions, *keys = jr.split(key, 1 + len(places))
    directions = draw_directions(places[0], for_directions)
    seen = [
        at_point(problem, data, place, directions, k, **sizes)
        for place, k in zip(places, keys, strict=True)
    ]
    steps = [between(problem, data, *ends, directions) for ends in pairwise(places)]
    measured = _stack(seen)
    how = _explain(data, places, sizes, measured["all"])
    return _summarize(measured, _stack(steps), how)


def _stack(trees: Sequence[PyTree]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees) if trees else {}


def _explain(
    data: ClientData, places: list[Pair], sizes: dict[str, Any], residuals: Any
) -> dict[str, str]:
    """Say of every estimate how it was measured."""
    dx, dy = (
        sum(leaf.size for leaf in jax.tree.leaves(block))
        for block in (places[0].x, places[0].y)
    )
    where = f"over {data.clients} client(s) and {len(places)} point(s)"

    def drawn(level: str) -> str:
        batch = sizes[f"{level}_batch"]
        what = "all rows" if batch is None else f"{batch} drawn {level} row(s)"
        return f"{sizes['samples']} batch(es) of {what}"

    def solver(name: str, size: int) -> str:
        if size < STEPS:
            return f"all rows, exact in dimension {size}"
        residual = np.max(residuals[f"{name} residual"])
        return (
            f"all rows, from inside the spectrum by {STEPS} Lanczos steps in dimension "
            f"{size}, residual {residual:.1e}"
        )

    upper, lower, rows = drawn("upper"), drawn("lower"), f"{where}, all rows"
    steps = f"{where} and the steps between, all rows, from below"
    yy = "the yy-Hessian of g"
    return {
        "mu": f"smallest eigenvalue of {yy} {where}, {solver('mu', dy)}; range also "
        f"over {lower}",
        "L1": f"largest norm of the Hessians of f and g in (x, y) {where}, "
        f"{solver('L1', dx + dy)}; range also over {upper} and {lower}",
        "L0": f"largest norm of the gradient of f {rows} and {upper}",
        "L21": f"largest change per distance of the cross Hessian of g {steps}; range "
        f"also over {lower}",
        "L22": f"largest change per distance of {yy} {steps}; range also over {lower}",
        "sigma": "the larger one of noise_gradient and noise_hessian",
        "noise_gradient": "largest root mean square noise of grad g in (x, y) "
        f"{where}, {lower}",
        "noise_hessian": "largest root mean square norm of the noise of the cross "
        f"and yy-Hessian of g {where}, {lower}, from below",
        "heterogeneity_gradient": "largest root mean square distance of the clients' "
        f"gy from their mean {rows}",
        "heterogeneity_hessian": f"largest norm of {yy} of a client less the mean "
        f"{rows}, from below",
    }


def _summarize(seen: Any, steps: Any, how: dict[str, str]) -> dict[str, Estimate]:
    whole, drawn = seen["all"], seen["drawn"]

    def over(name: str, choose: Any, of: list[Any], also: list[Any]) -> Estimate:
        value = choose([choose(part) for part in of])
        pool = np.concatenate([np.ravel(part) for part in of + also])
        return Estimate(float(value), float(pool.min()), float(pool.max()), how[name])

    found = {"mu": over("mu", np.min, [whole["mu"]], [drawn["mu"]])}
    for name in ("L1", "L21", "L22"):
        between_points = [steps[name]] if name in steps else []
        all_rows = [whole[name], *between_points]
        found[name] = over(name, np.max, all_rows, [drawn[name]])
    found["L0"] = over("L0", np.max, [whole["L0"], drawn["L0"]], [])
    found["sigma"] = over("sigma", np.max, [seen[name] for name in _NOISES], [])
    for name in (*_NOISES, "heterogeneity_gradient", "heterogeneity_hessian"):
        found[name] = over(name, np.max, [seen[name]], [])
    for name, one in found.items():
        if not np.isfinite((one.value, one.low, one.high)).all():
            raise InvalidInputError(
                f"the estimate of {name} is {one.value}, in [{one.low}, {one.high}]. "
                "At these points a loss has no finite derivatives up to the third: "
                "look for a square root, norm or logarithm at zero, or an overflow, or "
                "give other points."
            )
    return found


def _check_points(points: Sequence[tuple[Upper, Lower]]) -> list[Pair]:
    places = [
        jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), Pair(x, y))
        for x, y in points
    ]
    if not places:
        raise InvalidInputError(
            "`points` is empty: give at least one pair (x, y), such as the start."
        )
    for i, place in enumerate(places):
        leaves = jax.tree.leaves(place)
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
            raise InvalidInputError(
                f"point {i} must be a pair of pytrees of floating-point arrays, got "
                f"{_signature(place)}."
            )
        if _signature(place) != _signature(places[0]):
            raise InvalidInputError(
                f"point {i} is {_signature(place)}, but point 0 is "
                f"{_signature(places[0])}. All points of one problem must agree."
            )
        if not _tree.all_finite(place):
            raise InvalidInputError(
                f"point {i} holds NaN or infinity. Give points from before a run "
                "diverges. Smaller step sizes are the usual cure for it."
            )
    return places


def _signature(place: Pair) -> dict[str, str]:
    kinds = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(place)]
    return dict(zip(_tree.leaf_names(place), kinds, strict=True))
