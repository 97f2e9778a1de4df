"""One call from problem to result."""

import math
import platform
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel._blocks import is_any
from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm, steadied
from fedbilevel.algorithms.presets import FedBiOControls
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import DivergedError, InterventionWarning, InvalidInputError
from fedbilevel.problem import ClientData, Data, Problem
from fedbilevel.result import Result, named_leaves, to_plain
from fedbilevel.runtime import (
    Job,
    Ledger,
    OnRound,
    Outcome,
    Sampling,
    SimulatorRuntime,
    Stopping,
    Watch,
    execute,
    mesh,
)
from fedbilevel.runtime.driver import NEVER, first_span
from fedbilevel.runtime.method_checks import require_method
from fedbilevel.runtime.privacy import privacy_spent
from fedbilevel.studies import heterogeneity
from fedbilevel.studies.setting import Keeping, Setting
from fedbilevel.units import OfDistance, relative_kinds

_TENTH = 10  # of the time of rounds, for measuring
_OF_THEORY = "grad_norm_sq"  # a metric of tasks that know the gradient of Phi


def run(
    problem: Problem,
    data: Data,
    start: tuple[Upper, Lower],
    algorithm: AbstractAlgorithm | None = None,
    *,
    rounds: int,
    seed: int = 0,
    sampling: Sampling | None = None,
    metrics: Metrics | None = None,
    channel: Channel = PLAIN,
    measure_every: int | None = None,
    stopping: Stopping = NEVER,
    keeping: Keeping | None = None,
    runtime: Callable[[Job], Any] = SimulatorRuntime,
    watch: Watch | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Run an algorithm on a problem and return what happened.

    Without an `algorithm` it is FedBiO with control variates and measured steps, five
    local ones a round; where the step of x is measured, a safeguard is added. `start`
    is (x, y), pytrees of numbers or Equinox modules, of which the arrays are optimized;
    the result's `x` and `y` are of the same structure. `sampling` says how many rows a
    sample has and how many clients take part, `metrics(x, y)` adds columns; with one
    more parameter, `server`, it sees the server's `state` and `blocks`, z among them.
    `channel` transforms replies before they are sent. `stopping` may end the run before
    its last round; the result's `ended` says why it did. `keeping` names a folder for
    checkpoints and the result, and how to continue after an interrupt. `runtime(job)`
    makes what computes: `ReferenceRuntime` is slow and names what fails.

    Measured are the rounds 1 to 8, then four while their number doubles (10, 12, 14,
    16, 20, ...), and the last; where a measurement takes longer than a round, only as
    many as take a tenth of the time. With a `stopping` that looks at measurements all
    of them are. `measure_every` rounds may lie between two measurements instead.

    `watch(done, total, newest)` is called about twice a second, `on_round(event)` then
    for every round that was measured, in order; it may call `event.stop()`. Ctrl-C
    stops where the work can be kept. Where clients differ too much for an algorithm
    that inverts their own Hessians, a `HeterogeneityWarning` says so; where the run was
    changed automatically, or its result is not its last point, an
    `InterventionWarning`.
    """
    drawn = sampling or Sampling()
    setting = Setting(problem, data, start, metrics, sampling=drawn, channel=channel)
    default = FedBiOControls(local_steps=5)
    chosen = default if algorithm is None else require_method(algorithm)
    # Automatic steps come with the safeguard.
    method = steadied(chosen, safeguard=OfDistance in relative_kinds(chosen))
    job = setting.job(method, seed)
    # Of several processes the first one says it.
    if jax.process_index() == 0 and heterogeneity.is_soon_measured(job):
        heterogeneity.warn_where_clients_differ(job, method.title)
    recorded = {} if job.channel.is_plain else {"channel": job.channel.describe()}
    result = run_job(
        job,
        rounds,
        measure_every=measure_every,
        stopping=stopping,
        runtime=runtime,
        checkpoints=None if keeping is None else keeping.opened(),
        watch=watch,
        on_round=on_round,
        config={"seed": seed, **recorded},
    )
    if keeping is not None:
        mesh.on_first(lambda: result.save(keeping.folder))
    warn_of_events([result])
    return result


def warn_of_events(results: Sequence[Result]) -> None:
    """Warn the caller of a study, once, where runs were changed automatically."""
    changed = [one for one in results if one.events]
    if not changed or jax.process_index() != 0:
        return
    first, where = changed[0], ""
    if len(results) > 1:
        where = (
            f" in {len(changed)} of {len(results)} runs, the first of them "
            f"{first.algorithm} with seed {first.config.get('seed')}"
        )
    warnings.warn(
        f"automatic intervention{where}: {'; '.join(first.events)}. `result.events` "
        "lists what happened.",
        InterventionWarning,
        stacklevel=3,
    )


def minimize(
    problem: Problem,
    rows: tuple[PyTree, PyTree],
    start: tuple[Upper, Lower],
    algorithm: AbstractAlgorithm,
    *,
    rounds: int,
    batch: int | None | Literal["auto"] = "auto",
    **more: Any,
) -> Result:
    """Run an algorithm on one machine: `run`, where all rows are in one place.

    `rows` are those of the upper and of the lower level, pytrees of arrays with one row
    per sample. A sample has `batch` of them, all if None, and as in `Sampling` if
    "auto". A round is one iteration, unless the algorithm says otherwise; `more` is
    what `run` takes besides.
    """
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise InvalidInputError(
            "`rows` is a pair: those of the upper level, and those of the lower."
        )
    upper, lower = rows
    data = ClientData.from_clients([upper], [lower]).pooled()
    sampling = Sampling(batch)
    return run(
        problem, data, start, algorithm, rounds=rounds, sampling=sampling, **more
    )


def run_job(
    job: Job,
    rounds: int,
    *,
    runtime: Callable[[Job], Any] = SimulatorRuntime,
    task: str = "custom",
    config: dict[str, Any],
    **driving: Any,
) -> Result:
    """Run a job that was checked; `task` and `config` are recorded as given.

    `driving` is what `execute` takes besides.
    """
    return result_of(job, executed(runtime(job), rounds, **driving), task, config)


class Ran(NamedTuple):
    """How a run went: its outcome, its costs, and what is recorded of it."""

    outcome: Outcome
    ledger: Ledger
    recorded: dict[str, Any]


def executed(
    runtime: Any,
    rounds: int,
    *,
    measure_every: int | None = 1,
    stopping: Stopping = NEVER,
    **driving: Any,
) -> Ran:
    """Run to the end; `driving` is what `execute` takes besides."""
    ledger = Ledger(runtime.job)
    privacy_spent(runtime.job, ledger, rounds)  # or why not, before it runs
    every = measured_every(ledger, measure_every, stopping)
    _begin_compiling(runtime, rounds, every, stopping)
    how = {"measure_every": every, "stopping": stopping}
    outcome = execute(runtime, rounds, **how, **driving)
    recorded = {"rounds": rounds, "runtime": runtime.name, "measure_every": every}
    return Ran(outcome, ledger, recorded)


def measured_every(
    ledger: Ledger, measure_every: int | None, stopping: Stopping
) -> int | None:
    """Return how often to measure: always where it must be seen that a run is over.

    Where a measurement takes longer than a round, so seldom that all of them are about
    a tenth of the run.
    """
    if measure_every is not None:
        return measure_every
    if stopping.looks or ledger.job.algorithm.finishes:
        return 1
    rounds = ledger.rounds_of_a_measurement()
    return None if rounds <= 1 else math.ceil(_TENTH * rounds)


def _begin_compiling(
    runtime: Any, rounds: int, measure_every: int | None, stopping: Stopping
) -> None:
    """Let the rounds compile while what comes before them is traced and runs.

    Processes that joined must compile in the same order. Errors are raised where the
    program is awaited.
    """
    if (
        isinstance(runtime, SimulatorRuntime)
        and runtime.job.algorithm.setup()
        and jax.process_count() == 1
    ):
        runtime.prepare(first_span(runtime, rounds, measure_every, stopping))


def result_of(
    job: Job,
    ran: Ran,
    task: str,
    config: dict[str, Any],
    spent: dict[str, float] | None = None,
) -> Result:
    """Put together what a run leaves behind.

    `spent` is the privacy it took, where that was counted during the run.
    """
    outcome, ledger, algorithm = ran.outcome, ran.ledger, job.algorithm
    rounds = int(outcome.columns["round"][-1])
    costs = ledger.cumulative(job.key, rounds)
    measured = outcome.columns["round"] - 1
    last = algorithm.point(outcome.state.joined())
    best = _best(job, outcome)
    point = last if best is None else best.point
    spent = privacy_spent(job, ledger, rounds) if spent is None else spent
    reply = {}
    if job.chances is not None:  # the lowest and the highest
        ends = np.min(job.chances), np.max(job.chances)
        reply["participation"] = [round(float(end), 6) for end in ends]
    config = {
        "clients": job.clients,
        "participants": job.participants,
        **reply,
        "batch": job.upper_batch,
        "precision": str(jax.tree.leaves(job.x)[0].dtype),
        **ran.recorded,
        **config,
        "parameters": algorithm.parameters(),
    }
    return Result(
        task=task,
        algorithm=algorithm.title,
        config=to_plain(config),
        versions=versions(),
        columns={
            **outcome.columns,
            **{name: column[measured] for name, column in costs.items()},
        },
        point=named_point(point.x, point.y),
        final=_final(outcome, best),
        counts={**ledger.summary(job.key, rounds), **spent},
        seconds=outcome.seconds,
        ended=outcome.ended,
        events=algorithm.events(outcome.state.server) + _event(outcome, best),
        levels=job.problem.whole(*jax.device_put((point.x, point.y))),
        last={} if best is None else named_point(last.x, last.y),
    )


def named_point(x: PyTree, y: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of both levels by their names."""
    return {**named_leaves("x", x), **named_leaves("y", y)}


def _best(job: Job, outcome: Outcome) -> Any:
    """Return the best point that was measured, if it is clearly better than the last.

    A run of theory, which knows the gradient of Phi, is judged by its last point.
    """
    server, columns = outcome.state.server, outcome.columns
    failed = job.algorithm.gave_up(server)
    if failed:
        raise DivergedError(failed)
    best = job.algorithm.best(server)
    if best is None or is_any(job.private) or _OF_THEORY in columns:
        return None
    if "upper_loss" not in columns or int(best.round) == int(columns["round"][-1]):
        return None
    slopes = columns.get("lower_gradient_norm", [np.inf])
    last = float(columns["upper_loss"][-1]), float(slopes[-1])
    return best if best.is_better_than(*last) else None


def _final(outcome: Outcome, best: Any) -> dict[str, float]:
    """Return what was measured at the point of the result; NaN if nothing was."""
    columns, row = outcome.columns, -1
    if best is not None:
        found = np.flatnonzero(columns["round"] == int(best.round))
        if not found.size:
            unknown = dict.fromkeys(columns, np.nan)
            return {**unknown, "round": float(best.round)}
        row = int(found[0])
    return {name: float(column[row]) for name, column in columns.items()}


def _event(outcome: Outcome, best: Any) -> list[str]:
    if best is None:
        return []
    loss, end = outcome.columns["upper_loss"][-1], outcome.columns["round"][-1]
    return [
        f"the result is the point after round {int(best.round)}, where the upper loss "
        f"was {float(best.loss):.4g}; after the last round, {int(end)}, it was "
        f"{float(loss):.4g} (`result.last`)"
    ]


def versions() -> dict[str, str]:
    """Return the versions of what computed a result, and on which device."""
    packages = ("fedbilevel", "jax", "jaxlib", "equinox", "numpy")
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "device": f"{device.platform}: {device.device_kind}, {jax.device_count()}",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
