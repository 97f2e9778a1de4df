r"""Measures how the error falls with clients and iterations, and fits the exponents.

    speed-up      the mean of the metric over a run, against K at fixed T or against T
                  at fixed K, under the corollary's schedule
    complexity    iterations and rounds until the running mean of the metric is below
                  epsilon, against K or epsilon, each run planned for its epsilon

A calibration fixes the constants once, at small K and T; everything else is the
corollary's exponents. Intervals are bootstraps over seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float

from fedbilevel.calibration import metric_curves, with_plan
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment
from fedbilevel.result import Result
from fedbilevel.theory.plan import Calibration, Plan, practical_plan

__all__ = [
    "Fit",
    "Measured",
    "axis_of",
    "default_targets",
    "fit_exponent",
    "measure_complexity",
    "measure_speedup",
    "until",
]

Watch = Callable[[str], None]
_RESAMPLES = 500
_INTERVAL = (0.025, 0.975)
_LONGER = 1.4  # times the planned T until a target must have been reached
# M ~ K^a, M ~ T^b; T ~ K^c, T ~ epsilon^d; rounds ~ K^0, epsilon^e (Gao 2022, table 1)
_ROOT = {"K": -1 / 2, "T": -1 / 2, "TK": -1.0, "Te": -2.0, "RK": 0.0, "Re": -1.5}
_TWO_THIRDS = {"K": -2 / 3, "T": -2 / 3, "TK": -1.0, "Te": -1.5, "RK": 0.0, "Re": -1.0}
_CLAIMS: Mapping[str, Mapping[str, float]] = {
    "local-bsgm": _ROOT,
    "local-bsgvrm": _TWO_THIRDS,
    "fedbioacc": _TWO_THIRDS,
    "fednest": {"K": 0.0, "T": -1 / 2, "TK": 0.0, "Te": -2.0, "RK": 0.0, "Re": -2.0},
}


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

    def divided_by(self, number: float) -> "Measured":
        """Return the same in another unit."""
        return Measured(self.value / number, self.resampled / number)

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


def measure_speedup(
    experiment: Experiment,
    calibration: Calibration,
    clients: Sequence[int],
    iterations: Sequence[int],
    *,
    seeds: int,
    period_factor: float = 1.0,
    target: float | None = None,
    watch: Watch = lambda text: None,
) -> dict[str, Any]:
    """Run the corollary's schedule at every K, or at every T.

    With a target the value is the iterations until the metric itself, and not its mean,
    is below it; K clients are then planned for T/K iterations, as the corollary for
    a fixed epsilon asks, and go on until T. `period_factor` multiplies the
    corollary's p.
    """
    axis = axis_of(clients=clients, iterations=iterations)
    points, found = [], []
    for K, T in product(clients, iterations):
        aim = T if target is None else max(1, T // K)
        plan = practical_plan(calibration, K, iterations=aim)
        period = max(1, round(period_factor * plan.local_steps))
        plan = replace(plan, local_steps=period, rounds=-(-T // period))
        watch(_told(plan))
        run = with_plan(experiment, plan)
        results = run.run_seeds(seeds)
        if target is None:
            curves = metric_curves(run, results)
            found.append(Measured.of(curves, lambda many: many[:, -1]))
        else:
            metric = results[0].config["headline"]
            curves = np.asarray([one.columns[metric] for one in results], float)
            found.append(until(curves, target, plan))
        points.append(_point(plan, results, found[-1]))
    claims = _CLAIMS[points[0]["algorithm"]]
    key = {"clients": "K", "iterations": "T"}[axis]
    claimed = claims[key] if target is None else claims.get(f"T{key}")
    fit = fit_exponent([point[axis] for point in points], found, claimed)
    what = "mean metric" if target is None else "iterations"
    about = {"axis": axis, "value": what, "target": target}
    about["period_factor"] = period_factor
    return _summary(experiment, calibration, points, about, fit)


def measure_complexity(
    experiment: Experiment,
    calibration: Calibration,
    clients: Sequence[int],
    targets: Sequence[float],
    *,
    seeds: int,
    watch: Watch = lambda text: None,
) -> dict[str, Any]:
    """Count iterations and rounds until the running mean of the metric is below."""
    axis = axis_of(clients=clients, target=targets)
    points, found, rounds = [], [], []
    for K, target in product(clients, targets):
        plan = practical_plan(calibration, K, target=target)
        watch(_told(plan))
        run = with_plan(experiment, plan)
        run = replace(run, rounds=int(_LONGER * plan.rounds) + 1)
        results = run.run_seeds(seeds)
        found.append(until(metric_curves(run, results), target, plan))
        rounds.append(found[-1].divided_by(plan.local_steps))
        point = _point(plan, results, found[-1])
        points.append({**point, "target": target, "rounds": rounds[-1].value})
    claims = _CLAIMS[points[0]["algorithm"]]
    key = {"clients": "K", "target": "e"}[axis]
    at = [point[axis] for point in points]
    fit = fit_exponent(at, found, claims[f"T{key}"])
    for_rounds = fit_exponent(at, rounds, claims[f"R{key}"])
    about = {"axis": axis, "value": "iterations", "rounds": asdict(for_rounds)}
    return _summary(experiment, calibration, points, about, fit)


def default_targets(
    calibration: Calibration, clients: int, periods: Sequence[int]
) -> list[float]:
    """Return the targets for which the corollary's p is one of these whole numbers.

    p ~ 1/(K epsilon^(1/2)) in both corollaries; rounding it would bend the fit.
    """
    first = calibration.letters
    base = first.local_steps * first.clients / clients
    return [calibration.value * (base / period) ** 2 for period in periods]


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


def _point(plan: Plan, results: Sequence[Result], found: Measured) -> dict[str, Any]:
    names = ("clients", "iterations", "local_steps", "rounds", "eta", "q", "notes")
    return {
        **{name: getattr(plan, name) for name in names},
        **found.plain(),
        "algorithm": results[0].algorithm,
        "seconds": sum(sum(result.seconds.values()) for result in results),
    }


def _summary(
    experiment: Experiment,
    calibration: Calibration,
    points: list[dict[str, Any]],
    about: dict[str, Any],
    fit: Fit,
) -> dict[str, Any]:
    return {
        "task": experiment.task,
        "algorithm": points[0]["algorithm"],
        "theorem": calibration.theorem,
        **asdict(fit),
        **about,
        "points": points,
        "calibration": asdict(calibration),
    }


def _told(plan: Plan) -> str:
    return f"K={plan.clients}, T={plan.iterations}, p={plan.local_steps}"
