"""Many runs as one program: step sizes and random seeds are batched, not repeated."""

import time
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import PartitionSpec

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError, NonFiniteError
from fedbilevel.runtime import _program
from fedbilevel.runtime._compile import compiled
from fedbilevel.runtime._layout import Layout, devices_for
from fedbilevel.runtime.driver import Outcome, check_rounds, failure, measured_rounds
from fedbilevel.runtime.job import Job, start_state
from fedbilevel.runtime.simulator import default_at_once, first_failure

__all__ = ["attempt", "sweep"]


def sweep(
    job: Job,
    rounds: int,
    *,
    algorithms: Sequence[AbstractAlgorithm] = (),
    seeds: Sequence[int] = (),
    measure_every: int = 1,
    clients_at_once: int | None = None,
) -> list[Outcome]:
    """Run every (algorithm, seed) of two lists of one length as one compiled program.

    The algorithms may differ in their numbers only. An empty list repeats the job's
    own algorithm, or the seed 0. The first that diverges ends all of them.
    """
    outcomes = attempt(
        job,
        rounds,
        algorithms=algorithms,
        seeds=seeds,
        measure_every=measure_every,
        clients_at_once=clients_at_once,
        to_the_end=False,
    )
    return [outcome for outcome in outcomes if isinstance(outcome, Outcome)]


def attempt(
    job: Job,
    rounds: int,
    *,
    algorithms: Sequence[AbstractAlgorithm] = (),
    seeds: Sequence[int] = (),
    measure_every: int = 1,
    clients_at_once: int | None = None,
    to_the_end: bool = True,
) -> list[Outcome | NonFiniteError]:
    """Sweep, and let runs that diverge not stop the others: they leave their error."""
    check_rounds(rounds, measure_every)
    varying, runs = _varying(job, algorithms, seeds)
    devices = devices_for(job.participants)
    at_once = clients_at_once or default_at_once(job)
    layout = Layout(job.sites, job.participants, devices, at_once, sweeps=True)
    fixed = (layout, layout.place_job(job))
    varying = layout.place(varying, PartitionSpec())
    state = start_state(job)
    state = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (runs, *leaf.shape)), state
    )
    state, compiling, began = layout.place_state(state), 0.0, time.perf_counter()
    failed: dict[int, NonFiniteError] = {}
    if job.algorithm.setup():
        program, seconds = compiled(_program.setup, fixed, (varying, state), ())
        compiling += seconds
        state, failures = program(fixed, varying, state)
        failed = _failed(job, failures)
        _raise_first(failed, to_the_end)
    tables, step = [], (_program.CAPACITY - 1) * measure_every
    for start in range(0, rounds, step):
        if len(failed) == runs:
            break
        bounds = (start, min(start + step, rounds), rounds, measure_every)
        span = _program.Span(*(jnp.asarray(bound, jnp.int32) for bound in bounds))
        arguments = (varying, state, layout.place(span, PartitionSpec()))
        program, seconds = compiled(_program.advance, fixed, arguments, (1,))
        compiling += seconds
        state, (rows, used, failures) = program(fixed, *arguments)
        failed = _failed(job, failures) | failed
        _raise_first(failed, to_the_end)
        count = int(np.max(used))
        tables.append({name: np.asarray(rows[name])[:, :count] for name in rows})
    running = time.perf_counter() - began - compiling
    spent = {"compile": compiling, "run": running}
    split = _split(layout, state, tables, rounds, measure_every)
    return [failed[run] if run in failed else split(run, spent) for run in range(runs)]


def _varying(job: Job, algorithms: Sequence[AbstractAlgorithm], seeds: Sequence[int]):
    """Stack what differs between the runs, and count them."""
    runs = max(len(algorithms), len(seeds))
    many = list(algorithms) or [job.algorithm] * runs
    roots = [jr.key(seed) for seed in (list(seeds) or [0] * runs)]
    if runs == 0 or len(many) != len(roots):
        raise InvalidInputError(
            f"a sweep pairs algorithms and seeds one to one, got {len(algorithms)} and "
            f"{len(seeds)}; leave one list empty to repeat it."
        )
    if algorithms:
        job.check_curvature(*algorithms)
    return (_stack_algorithms(many), jnp.stack(roots)), runs


def _stack_algorithms(many: Sequence[AbstractAlgorithm]) -> AbstractAlgorithm:
    arrays, static = zip(
        *(eqx.partition(one, eqx.is_array) for one in many), strict=True
    )
    if any(not eqx.tree_equal(one, static[0]) for one in static[1:]):
        raise InvalidInputError(
            "the algorithms of a sweep must differ in numbers only: counts such as "
            "local_steps or q and kinds of parts need a run each."
        )
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
    return eqx.combine(stacked, static[0])


def _failed(job: Job, failures: _program.Failure) -> dict[int, NonFiniteError]:
    """Return the errors of the runs that diverged."""
    errors, failures = {}, jax.tree.map(np.asarray, failures)
    for run in range(failures.client.shape[0]):
        found = first_failure(jax.tree.map(lambda leaf, run=run: leaf[run], failures))
        if found is not None:
            errors[run] = error = failure(job, found)
            error.add_note(f"This happened in run {run} of the sweep, counted from 0.")
    return errors


def _raise_first(failed: dict[int, NonFiniteError], to_the_end: bool) -> None:
    if failed and not to_the_end:
        raise failed[min(failed)]


def _split(layout, state, tables, rounds, every):
    state = jax.tree.map(np.asarray, layout.fetch_state(state))
    numbers = measured_rounds(0, rounds, rounds, every)

    def one(run: int, seconds: dict[str, float]) -> Outcome:
        columns = {
            name: np.concatenate([table[name][run] for table in tables])
            for name in tables[0]
        }
        own = jax.tree.map(lambda leaf: leaf[run], state)
        return Outcome(own, {"round": numbers, **columns}, seconds)

    return one
