"""Many runs as one program: step sizes and random seeds are batched, not repeated."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Int

from fedbilevel._types import Key
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError, NonFiniteError
from fedbilevel.runtime import program
from fedbilevel.runtime.checkpoint import fingerprint
from fedbilevel.runtime.contract import Advance, Found, Span, failure
from fedbilevel.runtime.driver import Outcome
from fedbilevel.runtime.exchange import start_state
from fedbilevel.runtime.job import Job, State
from fedbilevel.runtime.simulator import CompiledRuntime, first_failure, layout_for
from fedbilevel.runtime.stopping import Stopping, is_measured, spacing

_NOWHERE = (-2, -2, program.NOBODY)  # round, phase and client of no failure


class SweepState(eqx.Module):
    """The states of all runs, stacked, and where the first reply of each failed."""

    state: State
    failed: Int[Array, "runs 3"]


class SweepRuntime(CompiledRuntime):
    """Runs every (algorithm, seed) of two lists of one length side by side.

    The algorithms may differ in their numbers only; an empty list repeats the job's
    own algorithm, or the seed 0. A run that diverges does not stop the others.
    """

    def __init__(
        self,
        job: Job,
        *,
        algorithms: Sequence[AbstractAlgorithm] = (),
        seeds: Sequence[int] = (),
        clients_at_once: int | None = None,
    ) -> None:
        many, self._roots = _pairs(job, algorithms, seeds)
        self._different = (_stacked(many), jnp.stack(self._roots))
        layout = layout_for(job, clients_at_once, sweeps=True)
        super().__init__(job, layout, self._different)

    @property
    def runs(self) -> tuple[int, ...]:
        """The number of runs."""
        return (len(self._roots),)

    @property
    def roots(self) -> Sequence[Key]:
        """The keys of all runs."""
        return self._roots

    def fingerprint(self, every: int) -> str:
        """Return the fingerprint of the job, and of what differs between the runs."""
        return fingerprint(self.job, every, self._different)

    def blank(self) -> SweepState:
        """Return the state before the first exchange."""
        (runs,) = self.runs
        state = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (runs, *leaf.shape)),
            start_state(self.job),
        )
        return SweepState(state, jnp.tile(jnp.asarray(_NOWHERE, jnp.int32), (runs, 1)))

    def start(self) -> tuple[SweepState, Found | None]:
        """Return the state before round 0, after any setup phases."""
        blank = self.blank()
        state, found = self._set_up(self.layout.place_state(blank.state))
        return self._after(SweepState(state, blank.failed), found)

    def advance(self, state: SweepState, span: Span) -> Advance:
        """Run some rounds."""
        step, found = self._advanced(state.state, span)
        after, place = self._after(SweepState(step.state, state.failed), found)
        return step._replace(state=after, place=place)

    def prepare(self, span: Span) -> None:
        """Compile what `start` and `advance` will run."""
        state = self.layout.place_state(self.blank().state)
        if self.job.algorithm.setup():
            self._compiled(self._asked_setup(state))
        self._compiled(self._asked_rounds(state, span))

    def fetch(self, state: SweepState) -> SweepState:
        """Return the state on the host, one entry per run and client."""
        inner = self.layout.fetch_state(state.state)
        return jax.tree.map(np.asarray, SweepState(inner, state.failed))

    def load(self, state: SweepState) -> SweepState:
        """Put a fetched state back on the devices."""
        inner = self.layout.place_state(jax.tree.map(jnp.asarray, state.state))
        return SweepState(inner, jnp.asarray(state.failed))

    def _after(
        self, state: SweepState, found: program.Failure | None
    ) -> tuple[SweepState, Found | None]:
        """Note which runs failed; say where the first did, if all have."""
        if found is None:
            return state, None
        places, earlier = np.asarray(found), np.asarray(state.failed)
        known = earlier[:, 2:] != program.NOBODY
        fine = places[:, 2:] == program.NOBODY
        failed = np.where(known | fine, earlier, places)
        state = SweepState(state.state, jnp.asarray(failed, jnp.int32))
        all_did = (failed[:, 2] != program.NOBODY).all()
        return state, first_failure(failed[0]) if all_did else None


def single_outcomes(
    runtime: SweepRuntime,
    outcome: Outcome,
    stopping: Stopping,
    rounds: int,
    measure_every: int | None,
) -> list[Outcome | NonFiniteError]:
    """Return what each run of a sweep came to; seconds are a share of those of all."""
    (runs,), track, every = runtime.runs, outcome.track, spacing(measure_every)
    assert track is not None
    seconds = {name: took / runs for name, took in outcome.seconds.items()}
    found: list[Outcome | NonFiniteError] = []
    for run in range(runs):
        place = first_failure(outcome.state.failed[run])
        if place is not None:
            error = failure(runtime.job, place)
            error.add_note(f"This happened in run {run} of the sweep, counted from 0.")
            found.append(error)
            continue
        measured = outcome.columns["round"]
        last = int(track.ended[run]) or int(measured[-1])
        own = (measured <= last) & (is_measured(measured, every) | (measured == last))
        columns = {
            name: column[own] if name == "round" else column[own, run]
            for name, column in outcome.columns.items()
        }
        state = jax.tree.map(lambda leaf, run=run: leaf[run], outcome.state.state)
        ended = outcome.ended
        if int(track.reason[run]):
            ended = stopping.why(int(track.reason[run]), last, rounds)
        found.append(Outcome(state, columns, seconds, ended))
    return found


def _pairs(
    job: Job, algorithms: Sequence[AbstractAlgorithm], seeds: Sequence[int]
) -> tuple[list[AbstractAlgorithm], list[Key]]:
    """Return the algorithm and the key of every run."""
    runs = max(len(algorithms), len(seeds))
    many = list(algorithms) or [job.algorithm] * runs
    roots = [jr.key(seed) for seed in (list(seeds) or [0] * runs)]
    if runs == 0 or len(many) != len(roots):
        raise InvalidInputError(
            f"a sweep pairs algorithms and seeds one to one, got {len(algorithms)} and "
            f"{len(seeds)}. Leave one list empty to repeat it."
        )
    if algorithms:
        job.check_curvature(*algorithms)
    return many, roots


def _stacked(many: Sequence[AbstractAlgorithm]) -> AbstractAlgorithm:
    parts = [eqx.partition(one, eqx.is_array) for one in many]
    arrays, static = zip(*parts, strict=True)
    if any(not eqx.tree_equal(one, static[0]) for one in static[1:]):
        raise InvalidInputError(
            "the algorithms of a sweep must differ in numbers only: counts such as "
            "local_steps or q and kinds of parts need a run each."
        )
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
    return eqx.combine(stacked, static[0])
