"""The compiled program: rounds in a loop, clients mapped, nothing on the host between.

The number of rounds is an input, so one compilation serves every chunk of a run. Rows
of measurements are written into a buffer of fixed size. The runs of a sweep go through
the loop side by side, each round mapped over them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, PyTree

from fedbilevel._types import Key, Keys
from fedbilevel.algorithms import AbstractAlgorithm, Phase
from fedbilevel.problem.every_client import mean_of_clients, weight_of_client
from fedbilevel.problem.running_once import runs_once
from fedbilevel.problem.stored_rows import fetched
from fedbilevel.runtime import keys
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.exchange import (
    Link,
    asked_clients,
    attendance,
    client_measurement,
    combine_measurements,
    for_place,
    server_turn,
    start_kept,
    start_state,
)
from fedbilevel.runtime.job import ABSENT, Job, Kept, State, is_renewed
from fedbilevel.runtime.layout import Layout
from fedbilevel.runtime.phase_loop import compiled_loop, run_phases
from fedbilevel.runtime.stopping import RUNNING, Track
from fedbilevel.startup.random_bits import written_out

CAPACITY = 512  # rows of measurements one call can return
NOBODY = jnp.iinfo(jnp.int32).max
# Round, phase and client of the first reply that was not finite; client NOBODY where
# there was none.
Failure = Int[Array, "... 3"]


class Progress(eqx.Module):
    """The state of the loop over rounds."""

    state: State
    rows: dict[str, Array]
    used: Int[Array, ""]
    failure: Failure
    track: Track
    done: Int[Array, ""]


# Differences between the runs of a sweep.
Varying = tuple[AbstractAlgorithm, Key | Keys]
# Maps a function of a job, and of what each run carries, over the runs.
Runs = Callable[..., Any]


def advance(fixed: tuple[Layout, Job], varying: Varying, state: State, span: Span):
    """Run some rounds; return state, rows of measurements, their number, and more."""
    return _on_devices(_rounds, fixed, varying, state, span)


def setup(fixed: tuple[Layout, Job], varying: Varying, state: State):
    """Run the phases that come before the first round."""
    return _on_devices(_setup, fixed, varying, state, None)


def measure(fixed: tuple[Layout, Job], varying: Varying, state: State):
    """Measure alone; what clients keep may be stored elsewhere."""
    return _on_devices(_measured, fixed, varying, state, None)


def result_like(state: State, span: Span | None = None) -> Any:
    """Return what has modules where the result of one of these functions has them."""
    return state, 0 if span is None else (0, 0, 0, span.track, 0)


def attending(job: Job, stage: int, index: Array) -> Bool[Array, " clients"]:
    """Mark the clients asked at least once in a round, or in the setup."""

    def visit(asked: Array, phase: Phase, number: int, turn: Array | int) -> Array:
        return asked.at[asked_clients(job, phase, (stage, number), turn)].set(True)

    nobody = jnp.zeros(job.clients, bool)
    return run_phases(job, stage, index, nobody, visit, compiled_loop)


def _on_devices(function: Any, fixed: Any, varying: Any, state: State, span: Any):
    layout, job = fixed
    data, rest = job.data, eqx.tree_at(lambda one: one.data, job, None)
    arrays, static = eqx.partition((rest, varying, span), eqx.is_array)

    def body(arrays: Any, data: Any, state: State):
        rest, varying, span = eqx.combine(arrays, static)

        def on_runs(of_run: Callable, *carried: Any) -> Any:
            def bound(varying: Varying, *carried: Any) -> Any:
                algorithm, key = varying
                own = {"algorithm": algorithm, "key": written_out(key), "data": data}
                return of_run(replace(rest, **own), *carried)

            mapped = eqx.filter_vmap(bound) if layout.sweeps else bound
            return mapped(varying, *carried)

        return function(layout, on_runs, state, span)

    whole, specs = PartitionSpec(), layout.state_specs(state)
    parts = (whole, layout.data_spec(data), specs)
    return layout.on_devices(body, parts, (specs, whole))(arrays, data, state)


def _setup(layout: Layout, on_runs: Runs, state: State, span: None):
    def of_run(job: Job, state: State):
        return _all_phases(layout, job, keys.SETUP, 0, (state, _no_failure()))

    return on_runs(of_run, state)


def _measured(layout: Layout, on_runs: Runs, state: State, span: None):
    return state, on_runs(lambda job, state: _measure(layout, job, state), state)


def _all_phases(
    layout: Layout,
    job: Job,
    stage: int,
    index: Array | int,
    begin: tuple[State, Failure],
) -> tuple[State, Failure]:
    """Run every exchange of one round, or of the setup."""
    shown = index if stage == keys.ROUNDS else -1

    def visit(carry: Any, phase: Phase, number: int, turn: Array | int):
        state, failure = carry
        state, bad = _exchange(layout, job, state, phase, (stage, number), turn)
        return state, _first(failure, shown, number, bad)

    return run_phases(job, stage, index, begin, visit, compiled_loop)


def _no_failure(runs: tuple[int, ...] = ()) -> Failure:
    return jnp.full((*runs, 3), NOBODY, jnp.int32)


def _first(failure: Failure, index: Array | int, number: int, bad: Array) -> Failure:
    found = jnp.stack([jnp.asarray(one, jnp.int32) for one in (index, number, bad)])
    fresh = (failure[2] == NOBODY) & (bad != NOBODY)
    return jnp.where(fresh, found, failure)


def _rounds(layout: Layout, on_runs: Runs, state: State, span: Span):
    def measured(state: State) -> dict[str, Array]:
        return on_runs(lambda job, state: _measure(layout, job, state), state)

    def one_round(progress: Progress) -> Progress:
        index = progress.done

        def of_run(job: Job, state: State, failure: Failure):
            return _all_phases(layout, job, keys.ROUNDS, index, (state, failure))

        state, failure = on_runs(of_run, progress.state, progress.failure)
        running = progress.track.reason == RUNNING
        if span.ends and layout.sweeps:
            # A run that has ended waits for the others where it is.
            state = _where(running, state, progress.state)
            failure = _where(running, failure, progress.failure)
        done, due = index + 1, span.is_due(index + 1)

        def write(rows: dict[str, Array]) -> dict[str, Array]:
            values = measured(state)
            return {n: rows[n].at[progress.used].set(values[n]) for n in rows}

        def remembered(job: Job, server: PyTree, newest: dict[str, Array]) -> PyTree:
            return job.algorithm.measured(server, newest, done)

        def finished(job: Job, server: PyTree) -> Array:
            return jnp.asarray(job.algorithm.finished(server))

        rows = jax.lax.cond(due, write, lambda rows: rows, progress.rows)
        newest = {name: column[progress.used] for name, column in rows.items()}
        # Where nothing was measured there is no number. A branch around what is
        # remembered would take longer to compile than all of it.
        seen = {name: jnp.where(due, value, jnp.nan) for name, value in newest.items()}
        state = replace(state, server=on_runs(remembered, state.server, seen))
        track = progress.track
        if span.ends:
            own = due & span.rule.counts(done, span.every)
            # Only where it was measured: the last round always is.
            over = own & on_runs(finished, state.server)
            track = track.seen(span.rule, newest, own).after(span.rule, done, over)
        used = progress.used + due.astype(jnp.int32)
        return Progress(state, rows, used, failure, track, done)

    shapes = jax.eval_shape(measured, state)
    span.rule.check(shapes)
    rows = {n: jnp.zeros((CAPACITY, *s.shape), s.dtype) for n, s in shapes.items()}
    nobody, zero = _no_failure(span.track.reason.shape), jnp.zeros((), jnp.int32)
    begin = Progress(state, rows, zero, nobody, span.track, span.start)

    def goes_on(progress: Progress) -> Array:
        more = progress.done < span.stop
        if not span.ends:
            return more
        return more & jnp.any(progress.track.reason == RUNNING)

    end = jax.lax.while_loop(goes_on, one_round, begin)
    return end.state, (end.rows, end.used, end.failure, end.track, end.done)


def _exchange(
    layout: Layout,
    job: Job,
    state: State,
    phase: Phase,
    where: tuple[int, int],
    index: Array | int,
) -> tuple[State, Array]:
    """Run one exchange; also return the first client whose reply is not finite."""
    count, link = job.cohort(phase), Link.of(job, phase, where)
    everybody = asked_clients(job, phase, where, index, layout.at_keys)
    places, ids, position = _on_this_device(layout, everybody)
    weights = jnp.where(ids < job.clients, job.data.weights[position], 0)
    all_came = attendance(job, state, where, index, everybody)
    present = jnp.ones(count, bool) if all_came is None else all_came > ABSENT
    before_replies = server_turn(job, where, index, everybody, jnp.ones(count, bool))
    sent = link.sent(state.server, before_replies)

    def local(identity: Array, place: Array, held: Array, kept: Kept):
        turn = keys.client_turn(job.key, where, identity, index)
        return link.answer(for_place(sent, place), kept, turn, held)

    whole = held = state.clients
    if not layout.everyone:
        held = jax.tree.map(lambda leaf: leaf[_place_of(state, position)], held)
    before, came = held, None if all_came is None else all_came[places]
    if came is not None:
        weights = jnp.where(came > ABSENT, weights, 0)
    if job.attendance is not None:
        held = _where(is_renewed(came), start_kept(job), held)
    held, replies, finite = layout.over_places(local, ids, places, position, held)
    reply = link.reduced(replies, weights, layout.total, layout.together)
    came_of_all = _share_of_weight(layout, job, weights)
    turn = server_turn(job, where, index, everybody, present, came_of_all)
    server = link.absorb(state.server, reply, turn)
    if came is not None:
        held = _where(came > ABSENT, held, before)
    if not layout.everyone:
        places, new = layout.together((_place_of(state, ids), held))
        held = jax.tree.map(
            lambda kept, one: kept.at[places].set(one, mode="drop"), whole, new
        )
    bad = jnp.min(jnp.where(finite | (weights <= 0), NOBODY, ids))
    exchanges = None if state.exchanges is None else state.exchanges + 1
    after = replace(state, server=server, clients=held, exchanges=exchanges)
    return after, layout.least(bad)


def _share_of_weight(layout: Layout, job: Job, weights: Array) -> Array:
    """Return the participants' share of all clients' weight."""
    whole = jnp.sum(job.data.weights)
    # Of clients in cohorts every device has all.
    whole = layout.total(whole) if layout.spreads(job.data) else whole
    return layout.total(jnp.sum(weights)) / whole


def _where(chosen: Array, these: PyTree, others: PyTree) -> PyTree:
    """Choose by the leading axis; leaves without one are the same for all."""

    def pick(this: Array, other: Array) -> Array:
        flags = chosen.reshape((-1,) + (1,) * (other.ndim - 1))
        return jnp.where(flags, this, other)

    return jax.tree.map(pick, these, others)


def _on_this_device(layout: Layout, asked: Array) -> tuple[Array, Array, Array]:
    """Return the places of this device, their clients, and where their data lie.

    Places beyond the last one are padding: there the number of the client is that of
    all clients.
    """
    count, each = asked.shape[0], layout.places(asked.shape[0])
    here = jnp.arange(each, dtype=jnp.int32) + layout.device() * each
    places = jnp.minimum(here, count - 1)
    if layout.everyone:
        return places, here, jnp.arange(each, dtype=jnp.int32)
    ids = jnp.where(here < count, asked[places], layout.clients)
    return places, ids, jnp.minimum(ids, layout.clients - 1)


def _place_of(state: State, ids: Array) -> Array:
    """Return where clients are among those whose states are there."""
    return ids if state.places is None else state.places[ids]


def measured_at_start(job: Job) -> dict[str, float]:
    """Return the columns of a run before its first exchange: the same for all seeds."""
    return {name: float(value) for name, value in _columns_at_start(job).items()}


@runs_once
def _columns_at_start(job: Job) -> dict[str, Array]:
    alone = Layout(job.clients, job.clients, devices=1, at_once=None)
    return _measure(alone, job, start_state(job))


def _measure(layout: Layout, job: Job, state: State) -> dict[str, Array]:
    everybody = jnp.arange(layout.clients, dtype=jnp.int32)
    _, ids, position = _on_this_device(layout, everybody)
    weights = jnp.where(ids < layout.clients, job.data.weights[position], 0)

    def of_client(place: Array):
        own = fetched(jax.tree.map(lambda leaf: leaf[place], state.clients.own))
        return client_measurement(job, place, state.server, own)

    share = weights / layout.total(jnp.sum(weights))
    weight = weight_of_client(job.problem, job.data, job.x, job.y)
    part = mean_of_clients(of_client, position, share, weight)
    return combine_measurements(job, state.server, layout.total(part))
