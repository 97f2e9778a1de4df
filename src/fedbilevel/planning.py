"""Theory for a task: measures its constants, checks a run, plans one."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.random as jr

from fedbilevel import algorithms, tasks
from fedbilevel._types import Pair
from fedbilevel.algorithms._local_bsg import AbstractLocalBSG
from fedbilevel.calibration import calibrate
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.experiment import Experiment
from fedbilevel.hypergradient import Neumann
from fedbilevel.hypergradient.conjugate_gradient import newton_step
from fedbilevel.problem import Oracle
from fedbilevel.runtime import Job, SimulatorRuntime, execute
from fedbilevel.schedules import Constant
from fedbilevel.theory.conditions import Letters, conditions, largest_steps
from fedbilevel.theory.constants import Constants, Inputs
from fedbilevel.theory.estimation import Estimate, estimate_inputs
from fedbilevel.theory.plan import Plan, practical_plan, theory_plan

__all__ = [
    "THEOREMS_OF",
    "Ground",
    "check_theory",
    "measure_ground",
    "planned",
    "theorem_for",
]

# The theorems themselves for the first two; FedBiOAcc and FedNest have no schedules in
# these letters and take those of their nearest relative.
THEOREMS_OF: Mapping[str, tuple[int, ...]] = {
    "local-bsgm": (1,),
    "local-bsgvrm": (2, 3),
    "fedbioacc": (2, 3),
    "fednest": (1,),
}
_NAMES = {
    "l0": "L0",
    "l1": "L1",
    "l21": "L21",
    "l22": "L22",
    "mu": "mu",
    "sigma": "sigma",
}
_START = ("phi0", "y0")
_NEWTON_STEPS, _SOLVER_STEPS = 8, 50


@dataclass(frozen=True)
class Ground:
    """What plans and checks stand on.

    `start` is (Phi(x_0) - least Phi seen, ||y_0 - y*(x_0)||^2), `sizes` (dx, dy).
    """

    inputs: Inputs
    estimates: Mapping[str, Estimate]
    start: tuple[float, float]
    sizes: tuple[int, int]

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = {name: asdict(one) for name, one in self.estimates.items()}
        return {"estimates": found, "sizes": list(self.sizes)}


def theorem_for(algorithm: str, theorem: int | None) -> int:
    """Return the theorem asked for, or the first one an algorithm is planned by."""
    if algorithm not in THEOREMS_OF:
        raise unknown_name("algorithm with a theorem", algorithm, THEOREMS_OF)
    known = THEOREMS_OF[algorithm]
    if theorem is not None and theorem not in known:
        raise InvalidInputError(
            f"theorem {theorem} is not about {algorithm}: there is "
            f"{' and '.join(map(str, known))}."
        )
    return known[0] if theorem is None else theorem


def measure_ground(experiment: Experiment, given: Mapping[str, float]) -> Ground:
    """Measure the constants at the start, half way and the end of the experiment.

    `given` are constants that are known: l0, l1, l21, l22, mu, sigma, phi0, y0. If all
    are, nothing is run.
    """
    known = [*_NAMES, *_START]
    for name in given:
        if name not in known:
            raise unknown_name("constant", name, known)
    task, job, config = experiment.job()
    dx, dy = (sum(leaf.size for leaf in jax.tree.leaves(t)) for t in (job.x, job.y))
    found: dict[str, Estimate] = {}
    if len(given) < len(known):
        points = _points_along(job, config["rounds"])
        found = _estimates(task, job, points)
    for name, value in given.items():
        told = _NAMES.get(name, name)
        found[told] = Estimate(value, value, value, "given")
    inputs = Inputs(**{mine: found[name].value for mine, name in _NAMES.items()})
    start = (found["phi0"].value, found["y0"].value)
    return Ground(inputs, found, start, (dx, dy))


def _points_along(job: Job, rounds: int) -> list[Pair]:
    points = [Pair(job.x, job.y)]
    for stop in sorted({max(1, rounds // 2), rounds}):
        outcome = execute(SimulatorRuntime(job), stop, measure_every=stop)
        points.append(job.algorithm.point(outcome.state.joined()))
    return points


def _estimates(task: tasks.Task, job: Job, points: list[Pair]) -> dict[str, Estimate]:
    if any(jax.tree.leaves(task.private)):
        raise InvalidInputError(
            "the theorems are about x and y that all clients share; this task keeps "
            "blocks of them private."
        )
    found = estimate_inputs(
        task.problem,
        task.data,
        [(point.x, point.y) for point in points],
        upper_batch=job.upper_batch,
        lower_batch=job.lower_batch,
        key=jr.key(0),
    )
    together = Oracle(task.problem, task.data, None, None, None)
    phi, distance = zip(*(_value(together, point) for point in points), strict=True)
    told = f"by {_NEWTON_STEPS} Newton steps over all rows"
    fall = float(phi[0] - min(phi))
    square = float(distance[0])
    how = f"Phi at the start less the least of {len(points)} points, y* {told}"
    found["phi0"] = Estimate(fall, fall, fall, how)
    found["y0"] = Estimate(square, square, square, f"y* {told}")
    return found


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
    experiment: Experiment, given: Mapping[str, float]
) -> tuple[Ground, dict[str, Any]]:
    """Say which inequalities of its theorem a configuration satisfies."""
    ground = measure_ground(experiment, given)
    task, job, _ = experiment.job()
    name, algorithm = experiment.algorithm_for(task), job.algorithm
    if not isinstance(algorithm, AbstractLocalBSG):
        theorists = [
            known
            for known in algorithms.names()
            if issubclass(algorithms.find(known), AbstractLocalBSG)
        ]
        raise unknown_name("algorithm with a theorem", name, theorists)
    rule = algorithm.hypergradient
    if not isinstance(rule, Neumann):
        raise InvalidInputError("the theorems are about the stochastic Neumann series.")
    constant = isinstance(algorithm.eta, Constant)
    theorem = 1 if algorithm.weight_power == 1 else 2 if constant else 3
    letters = Letters(
        clients=job.data.clients,
        local_steps=algorithm.local_steps,
        eta=float(algorithm.eta(0)),
        first_batch=algorithm.first_bundles(),
        **{n: float(getattr(algorithm, n)) for n in ("alpha", "beta", "rho1", "rho2")},
    )
    constants = Constants(ground.inputs, float(rule.theta), rule.q)
    found = conditions(theorem, constants, letters)
    given_weights = () if theorem == 3 else (letters.alpha, letters.beta)
    most = largest_steps(
        theorem, constants, letters.clients, letters.local_steps, *given_weights
    )
    names = ("rho2", "rho1", "eta", "alpha", "beta")
    return ground, {
        "algorithm": name,
        "theorem": theorem,
        "letters": asdict(letters),
        "series": {"theta": constants.theta, "q": constants.q},
        "constants": constants.as_dict(),
        "conditions": [one.plain() for one in found],
        "largest": {name: getattr(most, name) for name in names},
        "holds": all(one.holds for one in found),
    }


def planned(
    experiment: Experiment,
    clients: int,
    *,
    preset: str,
    theorem: int,
    iterations: int | None,
    target: float | None,
    given: Mapping[str, float],
    seeds: int = 16,
) -> Plan:
    """Plan a run of a task by the `theory` or the `practical` preset."""
    aim = {"iterations": iterations, "target": target}
    if preset == "theory":
        # The plan's own K has the same constants: clients are assumed to be alike.
        ground = measure_ground(experiment, given)
        return theory_plan(
            theorem,
            ground.inputs,
            clients,
            sizes=ground.sizes,
            start=ground.start,
            **aim,
        )
    if preset != "practical":
        raise unknown_name("preset", preset, ("theory", "practical"))
    if given:
        raise InvalidInputError(
            "constants are for the theory preset; the practical one measures instead."
        )
    return practical_plan(calibrate(experiment, theorem, seeds), clients, **aim)
