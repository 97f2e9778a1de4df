r"""Measures how the error falls with clients and iterations, and fits the exponents.

    speed-up      the mean of the metric over a run, against K at fixed T or against T
                  at fixed K, under the corollary's schedule
    complexity    iterations and rounds until the running mean of the metric is below
                  epsilon, against K or epsilon, each run planned for its epsilon

A calibration fixes the constants once, at small K and T; everything else is the
corollary's exponents. Intervals are bootstraps over seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float

from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.result import Result
from fedbilevel.runtime import Sampling
from fedbilevel.studies.planning import (
    SettingOf,
    metric_curves,
    run_plan,
    setting_by_clients,
)
from fedbilevel.studies.setting import Setting
from fedbilevel.theory.claims import claims_of
from fedbilevel.theory.plan import Calibration, Plan, practical_plan

Watch = Callable[[str], None]
_RESAMPLES = 500
_INTERVAL = (0.025, 0.975)
_CRITERION = "criterion"
_LONGER = 1.4  # times the planned T until a target must have been reached


@dataclass(frozen=True)
class Measured:
    """A value of the mean curve over seeds, and of resampled means."""

    value: float
    resampled: Float[np.ndarray, " resamples"]

    @staticmethod
    def of(
        curves: Float[np.ndarray, "seeds rounds"], read: Callable[..., np.ndarray]
    ) -> "Measured":
        """Read a value off the mean curve; `read` maps curves to a value each."""
        draw = np.random.default_rng(0)
        seeds = len(curves)
        shares = draw.multinomial(seeds, np.full(seeds, 1 / seeds), _RESAMPLES) / seeds
        return Measured(
            float(read(curves.mean(axis=0)[None])[0]), read(shares @ curves)
        )

    def above(self, floor: float) -> "Measured":
        """Return what of it tends to zero; raise where that is not surely above 0."""
        found = Measured(self.value - floor, self.resampled - floor)
        if not found.resampled.min() > 0:
            raise InvalidInputError(
                f"the mean metric came to {self.value:.4g}, and its floor is estimated "
                f"at {floor:.4g}: the difference is too small to fit an exponent to. "
                "Give a target to count iterations to, or more seeds."
            )
        return found

    def plain(self) -> dict[str, float]:
        """Return the value with its 95 % interval."""
        low, high = np.quantile(self.resampled, _INTERVAL)
        return {"value": self.value, "low": float(low), "high": float(high)}


@dataclass(frozen=True)
class Fit:
    """value ~ axis^exponent, with a 95 % interval over seeds."""

    exponent: float
    low: float
    high: float
    claimed: float | None


def fit_exponent(
    at: Sequence[float], measured: Sequence[Measured], claimed: float | None = None
) -> Fit:
    """Fit a line to the logarithms."""
    logs = np.log(np.asarray(at, float))
    draw = np.random.default_rng(0)
    # Points are resampled independently of each other: shuffling breaks their pairing.
    resampled = [draw.permutation(one.resampled) for one in measured]
    slopes = np.polyfit(logs, np.log(resampled), 1)[0]
    low, high = np.quantile(slopes, _INTERVAL)
    exponent = np.polyfit(logs, np.log([one.value for one in measured]), 1)[0]
    return Fit(float(exponent), float(low), float(high), claimed)


def speedup(
    problem: Problem,
    data: Callable[[int], ClientData],
    start: tuple[Upper, Lower],
    algorithm: type[AbstractAlgorithm],
    *,
    metrics: Metrics | None = None,
    headline: str = "upper_loss",
    sampling: Sampling | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Measure how the error falls with K at fixed T, or with T at fixed K.

    `data(clients)` are the rows of so many clients. `more` is what `measure_speedup`
    takes: the `calibration` that `calibrate` measured, `clients`, `iterations`, and by
    choice `seeds`, `period_factor`, `target` and `watch`.
    """
    setting_of = setting_by_clients(problem, data, start, metrics, headline, sampling)
    return measure_speedup(setting_of, algorithm, **more)


