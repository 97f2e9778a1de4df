"""Runs plans, and measures the one from which the practical plans are scaled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Float

from fedbilevel.errors import InvalidInputError, NonFiniteError
from fedbilevel.experiment import Experiment
from fedbilevel.result import Result
from fedbilevel.runtime import Job
from fedbilevel.theory.conditions import Letters
from fedbilevel.theory.plan import Calibration, Plan, practical_plan

__all__ = ["calibrate", "metric_curves", "with_plan"]

_STEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def with_plan(experiment: Experiment, plan: Plan) -> Experiment:
    """Return the experiment with all the plan's numbers.

    Its algorithm is kept: FedBiOAcc and FedNest read the letters in their own way.
    """
    name = experiment.algorithm or plan.algorithm
    return replace(
        experiment,
        algorithm=name,
        clients=plan.clients,
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        options={**experiment.options, **_options_for(plan, name)},
    )


def _options_for(plan: Plan, algorithm: str) -> dict[str, str]:
    if algorithm == plan.algorithm:
        return plan.options()
    if algorithm == "fedbioacc" and plan.theorem > 1:
        steps = {"eta": plan.rho1, "gamma": plan.rho2, "tau": plan.rho2}
        weights = {"c_nu": plan.alpha, "c_omega": plan.beta, "c_q": plan.beta}
        numbers = {name: str(value) for name, value in (steps | weights).items()}
        return {"a": plan.eta, **numbers}
    if algorithm == "fednest" and plan.theorem == 1:
        # One of its rounds moves as far as p local steps do.
        whole = plan.local_steps * float(plan.eta)
        return {
            "alpha": str(whole * plan.rho1),
            "beta": str(whole * plan.rho2),
            "ell": str(1 / plan.theta),
            "q": str(plan.q),
            "inner_rounds": "1",
            "length": "full",
        }
    raise InvalidInputError(
        f"a plan by theorem {plan.theorem} is for {plan.algorithm}, not {algorithm}."
    )


def calibrate(experiment: Experiment, theorem: int, seeds: int) -> Calibration:
    """Measure once, at small K and T, what the corollary's exponents then scale.

    The letters are the task's own for this, or its recommended ones for one client with
    the eta, among a quarter to four times theirs, that has the lowest mean metric.
    Options of the experiment take precedence; an eta among them is kept.
    """
    task, job, config = replace(experiment, clients=1).job()
    own = task.calibration.get(experiment.algorithm_for(task), {})
    settings = {**task.recommended, **own, **experiment.options}
    recommended = config["rounds"] * config["local_steps"]
    first = _first_guess(theorem, {"iterations": str(recommended), **settings}, job)
    if own or "eta" in experiment.options:
        return _measured(experiment, first, seeds)
    tried = []
    for factor in _STEP_FACTORS:
        letters = replace(first.letters, eta=factor * first.letters.eta)
        try:
            tried.append(_measured(experiment, replace(first, letters=letters), seeds))
        except (NonFiniteError, InvalidInputError):  # longer steps diverge, too
            break
    if not tried:
        raise InvalidInputError(
            f"{experiment.algorithm_for(task)} diverges on {experiment.task} even with "
            "a quarter of the recommended step: set a smaller eta, or other letters."
        )
    return min(tried, key=lambda one: one.value)


def _first_guess(theorem: int, settings: Mapping[str, str], job: Job) -> Calibration:
    def read(letter: str, plain: str) -> float:
        return float(settings[letter if letter in settings else plain])

    letters = Letters(
        clients=int(settings.get("clients", "1")),
        local_steps=int(settings["local_steps"]),
        eta=float(settings.get("eta", "1")),
        alpha=read("alpha", "upper_weight"),
        beta=read("beta", "lower_weight"),
        rho1=read("rho1", "upper_step"),
        rho2=read("rho2", "lower_step"),
        first_batch=int(read("first_batch", "local_steps")),
    )
    dx, dy = (sum(leaf.size for leaf in jax.tree.leaves(t)) for t in (job.x, job.y))
    iterations, theta = int(settings["iterations"]), float(settings["theta"])
    q = int(settings["q"])
    return Calibration(theorem, iterations, letters, theta, q, (dx, dy), value=1.0)


def _measured(
    experiment: Experiment, calibration: Calibration, seeds: int
) -> Calibration:
    letters, iterations = calibration.letters, calibration.iterations
    plan = practical_plan(calibration, letters.clients, iterations=iterations)
    run = with_plan(experiment, plan)
    curves = metric_curves(run, run.run_seeds(seeds))
    return replace(calibration, value=float(curves.mean(axis=0)[-1]))


def metric_curves(
    experiment: Experiment, results: Sequence[Result]
) -> Float[np.ndarray, "seeds rounds"]:
    """Return the running mean of the headline metric after every round.

    It is known between two rounds only. From one to the next the mean over seeds is
    taken as exponential, so that long rounds count the fast fall at the beginning
    rightly; where it is flat, beginning and end count half each. The beginning of the
    first round counts where the task measures it.
    """
    task, *_ = experiment.job()
    columns = np.asarray([result.columns[task.headline] for result in results], float)
    start = task.metrics(task.x, task.y).get(task.headline, columns[:, :1])
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
