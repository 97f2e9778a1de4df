"""Theory for a problem: measures its constants, checks a run, plans one.

A practical plan is scaled from a calibration, which is measured by runs of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Float

from fedbilevel._blocks import is_any
from fedbilevel._types import Lower, Metrics, Pair, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import DivergedError, InvalidInputError, unknown_name
from fedbilevel.hypergradient.conjugate_gradient import newton_step
from fedbilevel.problem import ClientData, Oracle, PooledData, Problem
from fedbilevel.result import Result
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from fedbilevel.studies.seeds import run_seeds
from fedbilevel.studies.setting import Setting
from fedbilevel.theory.claims import algorithm_by, parameters_of, theorem_for
from fedbilevel.theory.constants import Constants, Inputs
from fedbilevel.theory.estimation import Estimate, estimate_inputs
from fedbilevel.theory.plan import Calibration, Plan, practical_plan, theory_plan
from fedbilevel.theory.theorems import conditions, largest_steps

SettingOf = Callable[[int], Setting]  # of the number of clients
PRESETS = ("theory", "practical")
_NAMES = dict(l0="L0", l1="L1", l21="L21", l22="L22", mu="mu", sigma="sigma")
_START = ("phi0", "y0")
_DIGITS = 4  # of steps that are recommended
_NEWTON_STEPS, _SOLVER_STEPS = 8, 50
_STEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_VANISHING = ("grad_norm_sq", "criterion")  # what the theorems bound
_LONGER = (2, 4)  # times the calibration's T; shorter runs take steps that may diverge
_FEWEST_SEEDS, _ERRORS = 4, 3  # standard errors, which are 95 % with so few seeds


@dataclass(frozen=True)
class Ground:
    """The basis of plans and checks.

    `start` is (Phi(x_0) - least Phi seen, ||y_0 - y*(x_0)||^2), `sizes` (dx, dy).
    """

    inputs: Inputs
    estimates: Mapping[str, Estimate]
    start: tuple[float, float]
    sizes: tuple[int, int]

    def plan(self, theorem: int, clients: int, **aim: Any) -> Plan:
        """Plan by the theorem's own constants; clients are assumed to be alike."""
        known = {"sizes": self.sizes, "start": self.start}
        return theory_plan(theorem, self.inputs, clients, **known, **aim)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = {name: asdict(one) for name, one in self.estimates.items()}
        return {"estimates": found, "sizes": list(self.sizes)}


def measure_ground(
    setting: Setting,
    algorithm: AbstractAlgorithm,
    rounds: int,
    given: Mapping[str, float],
) -> Ground:
    """Measure the constants at the start, the middle and the end of a run.

    `given` are constants that are known: l0, l1, l21, l22, mu, sigma, phi0, y0. If all
    are, nothing is run.
    """
    known = [*_NAMES, *_START]
    for name in given:
        if name not in known:
            raise unknown_name("constant", name, known)
    found: dict[str, Estimate] = {}
    if len(given) < len(known):
        found = _estimates(setting.job(algorithm), rounds)
    for name, value in given.items():
        found[_NAMES.get(name, name)] = _exactly(value, "given")
    inputs = Inputs(**{mine: found[name].value for mine, name in _NAMES.items()})
    start = (found["phi0"].value, found["y0"].value)
    return Ground(inputs, found, start, setting.sizes)