def complexity(
    problem: Problem,
    data: Callable[[int], ClientData],
    start: tuple[Upper, Lower],
    algorithm: type[AbstractAlgorithm],
    *,
    metrics: Metrics | None = None,
    headline: str = "upper_loss",
    sampling: Sampling | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Measure iterations and rounds to epsilon, against K or against epsilon.

    `more` is what `measure_complexity` takes: the `calibration`, `clients`, `targets`,
    and by choice `seeds` and `watch`.
    """
    setting_of = setting_by_clients(problem, data, start, metrics, headline, sampling)
    return measure_complexity(setting_of, algorithm, **more)


def measure_speedup(
    setting_of: SettingOf,
    kind: type[AbstractAlgorithm],
    calibration: Calibration,
    clients: Sequence[int],
    iterations: Sequence[int],
    *,
    seeds: int = 16,
    period_factor: float = 1.0,
    target: float | None = None,
    watch: Watch = lambda text: None,
) -> dict[str, Any]:
    """Run the corollary's schedule at every K, or at every T.

    With a target the value is the iterations until the metric itself, and not its mean,
    is below it; K clients are then planned for T/K iterations, as the corollary for a
    fixed epsilon asks, and continue until T. `period_factor` multiplies the corollary's
    p.
    """
    axis = axis_of(clients=clients, iterations=iterations)
    points, found = [], []
    for K, T in product(clients, iterations):
        aim = T if target is None else max(1, T // K)
        plan = practical_plan(calibration, K, iterations=aim)
        period = max(1, round(period_factor * plan.local_steps))
        plan = replace(plan, local_steps=period, rounds=-(-T // period))
        watch(_progress(plan))
        setting, results = run_plan(setting_of, kind, plan, seeds)
        if target is None:
            curves = metric_curves(setting, results)
            found.append(Measured.of(curves, lambda many: many[:, -1]))
        else:
            columns = [one.columns[setting.headline] for one in results]
            found.append(until(np.asarray(columns, float), target, plan))
        points.append(_point(plan, setting, results, found[-1]))
    claims = claims_of(kind).exponents
    key = {"clients": "K", "iterations": "T"}[axis]
    claimed = claims[key] if target is None else claims.get(f"T{key}")
    floor = calibration.floor if target is None else 0.0
    falling = [one.above(floor) for one in found] if floor else found
    fit = fit_exponent([point[axis] for point in points], falling, claimed)
    what = "mean metric" if target is None else "iterations"
    about = {**asdict(fit), "axis": axis, "value": what, "target": target}
    about |= {"period_factor": period_factor, "floor": floor}
    return _summary(kind, calibration, points, about)


def measure_complexity(
    setting_of: SettingOf,
    kind: type[AbstractAlgorithm],
    calibration: Calibration,
    clients: Sequence[int],
    targets: Sequence[float],
    *,
    seeds: int = 16,
    watch: Watch = lambda text: None,
) -> dict[str, Any]:
    """Count iterations and rounds until the running mean of the metric is below."""
    axis = axis_of(clients=clients, target=targets)
    points, found, rounds = [], [], []
    for K, target in product(clients, targets):
        plan = practical_plan(calibration, K, target=target)
        watch(_progress(plan))
        longer = int(_LONGER * plan.rounds) + 1
        setting, results = run_plan(setting_of, kind, plan, seeds, longer)
        one, p = until(metric_curves(setting, results), target, plan), plan.local_steps
        found.append(one)
        rounds.append(Measured(one.value / p, one.resampled / p))
        about = {"target": target, "rounds": rounds[-1].value}
        points.append({**_point(plan, setting, results, one), **about})
    claims = claims_of(kind).exponents
    key = {"clients": "K", "target": "e"}[axis]
    floor = calibration.floor if axis == "target" else 0.0
    at = [point[axis] - floor for point in points]
    fit = asdict(fit_exponent(at, found, claims[f"T{key}"]))
    for_rounds = asdict(fit_exponent(at, rounds, claims[f"R{key}"]))
    about = {**fit, "axis": axis, "value": "iterations", "rounds": for_rounds}
    return _summary(kind, calibration, points, about | {"floor": floor})


def default_targets(
    calibration: Calibration, clients: int, periods: Sequence[int]
) -> list[float]:
    """Return the targets for which the corollary's p is one of these whole numbers.

    p ~ 1/(K epsilon^(1/2)) in both corollaries; rounding it would bend the fit.
    """
    first = calibration.parameters
    base = first.local_steps * first.clients / clients
    floor, above = calibration.floor, calibration.value - calibration.floor
    return [floor + above * (base / period) ** 2 for period in periods]


def axis_of(**lists: Sequence[float]) -> str:
    """Return the name of the one list that has several entries."""
    longer = [name for name, values in lists.items() if len(set(values)) > 1]
    if len(longer) != 1 or any(not values for values in lists.values()):
        raise InvalidInputError(
            f"{' and '.join(lists)}: give several values of one of them, which is the "
            "axis, and a single value of the other."
        )
    return longer[0]


def until(
    curves: Float[np.ndarray, "seeds rounds"], target: float, plan: Plan
) -> Measured:
    """Return the iterations until the mean curve is below the target."""
    least = curves.mean(axis=0).min()
    if not least <= target:
        raise InvalidInputError(
            f"K={plan.clients}: the metric came to {least:.4g} in "
            f"{curves.shape[1] * plan.local_steps} iterations, not to {target:.4g}. "
            "Ask for a larger target or more iterations."
        )

    def first(many: np.ndarray) -> np.ndarray:
        below = many <= target
        # A resampled mean that never comes below counts as the whole run.
        last = np.full(len(many), many.shape[1])
        passed = np.where(below.any(axis=1), below.argmax(axis=1) + 1, last)
        return passed * float(plan.local_steps)

    return Measured.of(curves, first)


def criterion(setting: Setting, results: Sequence[Result]) -> dict[str, float]:
    """Return the mean of the paper's criterion over a run, where metrics have it.

    ||grad Phi||^2 + Ltil^2 ||y - y*(x)||^2 is what the theorems bound; the headline of
    such a task is its first term.
    """
    if not all(_CRITERION in one.columns for one in results):
        return {}
    curves = metric_curves(replace(setting, headline=_CRITERION), results)
    return {_CRITERION: float(curves.mean(axis=0)[-1])}


def _point(
    plan: Plan, setting: Setting, results: Sequence[Result], found: Measured
) -> dict[str, Any]:
    names = ("clients", "iterations", "local_steps", "rounds", "eta", "q", "notes")
    return {
        **{name: getattr(plan, name) for name in names},
        **found.plain(),
        **criterion(setting, results),
        "seconds": sum(sum(result.seconds.values()) for result in results),
    }


def _summary(
    kind: type[AbstractAlgorithm],
    calibration: Calibration,
    points: list[dict[str, Any]],
    about: dict[str, Any],
) -> dict[str, Any]:
    return {
        "task": "custom",
        "algorithm": kind.__name__,
        "theorem": calibration.theorem,
        **about,
        "points": points,
        "calibration": asdict(calibration),
    }


def _progress(plan: Plan) -> str:
    return f"K={plan.clients}, T={plan.iterations}, p={plan.local_steps}"
