"""The contract between a runtime and its driver: rounds and their results."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import numpy as np

from fedbilevel._types import Key
from fedbilevel.algorithms import AbstractAlgorithm, every_phase
from fedbilevel.errors import NonFiniteError
from fedbilevel.runtime import checkpoint
from fedbilevel.runtime.exchange import start_state
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.stopping import Rule, Track, is_measured
from fedbilevel.schedules import is_known

Found = tuple[int, int, int]  # round, phase and client of a reply that is not finite


class Span(eqx.Module):
    """Rounds `start` to `stop` of `total`, measured every `every` rounds, or `SPARSE`.

    `limits` are the rounds after which single runs of a sweep must end: they are
    measured, too. With `ends` the stopping rule may end a run before; `track` is its
    state. Inside the compiled program all numbers are arrays.
    """

    start: Any
    stop: Any
    total: Any
    every: Any
    limits: Any
    rule: Rule
    track: Track
    ends: bool = eqx.field(static=True)

    def is_due(self, done: Any) -> Any:
        """Say whether there is a measurement after so many rounds."""
        last = (done == self.total) | (done == self.limits).any()
        return is_measured(done, self.every) | last

    def measured(self, done: int) -> np.ndarray:
        """Return the rounds up to `done` after which there is a measurement."""
        rounds = range(self.start + 1, done + 1)
        return np.asarray([r for r in rounds if self.is_due(r)], np.int64)


class Advance(NamedTuple):
    """The results of some rounds.

    `rows` have a row for every measurement; `done` counts the rounds that are over;
    `place` is where a reply was not finite, so that the run cannot continue.
    """

    state: Any
    rows: dict[str, np.ndarray]
    done: int
    track: Track
    place: Found | None = None


@runtime_checkable
class Runtime(Protocol):
    """The driver's interface to a runtime, with the parts that most share.

    `runs` is the shape of what a sweep carries, () for a single run; `roots` are the
    keys of the runs.
    """

    job: Job
    compile_seconds: float = 0.0

    @property
    def runs(self) -> tuple[int, ...]:
        """The number of runs of a sweep, as a shape."""
        return ()

    @property
    def roots(self) -> Sequence[Key]:
        """The keys of all runs."""
        return (self.job.key,)

    def fingerprint(self, every: int) -> str:
        """Return what differs from all other runs, measured every so many rounds."""
        return checkpoint.fingerprint(self.job, every)

    def blank(self) -> Any:
        """Return a state like those of a run: that before the first exchange."""
        return start_state(self.job)

    def start(self) -> tuple[Any, Found | None]:
        """Return the state before the first round, and what failed before it."""
        ...

    def advance(self, state: Any, span: Span) -> Advance:
        """Run some rounds."""
        ...

    def fetch(self, state: Any) -> Any:
        """Return a state on the host."""
        ...

    def load(self, state: Any) -> Any:
        """Take a fetched state."""
        ...


def failure(
    job: Job, found: Found, last_good: str | None = None, *, due: bool = False
) -> NonFiniteError:
    """Name the place of a reply that was not finite; round -1 is the setup.

    Before the first step is over the losses themselves may be the cause.
    """
    index, number, client = found
    phases = job.algorithm.setup() if index < 0 else job.algorithm.phases()
    name = every_phase(phases)[number].name
    known = {"theta": _theta(job.algorithm), "frozen_type": job.problem.coarse_type}
    if index <= 0:
        known["cause"] = job.broken_derivative(client)
    return NonFiniteError(index + 1, name, client, last_good, due=due, **known)


def _theta(algorithm: AbstractAlgorithm) -> float | None:
    """Return the step of a method's Neumann series, if it has one."""
    for part in (algorithm, *vars(algorithm).values()):
        theta = getattr(part, "theta", None)
        if theta is not None and is_known(theta) and np.ndim(theta) == 0:
            return float(theta)
    return None
