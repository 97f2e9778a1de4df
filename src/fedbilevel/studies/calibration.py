"""Runs plans, and measures the one from which the practical plans are scaled."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import DivergedError, InvalidInputError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.result import Result
from fedbilevel.runtime import Sampling
from fedbilevel.studies.seeds import run_seeds
from fedbilevel.studies.setting import Setting
from fedbilevel.theory.claims import algorithm_by, parameters_of
from fedbilevel.theory.plan import Calibration, Plan, practical_plan

SettingOf = Callable[[int], Setting]  # of the number of clients
_STEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_VANISHING = ("grad_norm_sq", "criterion")  # what the theorems bound
_LONGER = (2, 4)  # times the calibration's T; shorter runs take steps that may diverge
_FEWEST_SEEDS, _ERRORS = 4, 3  # standard errors, which are 95 % with so few seeds


def setting_by_clients(
    problem: Problem,
    data: Callable[[int], ClientData],
    start: tuple[Upper, Lower],
    metrics: Metrics | None,
    headline: str,
    sampling: Sampling | None,
) -> SettingOf:
    """Return settings that differ in the number of clients alone."""
    rest = (start, metrics, headline, sampling or Sampling(batch=1))
    return lambda clients: Setting(problem, data(clients), *rest)


def run_plan(
    setting_of: SettingOf,
    kind: type[AbstractAlgorithm],
    plan: Plan,
    seeds: int,
    rounds: int | None = None,
) -> tuple[Setting, list[Result]]:
    """Run a plan from so many seeds; return the setting with the results."""
    setting = setting_of(plan.clients)
    job = setting.job(algorithm_by(plan, kind))
    return setting, run_seeds(job, rounds or plan.rounds, range(seeds))


def calibrate(
    problem: Problem,
    data: Callable[[int], ClientData],
    start: tuple[Upper, Lower],
    algorithm: AbstractAlgorithm,
    *,
    iterations: int,
    clients: int = 1,
    seeds: int = 16,
    metrics: Metrics | None = None,
    headline: str = "upper_loss",
    sampling: Sampling | None = None,
    search: bool = True,
) -> Calibration:
    """Measure an algorithm once, at small K and T, for plans to be scaled from.

    `data(clients)` are the rows of so many clients. With `search` a quarter to four
    times the algorithm's eta are tried, and the best is taken.
    """
    about = (metrics, headline, sampling)
    setting_of = setting_by_clients(problem, data, start, *about)
    setting, kind = setting_of(clients), type(algorithm.unwrapped())
    theorem, chosen, rule = parameters_of(algorithm, setting.data.clients)
    series = (float(rule.theta), rule.q)
    first = Calibration(theorem, iterations, chosen, *series, setting.sizes, value=1.0)
    return calibrated(setting_of, kind, first, seeds, search=search)


def calibrated(
    setting_of: SettingOf,
    kind: type[AbstractAlgorithm],
    first: Calibration,
    seeds: int,
    *,
    search: bool,
) -> Calibration:
    """Measure a first guess, or the best of some steps around it."""
    tried = []
    for factor in _STEP_FACTORS if search else (1.0,):
        chosen = replace(first.parameters, eta=factor * first.parameters.eta)
        guess = replace(first, parameters=chosen)
        try:
            tried.append(_measured(setting_of, kind, guess, seeds))
        except (DivergedError, InvalidInputError):  # longer steps diverge, too
            if not search:
                raise
            break
    if not tried:
        raise InvalidInputError(
            f"`{kind.__name__}` diverges even with a quarter of the given step: set a "
            "smaller eta, or other parameters."
        )
    best, ends = min(tried, key=lambda one: one[0].value)
    return _with_floor(setting_of, kind, best, ends)


def _with_floor(
    setting_of: SettingOf,
    kind: type[AbstractAlgorithm],
    best: Calibration,
    ends: Float[np.ndarray, " seeds"],
) -> Calibration:
    """Run for longer, where the metric may tend to something above 0."""
    K = best.parameters.clients
    if setting_of(K).headline in _VANISHING:
        return best
    scales, values = [best.scale(K, best.iterations)], [ends]
    for times in _LONGER:
        T = times * best.iterations
        values.append(_measured(setting_of, kind, best, len(ends), T)[1])
        scales.append(best.scale(K, T))
    return replace(best, floor=floor_of(scales, np.stack(values), best.value))


def floor_of(
    scales: Sequence[float], values: Float[np.ndarray, "lengths seeds"], value: float
) -> float:
    """Return what a metric tends to, by lines value = floor + slope scale over seeds.

    It is the upper end of an interval, since a promise must hold. With too few seeds,
    or where the metric does not fall for sure, it is the `value` that plans are scaled
    from: nothing better is promised.
    """
    seeds = values.shape[1]
    if seeds < _FEWEST_SEEDS:
        return value
    slope, floor = (
        (one.mean(), _ERRORS * one.std(ddof=1) / np.sqrt(seeds))
        for one in np.polyfit(scales, values, 1)
    )
    return min(float(sum(floor)), value) if slope[0] > slope[1] else value


def _measured(
    setting_of: SettingOf,
    kind: type[AbstractAlgorithm],
    calibration: Calibration,
    seeds: int,
    iterations: int | None = None,
) -> tuple[Calibration, Float[np.ndarray, " seeds"]]:
    """Return a calibration with its value, and what each of the seeds came to."""
    T = iterations or calibration.iterations
    plan = practical_plan(calibration, calibration.parameters.clients, iterations=T)
    curves = metric_curves(*run_plan(setting_of, kind, plan, seeds))
    value = float(curves.mean(axis=0)[-1])
    return replace(calibration, value=value), curves[:, -1]


def metric_curves(
    setting: Setting, results: Sequence[Result]
) -> Float[np.ndarray, "seeds rounds"]:
    """Return the running mean of the headline metric after every round.

    It is known between two rounds only. From one to the next the mean over seeds is
    taken as exponential, so that long rounds count the fast fall at the beginning
    rightly; where it is flat, beginning and end count half each. The beginning of the
    first round counts where the metrics have it.
    """
    columns = np.asarray([one.columns[setting.headline] for one in results], float)
    at_start = setting.headline_at_start()
    start = columns[:, :1] if at_start is None else at_start
    before = np.hstack([np.broadcast_to(start, (len(results), 1)), columns[:, :-1]])
    share = _share_of_beginning(before.mean(axis=0), columns.mean(axis=0))
    each = share * before + (1 - share) * columns
    return np.cumsum(each, axis=1) / np.arange(1, columns.shape[1] + 1)


def _share_of_beginning(
    begin: Float[np.ndarray, " rounds"], end: Float[np.ndarray, " rounds"]
) -> Float[np.ndarray, " rounds"]:
    """Return w with w a + (1 - w) b the mean of an exponential from a to b."""
    share = np.full(begin.shape, 0.5)
    falls = (begin > 0) & (end > 0) & (np.abs(begin - end) > 1e-3 * np.abs(end))
    ratio = begin[falls] / end[falls]
    share[falls] = 1 / np.log(ratio) - 1 / (ratio - 1)
    return share
