"""Oracles that are watched, and one watched run of every row, read by many tests."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.problem import Oracle
from fedbilevel.runtime import (
    Job,
    Ledger,
    Outcome,
    ReferenceRuntime,
    SimulatorRuntime,
    execute,
    keys,
    reference,
)
from fedbilevel.runtime import job as job_module
from tests.cases import Case, case_of, cohort_of, data_for, quadratic_job

ROUNDS = 2


@dataclass
class Seen:
    """How often oracles were called, samples drawn, and each key drawn with."""

    calls: Counter[str] = field(default_factory=Counter)
    keys: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget everything."""
        self.calls.clear()
        self.keys.clear()


SEEN = Seen()


class Watched(Oracle):
    """An oracle that tells its calls and keys, from inside compiled programs too.

    A callback tells once per element where calls are mapped (the draws of a bundle).
    """

    def draw_upper(self, key):
        if self.upper_batch is None:
            return super().draw_upper(key)  # which is a part, and the only one
        return _drawn("upper_samples", key, super().draw_upper(key))

    def draw_lower(self, key):
        if self.lower_batch is None:
            return super().draw_lower(key)
        return _drawn("lower_samples", key, super().draw_lower(key))

    def part_upper(self, part, most):
        read = partial(super().part_upper, most=most)
        return _counted("upper_samples", read, part, most)

    def part_lower(self, part, most):
        read = partial(super().part_lower, most=most)
        return _counted("lower_samples", read, part, most)

    def unrolled_gradient(self, x, y, upper, lowers, step):
        result = super().unrolled_gradient(x, y, upper, lowers, step)
        return _called("unrolled_gradient", result)

    def unrolled_derivative(self, x, y, direction, upper, lowers, step):
        result = super().unrolled_derivative(x, y, direction, upper, lowers, step)
        return _called("unrolled_derivative", result)

    def upper_gradients(self, x, y, batch):
        return _called("upper_gradients", super().upper_gradients(x, y, batch))

    def lower_gradient(self, x, y, batch):
        return _called("lower_gradient", super().lower_gradient(x, y, batch))

    def lower_gradients(self, x, y, batch):
        return _called("lower_gradients", super().lower_gradients(x, y, batch))

    def hessian_product(self, x, y, v, batch):
        result = super().hessian_product(x, y, v, batch)
        if self.radius is not None:  # a difference of two gradients
            return _called("lower_gradient", result, 2)
        return _called("hessian_product", result)

    def cross_product(self, x, y, v, batch):
        result = super().cross_product(x, y, v, batch)
        if self.radius is not None:
            return _called("lower_gradient_upper", result, 2)
        return _called("cross_product", result)


def _drawn(name, key, batch):
    rows = jax.tree.leaves(batch.rows)[0].shape[0]

    def note(words):
        SEEN.calls.update({name: rows})
        SEEN.keys.update([tuple(np.ravel(words).tolist())])

    jax.debug.callback(note, jr.key_data(key))
    return batch


def _counted(name, read, part, most):
    """Count the rows of one part: as many as parts have on the average."""
    batch = read(part)
    every = [batch] if most == 1 else [read(one) for one in range(most)]

    def note(weights):
        SEEN.calls.update({name: np.count_nonzero(weights) / most})

    jax.debug.callback(note, jnp.stack([one.weights for one in every]))
    return batch


def _called(name, result, times=1):
    leaf = jax.tree.leaves(result)[0]
    jax.debug.callback(lambda _: SEEN.calls.update({name: times}), leaf)
    return result


@contextmanager
def watching():
    """Let jobs have watched oracles, of which nothing was seen yet."""
    SEEN.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "Oracle", Watched)
        yield SEEN


@dataclass(frozen=True)
class Observed:
    """A row's run by the reference runtime, two of three clients in every exchange.

    `calls` has what was called up to the end of each round, `keys` how often each key
    was drawn with, and `cohorts` the stage, phase and turn of each cohort drawn. It is
    measured at its end alone, as measuring calls oracles, too. `ledger` is what the
    package counts without running anything.
    """

    job: Job
    outcome: Outcome
    calls: list[Counter[str]]
    keys: Counter[tuple[int, ...]]
    cohorts: list[tuple[int, int, int]]
    ledger: Ledger

    def counted(self, rounds: int) -> dict[str, Any]:
        """Return the package's count of so many rounds."""
        return self.ledger.summary(self.job.key, rounds)


def cohort_job(case: Case) -> Job:
    """Return the job that the runs below are made of."""
    data, cohort = data_for(case, 3), cohort_of(case, 2)
    return quadratic_job(case.algorithm, data, participants=cohort)


@cache
def observed(name: str) -> Observed:
    """Return the watched run of the row of that name."""
    job, asked, original = cohort_job(case_of(name)), [], keys.draw_cohort

    def recorded(root, stage, phase, turn, clients, participants):
        asked.append((stage, phase, turn))
        return original(root, stage, phase, turn, clients, participants)

    calls, drawn, through = [], Counter(), reference.phases_in_python

    def noted(*where: Any) -> Any:
        """Note what was called so far, after the setup and after every round."""
        made = through(*where)
        jax.effects_barrier()
        calls.append(Counter(SEEN.calls))
        drawn.update(Counter(SEEN.keys) - drawn)
        return made

    with watching(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "draw_cohort", recorded)
        patch.setattr(reference, "phases_in_python", noted)
        outcome = execute(ReferenceRuntime(job), ROUNDS, measure_every=ROUNDS)
    return Observed(job, outcome, calls[1:], drawn, asked, Ledger(job))


@cache
def simulated(name: str) -> Outcome:
    """Return the same run of the row by the simulator."""
    runtime = SimulatorRuntime(cohort_job(case_of(name)))
    return execute(runtime, ROUNDS, measure_every=ROUNDS)
