"""Theory for a problem: measures its constants, checks a run, plans one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.random as jr

from fedbilevel._blocks import is_any
from fedbilevel._types import Lower, Metrics, Pair, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.hypergradient.conjugate_gradient import newton_step
from fedbilevel.problem import ClientData, Oracle, PooledData, Problem
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from fedbilevel.studies.calibration import calibrate
from fedbilevel.studies.setting import Setting
from fedbilevel.theory.claims import parameters_of, theorem_for
from fedbilevel.theory.constants import Constants, Inputs
from fedbilevel.theory.estimation import Estimate, estimate_inputs
from fedbilevel.theory.plan import Plan, practical_plan, theory_plan
from fedbilevel.theory.theorems import conditions, largest_steps

PRESETS = ("theory", "practical")
_NAMES = dict(l0="L0", l1="L1", l21="L21", l22="L22", mu="mu", sigma="sigma")
_START = ("phi0", "y0")
_DIGITS = 4  # of steps that are recommended
_NEWTON_STEPS, _SOLVER_STEPS = 8, 50


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
