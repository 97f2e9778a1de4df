"""Many runs of one setting as one compiled program: seeds, and numbers of a grid."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.random as jr

from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm, steadied
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import DivergedError, InvalidInputError
from fedbilevel.problem import Data, Problem
from fedbilevel.result import Result
from fedbilevel.runtime import (
    Job,
    Ledger,
    Outcome,
    Sampling,
    Stopping,
    SweepRuntime,
    Watch,
)
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.driver import NEVER, first_span
from fedbilevel.runtime.sweeping import single_outcomes
from fedbilevel.studies import single
from fedbilevel.studies.setting import Keeping, Setting


def sweep(
    problem: Problem,
    data: Data,
    start: tuple[Upper, Lower],
    algorithms: AbstractAlgorithm | Sequence[AbstractAlgorithm],
    *,
    rounds: int,
    seeds: Sequence[int],
    sampling: Sampling | None = None,
    metrics: Metrics | None = None,
    channel: Channel = PLAIN,
    measure_every: int | None = 1,
    stopping: Stopping = NEVER,
    keeping: Keeping | None = None,
    watch: Watch | None = None,
) -> list[Result | DivergedError]:
    """Run one algorithm from many seeds, or pairs of algorithms and seeds, together.

    Algorithms in a list may differ in their numbers, not in counts or kinds of parts.
    A run that diverges leaves its error, and does not stop the others. A
    `measure_every` of None measures as `run` does by itself.
    """
    drawn = sampling or Sampling()
    setting = Setting(problem, data, start, metrics, sampling=drawn, channel=channel)
    alone = isinstance(algorithms, AbstractAlgorithm)
    many = [algorithms] * len(seeds) if alone else list(algorithms)
    if not many:
        raise InvalidInputError("a sweep needs at least one algorithm and one seed.")
    found = swept(
        setting.job(many[0]),
        rounds,
        () if alone else many,
        seeds,
        measure_every=measure_every,
        stopping=stopping,
        checkpoints=None if keeping is None else keeping.opened(),
        watch=watch,
        config={},
    )
    single.warn_of_events([one for one in found if isinstance(one, Result)])
    return found


def swept(
    job: Job,
    rounds: int,
    algorithms: Sequence[AbstractAlgorithm],
    seeds: Sequence[int],
    *,
    stopping: Stopping = NEVER,
    task: str = "custom",
    config: dict[str, Any],
    runtime: SweepRuntime | None = None,
    **driving: Any,
) -> list[Result | DivergedError]:
    """Run a job that was checked; `task` and `config` are recorded as given.

    The seconds of a result are its share of what all of them took. A `runtime` of this
    job may have been compiled before. `driving` is what `execute` takes besides.
    """
    algorithms = [steadied(one) for one in algorithms]
    runtime = runtime or SweepRuntime(job, algorithms=algorithms, seeds=seeds)
    ran = single.executed(runtime, rounds, stopping=stopping, **driving)
    every = ran.recorded["measure_every"]
    found = single_outcomes(runtime, ran.outcome, stopping, rounds, every)
    many = algorithms or [job.algorithm] * len(seeds)
    results = []
    for one, algorithm, seed in zip(found, many, seeds, strict=True):
        if isinstance(one, Outcome):
            own = replace(job, algorithm=algorithm, key=jr.key(seed))
            alone, settings = ran._replace(outcome=one), {**config, "seed": seed}
            try:
                one = single.result_of(own, alone, task, settings)
            except DivergedError as error:
                one = error
        results.append(one)
    return results


def compile_seeds(
    job: Job,
    rounds: int,
    seeds: Sequence[int],
    *,
    measure_every: int | None = 1,
    stopping: Stopping = NEVER,
) -> tuple[SweepRuntime, Span]:
    """Compile the program that `run_seeds` will run; return it with its first round."""
    runtime = SweepRuntime(job, seeds=seeds)
    every = single.measured_every(Ledger(job), measure_every, stopping)
    first = first_span(runtime, rounds, every, stopping)
    runtime.prepare(first)
    return runtime, first


def warm_up(runtime: SweepRuntime, first: Span) -> None:
    """Make the first round and drop it: whatever happens once is not timed."""
    state, failed = runtime.start()
    if failed is None:
        runtime.fetch(runtime.advance(state, first).state)


def run_seeds(job: Job, rounds: int, seeds: Sequence[int], **more: Any) -> list[Result]:
    """Run a job once per random seed; raise where one of them diverges."""
    found = swept(job, rounds, (), seeds, **{"config": {}, **more})
    for one in found:
        if isinstance(one, DivergedError):
            raise one
    return [one for one in found if isinstance(one, Result)]
