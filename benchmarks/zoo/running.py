"""Runs a problem with the default recipe and with a grid of step sizes."""

import itertools
import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.zoo.cases import CATALOG, Case
from benchmarks.zoo.scales import judged, rough_steps

import fedbilevel as fb
from fedbilevel.errors import DivergedError

UPPER_FACTORS = np.logspace(-1.5, 3, 7)
LOWER_FACTORS = np.logspace(-2, 0.8, 6)
CURVE = 50  # points of a curve at most


def default_recipe(local_steps: int, wrap: Any) -> Any:
    """Return the algorithm that README.md gives a user who has none in mind."""
    return wrap(fb.FedBiOControls(local_steps=local_steps))


def measured_together(
    name: str, partitions: Sequence[str], **named: Any
) -> list[dict[str, Any]]:
    """Measure a problem on several partitions, one after the other."""
    return [measured(name, partition, **named) for partition in partitions]


def measured(
    name: str, partition: str, seeds: int, with_grid: bool, rounds: int | None
) -> dict[str, Any]:
    """Return all that is known of a problem on a partition, ready for JSON."""
    began = time.perf_counter()
    runs = [one_run(name, partition, seed, rounds) for seed in range(seeds)]
    grid = None
    if with_grid:
        grid = grid_search(CATALOG[name](0, partition), rounds)
    seconds = round(time.perf_counter() - began, 1)
    told = {"problem": name, "partition": partition, "runs": runs, "grid": grid}
    return {**told, "verdicts": verdicts(runs, grid), "seconds": seconds}


def one_run(name: str, partition: str, seed: int, rounds: int | None) -> dict[str, Any]:
    """Run the default recipe, and return the upper loss of what the user gets."""
    case = CATALOG[name](seed, partition)
    told: dict[str, Any] = {"seed": seed}
    told["start"] = judged(case, *case.start)
    count = rounds or case.rounds
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            result = fb.run(
                case.problem,
                case.data,
                case.start,
                default_recipe(case.local_steps, case.wrap),
                rounds=count,
                seed=seed,
                sampling=case.sampling,
                measure_every=max(count // CURVE, 1),
            )
        except Exception as error:  # whatever a user would see is what is recorded
            told["error"] = f"{type(error).__name__}: {error}"
        else:
            told |= _ending(case, result)
    told["messages"] = sorted({str(one.message) for one in heard})
    return told


def _ending(case: Case, result: fb.Result) -> dict[str, Any]:
    curve = result.columns["upper_loss"]
    return {
        "final": judged(case, result.x, result.y),
        "best": float(np.nanmin(curve)),
        "events": result.events,
        "rounds": result.columns["round"].tolist(),
        "curve": curve.tolist(),
    }


def _plain(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None  # JSON has no NaN


def grid_search(case: Case, rounds: int | None) -> dict[str, Any]:
    """Return the best of a grid of plain step sizes, from the seed 0."""
    upper, lower = rough_steps(case)
    pairs = list(itertools.product(upper * UPPER_FACTORS, lower * LOWER_FACTORS))
    methods = [
        case.wrap(fb.FedBiOControls(x, y, y, local_steps=case.local_steps))
        for x, y in pairs
    ]
    count = rounds or case.rounds
    try:
        found = fb.sweep(
            case.problem,
            case.data,
            case.start,
            methods,
            rounds=count,
            seeds=[0] * len(methods),
            sampling=case.sampling,
            measure_every=count,
        )
    except DivergedError:  # every one of them
        return {"best": None}
    ends = [
        judged(case, one.x, one.y) if isinstance(one, fb.Result) else math.inf
        for one in found
    ]
    ends = [end if math.isfinite(end) else math.inf for end in ends]
    place = int(np.argmin(ends))
    return {
        "best": _plain(ends[place]),
        "lr_x": float(pairs[place][0]),
        "lr_y": float(pairs[place][1]),
        "at_edge": [
            place // len(LOWER_FACTORS) in (0, len(UPPER_FACTORS) - 1),
            place % len(LOWER_FACTORS) in (0, len(LOWER_FACTORS) - 1),
        ],
        "finals": [_plain(end) for end in ends],
    }


def verdicts(runs: list[dict], grid: dict | None) -> dict[str, Any]:
    """Judge the runs.

    `worse` counts runs that ended above their start by more than 1 % of it, or not
    finite, without an error. `within` compares the run of seed 0 with the grid, which
    has the same rows and samples: the loss is at most 1.1 times the grid's, plus a
    thousandth of the grid's descent. Where the grid's loss is negative or below a
    hundredth of the start, a ratio says little, and the run must have nine tenths of
    the grid's descent.
    """
    ended = [run for run in runs if "error" not in run]
    told = {"worse": sum(_is_worse(run) for run in ended)}
    told["errors"] = len(runs) - len(ended)
    told["events"] = sum(len(run["events"]) for run in ended)
    if grid is None or grid["best"] is None:
        return {**told, "within": None, "descent_share": None}
    first, best = runs[0], grid["best"]
    start, final = first["start"], first.get("final", math.inf)
    descent = start - best
    share = (start - final) / descent if descent else None
    by_ratio = final <= 1.1 * best + 1e-3 * abs(descent)
    by_descent = final <= best + 0.1 * abs(descent)
    told["within"] = bool(by_ratio if best > 0.01 * abs(start) else by_descent)
    return {**told, "descent_share": share if share is None else _plain(share)}


def _is_worse(run: dict) -> bool:
    final, start = run["final"], run["start"]
    return not math.isfinite(final) or final > start + 0.01 * abs(start)
