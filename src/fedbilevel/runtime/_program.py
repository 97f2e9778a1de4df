"""The compiled program: rounds in a loop, clients mapped, nothing on the host between.

The number of rounds is an input, so one compilation serves every chunk of a run. Rows
of measurements are written into a buffer of fixed size.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree

from fedbilevel import _tree
from fedbilevel._types import Key
from fedbilevel.algorithms import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.channels import weighted_mean
from fedbilevel.runtime import _keys
from fedbilevel.runtime._exchange import (
    Link,
    absorb,
    client_measurement,
    combine_measurements,
    reduce_replies,
)
from fedbilevel.runtime._layout import Layout
from fedbilevel.runtime._walk import compiled_loop, drawn_times, walk
from fedbilevel.runtime.job import ABSENT, RENEWED, Job, Kept, State, start_kept

CAPACITY = 512  # rows of measurements one call can return
NOBODY = jnp.iinfo(jnp.int32).max


class Span(eqx.Module):
    """Rounds `start` to `stop` of `total`, measured every `every` rounds."""

    start: Int[Array, ""]
    stop: Int[Array, ""]
    total: Int[Array, ""]
    every: Int[Array, ""]


class Failure(eqx.Module):
    """The first reply that was not finite; client NOBODY where there was none."""

    round: Int[Array, ""]
    phase: Int[Array, ""]
    client: Int[Array, ""]


class Progress(eqx.Module):
    """What the loop over rounds carries."""

    state: State
    rows: dict[str, Array]
    used: Int[Array, ""]
    failure: Failure


Varying = tuple[AbstractAlgorithm, Key]  # what differs between the runs of a sweep


def advance(fixed: tuple[Layout, Job], varying: Varying, state: State, span: Span):
    """Run some rounds; return state, rows of measurements, their number, failure."""
    return _on_devices(_rounds, fixed, varying, state, span)


def setup(fixed: tuple[Layout, Job], varying: Varying, state: State):
    """Run the phases that come before the first round."""
    return _on_devices(_setup, fixed, varying, state, None)


def _on_devices(function: Any, fixed: Any, varying: Any, state: State, span: Any):
    layout, job = fixed
    data, rest = job.data, eqx.tree_at(lambda one: one.data, job, None)
    arrays, static = eqx.partition((rest, varying, span), eqx.is_array)

    def body(arrays: Any, data: Any, state: State):
        rest, varying, span = eqx.combine(arrays, static)

        def one_run(varying: Varying, state: State):
            job = eqx.tree_at(
                lambda one: (one.algorithm, one.key, one.data),
                rest,
                (*varying, data),
                is_leaf=lambda leaf: leaf is None,
            )
            return function(layout, job, state, span)

        runs = eqx.filter_vmap(one_run) if layout.sweeps else one_run
        return runs(varying, state)

    if layout.devices == 1:
        return body(arrays, data, state)
    specs = layout.state_specs(state)
    return jax.shard_map(
        body,
        mesh=layout.mesh(),
        in_specs=(PartitionSpec(), layout.data_spec(), specs),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )(arrays, data, state)


def _setup(layout: Layout, job: Job, state: State, span: None):
    begin = (state, _no_failure())
    return _all_phases(layout, job, job.algorithm.setup(), _keys.SETUP, 0, begin)


def _all_phases(
    layout: Layout,
    job: Job,
    phases: Phases,
    stage: int,
    index: Array | int,
    begin: tuple[State, Failure],
) -> tuple[State, Failure]:
    """Run every exchange of one round, or of the setup."""
    shown = index if stage == _keys.ROUNDS else -1

    def visit(carry: Any, phase: Phase, number: int, turn: Array | int):
        state, failure = carry
        state, bad = _exchange(layout, job, state, phase, (stage, number), turn)
        return state, _first(failure, shown, number, bad)

    times = drawn_times(job.key, stage)
    return walk(phases, begin, index, visit, compiled_loop, times)


def _no_failure() -> Failure:
    nothing = jnp.asarray(NOBODY, jnp.int32)
    return Failure(nothing, nothing, nothing)


def _first(failure: Failure, index: Array | int, number: int, bad: Array) -> Failure:
    found = Failure(jnp.asarray(index, jnp.int32), jnp.asarray(number, jnp.int32), bad)
    fresh = (failure.client == NOBODY) & (bad != NOBODY)
    return _tree.select(fresh, found, failure)


def _rounds(layout: Layout, job: Job, state: State, span: Span):
    shapes = jax.eval_shape(lambda: _measure(layout, job, state))
    rows = {name: jnp.zeros(CAPACITY, shape.dtype) for name, shape in shapes.items()}
    zero = jnp.asarray(0, jnp.int32)

    def one_round(index: Array, progress: Progress) -> Progress:
        state, failure = _all_phases(
            layout,
            job,
            job.algorithm.phases(),
            _keys.ROUNDS,
            index,
            (progress.state, progress.failure),
        )
        due = ((index + 1) % span.every == 0) | (index + 1 == span.total)

        def write(rows: dict[str, Array]) -> dict[str, Array]:
            values = _measure(layout, job, state)
            return {
                name: rows[name].at[progress.used].set(values[name]) for name in rows
            }

        rows = jax.lax.cond(due, write, lambda rows: rows, progress.rows)
        used = progress.used + due.astype(jnp.int32)
        return Progress(state, rows, used, failure)

    begin = Progress(state, rows, zero, _no_failure())
    end = jax.lax.fori_loop(span.start, span.stop, one_round, begin)
    return end.state, (end.rows, end.used, end.failure)


def _exchange(
    layout: Layout,
    job: Job,
    state: State,
    phase: Phase,
    where: tuple[int, int],
    index: Array | int,
) -> tuple[State, Array]:
    """Run one exchange; also return the first client whose reply is not finite."""
    ids, position = _participants(layout, job, where, index)
    weights = jnp.where(ids < layout.clients, job.data.weights[position], 0)
    message, link = phase.down(state.server), Link.of(job, phase, where)

    def local(identity: Array, place: Array, kept: Kept):
        turn = Turn(_keys.client_key(job.key, *where, identity), index)
        return link.answer(message, kept, turn, place)

    before = held = state.clients
    came = _attendance(layout, job, state, ids)
    if came is not None:
        weights = jnp.where(came > ABSENT, weights, 0)
        fresh = start_kept(job)
        held = _where(came == RENEWED, fresh, held)
    if not layout.everyone:
        held = jax.tree.map(lambda leaf: leaf[position], before)
    held, replies, finite = layout.over_places(local, ids, position, held)
    mean = reduce_replies(job, replies, weights, layout.total, layout.together)
    server = absorb(job, phase, state.server, mean)
    if came is not None:
        held = _where(came > ABSENT, held, before)
    if not layout.everyone:
        held = _put_back(layout, before, ids, held)
    bad = jnp.min(jnp.where(finite | (weights <= 0), NOBODY, ids))
    done = None if state.exchanges is None else state.exchanges + 1
    return State(server, held, done), layout.least(bad)


def _attendance(layout: Layout, job: Job, state: State, ids: Array) -> Array | None:
    """Return how the clients of this device attended, if that was recorded."""
    if job.attendance is None:
        return None
    return job.attendance[state.exchanges, jnp.minimum(ids, layout.clients - 1)]


def _where(chosen: Array, these: PyTree, others: PyTree) -> PyTree:
    """Choose by the leading axis; leaves without one are the same for all."""

    def pick(this: Array, other: Array) -> Array:
        flags = chosen.reshape((-1,) + (1,) * (other.ndim - 1))
        return jnp.where(flags, this, other)

    return jax.tree.map(pick, these, others)


def _participants(
    layout: Layout, job: Job, where: tuple[int, int], index: Array | int
) -> tuple[Array, Array]:
    """Return who works in this device's places, and where their data lie."""
    places = (
        jnp.arange(layout.places, dtype=jnp.int32) + layout.device() * layout.places
    )
    if layout.everyone:
        return places, jnp.arange(layout.places, dtype=jnp.int32)
    chosen = _keys.draw_cohort(
        job.key, *where, index, layout.clients, layout.participants
    )
    beyond = jnp.full(layout.places * layout.devices, layout.clients, chosen.dtype)
    ids = beyond.at[: layout.participants].set(chosen)[places]
    return ids, jnp.minimum(ids, layout.clients - 1)


def _put_back(layout: Layout, clients: PyTree, ids: Array, held: PyTree) -> PyTree:
    ids, held = layout.together((ids, held))
    return jax.tree.map(
        lambda kept, new: kept.at[ids].set(new, mode="drop"), clients, held
    )


def _measure(layout: Layout, job: Job, state: State) -> dict[str, Array]:
    places = jnp.arange(layout.client_places, dtype=jnp.int32)
    ids = places + layout.device() * layout.client_places
    position = places if layout.everyone else jnp.minimum(ids, layout.clients - 1)
    weights = jnp.where(ids < layout.clients, job.data.weights[position], 0)

    def of_client(place: Array):
        own = jax.tree.map(lambda leaf: leaf[place], state.clients.own)
        return client_measurement(job, place, state.server, own)

    # One client at a time: a measurement reads all rows, and memory is what it costs.
    values = jax.lax.map(of_client, position)
    mean = weighted_mean(values, weights, layout.total)
    return combine_measurements(job, state.server, mean)