def _estimates(job: Job, rounds: int) -> dict[str, Estimate]:
    if is_any(job.private) or isinstance(job.data, PooledData):
        raise InvalidInputError(
            "the theorems are about x and y that all clients share, and rows that each "
            "keeps. Here blocks are private, or rows are pooled."
        )
    points = [Pair(job.x, job.y)]
    for stop in sorted({max(1, rounds // 2), rounds}):
        outcome = execute(SimulatorRuntime(job), stop, measure_every=stop)
        points.append(job.algorithm.point(outcome.state.joined()))
    found = estimate_inputs(
        job.problem,
        job.data,
        [(point.x, point.y) for point in points],
        upper_batch=job.upper_batch,
        lower_batch=job.lower_batch,
        key=jr.key(0),
    )
    together = Oracle(job.problem, job.data.pooled(), 0, None, None)
    phi, distance = zip(*(_value(together, point) for point in points), strict=True)
    how = f"y* by {_NEWTON_STEPS} Newton steps over all rows"
    fall = f"Phi at the start less the least of {len(points)} points, {how}"
    found["phi0"] = _exactly(float(phi[0] - min(phi)), fall)
    found["y0"] = _exactly(float(distance[0]), how)
    return found


def _exactly(value: float, how: str) -> Estimate:
    return Estimate(value, value, value, how)


@jax.jit
def _value(together: Oracle, point: Pair):
    """Return Phi(x) and ||y - y*(x)||^2."""
    y = point.y
    for _ in range(_NEWTON_STEPS):
        y = newton_step(together, point.x, y, _SOLVER_STEPS)
    apart = jax.tree.map(lambda a, b: ((a - b) ** 2).sum(), point.y, y)
    phi = together.upper_loss(point.x, y, together.all_upper())
    return phi, sum(jax.tree.leaves(apart))


def check_theory(
    problem: Problem,
    data: ClientData,
    start: tuple[Upper, Lower],
    algorithm: AbstractAlgorithm,
    *,
    rounds: int,
    sampling: Sampling | None = None,
    given: Mapping[str, float] | None = None,
) -> tuple[Ground, dict[str, Any]]:
    """Say which inequalities of its theorem an algorithm satisfies on a problem.

    The constants are measured along a run of so many rounds, but for those `given`.
    """
    setting = Setting(problem, data, start, sampling=sampling or Sampling(batch=1))
    return checked(setting, algorithm, rounds, given or {})


def checked(
    setting: Setting,
    algorithm: AbstractAlgorithm,
    rounds: int,
    given: Mapping[str, float],
) -> tuple[Ground, dict[str, Any]]:
    """Check in a setting."""
    theorem, letters, rule = parameters_of(algorithm, setting.data.clients)
    ground = measure_ground(setting, algorithm, rounds, given)
    constants = Constants(ground.inputs, float(rule.theta), rule.q)
    found = conditions(theorem, constants, letters)
    sizes = (letters.clients, letters.local_steps)
    weights = () if theorem == 3 else (letters.alpha, letters.beta)
    most = largest_steps(theorem, constants, *sizes, *weights, digits=_DIGITS)
    names = ("rho2", "rho1", "eta", "alpha", "beta")
    return ground, {
        "algorithm": algorithm.title,
        "theorem": theorem,
        "letters": asdict(letters),
        "series": {"theta": constants.theta, "q": constants.q},
        "constants": constants.as_dict(),
        "conditions": [one.plain() for one in found],
        "largest": {name: getattr(most, name) for name in names},
        "holds": all(one.holds for one in found),
    }


def plan(
    problem: Problem,
    data: Callable[[int], ClientData],
    start: tuple[Upper, Lower],
    algorithm: AbstractAlgorithm,
    *,
    clients: int,
    rounds: int,
    preset: str = "practical",
    theorem: int | None = None,
    iterations: int | None = None,
    target: float | None = None,
    given: Mapping[str, float] | None = None,
    metrics: Metrics | None = None,
    headline: str = "upper_loss",
    sampling: Sampling | None = None,
    seeds: int = 16,
) -> Plan:
    """Plan a run from K and the iterations, or from K and a target.

    `data(clients)` are the rows of so many clients. The preset `theory` takes the
    theorem's own constants, measured along `rounds` rounds of the algorithm; the
    `practical` one measures the algorithm itself over as many and scales.
    """
    aim = {"iterations": iterations, "target": target}
    check_preset(preset, given or {})
    if preset == "theory":
        drawn = sampling or Sampling(batch=1)
        setting = Setting(problem, data(clients), start, sampling=drawn)
        ground = measure_ground(setting, algorithm, rounds, given or {})
        number = theorem_for(type(algorithm.unwrapped()), theorem)
        return ground.plan(number, clients, **aim)
    base = calibrate(
        problem,
        data,
        start,
        algorithm,
        iterations=rounds * parameters_of(algorithm, clients)[1].local_steps,
        seeds=seeds,
        metrics=metrics,
        headline=headline,
        sampling=sampling,
    )
    return practical_plan(base, clients, **aim)


def check_preset(preset: str, given: Mapping[str, float]) -> None:
    """Raise for an unknown preset, and for constants where they are not used."""
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
    if given and preset != "theory":
        raise InvalidInputError(
            "constants are for the theory preset. The practical one measures instead."
        )


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
    setting_of = setting_by_clients(problem, data, start, metrics, headline, sampling)
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
    measure, tried = partial(_measured, setting_of, kind, seeds), []
    for factor in _STEP_FACTORS if search else (1.0,):
        chosen = replace(first.parameters, eta=factor * first.parameters.eta)
        try:
            tried.append(measure(replace(first, parameters=chosen)))
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
    K = best.parameters.clients
    if setting_of(K).headline in _VANISHING:
        return best
    # The metric may tend to something above 0, which longer runs show.
    scales, values = [best.scale(K, best.iterations)], [ends]
    for times in _LONGER:
        T = times * best.iterations
        values.append(measure(best, T)[1])
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
    seeds: int,
    calibration: Calibration,
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
