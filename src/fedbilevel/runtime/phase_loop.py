"""Runs the phases of a round in order, on any runtime and with any kind of loop."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel._types import Key
from fedbilevel.algorithms import Phase, Phases, Repeat, every_phase
from fedbilevel.runtime import keys
from fedbilevel.runtime.job import Job

# carry, phase, its number, how often it ran before -> carry
Visit = Callable[[Any, Phase, int, Any], Any]
# times, body(repetition, carry) -> carry, carry -> carry
Loop = Callable[[Any, Callable[[Any, Any], Any], Any], Any]
# repeat, number of its first phase, how often it ran before -> times
Times = Callable[[Repeat, int, Any], Any]


def run_phases(
    job: Job,
    stage: int,
    index: Any,
    carry: Any,
    visit: Visit,
    loop: Loop,
    times: Times | None = None,
    phases: Phases | None = None,
) -> Any:
    """Visit every exchange of the round `index`, or of the setup.

    A phase inside a `Repeat` has run index * times + repetition times before, and one
    of `every` so many rounds index // every times. How often a random one runs is
    drawn, unless `times` says it. `phases` are the job's, where they were made before.
    """
    times = times or drawn_times(job.key, stage)

    def visited(carry: Any, phase: Phase, number: int, index: Any) -> Any:
        if phase.every == 1:
            return visit(carry, phase, number, index)
        turn, left = index // phase.every, index % phase.every
        due = int(left == 0) if isinstance(left, int) else (left == 0).astype(jnp.int32)
        return loop(due, lambda _, carry: visit(carry, phase, number, turn), carry)

    def through(phases: Phases, carry: Any, index: Any, first: int) -> Any:
        for entry in phases:
            if isinstance(entry, Phase):
                carry, first = visited(carry, entry, first, index), first + 1
                continue

            def body(repetition: Any, carry: Any, entry=entry, first=first) -> Any:
                before = index * entry.times + repetition
                return through(entry.phases, carry, before, first)

            carry = loop(times(entry, first, index), body, carry)
            first += len(every_phase(entry.phases))
        return carry

    phases = job.phases(stage) if phases is None else phases
    return through(phases, carry, index, 0)


def phases_in_python(
    job: Job, stage: int, index: int, state: Any, exchange: Callable
) -> tuple[Any, tuple[int, int, int] | None]:
    """Make every exchange of the round `index`, or of the setup, until one fails.

    `exchange(state, phase, where, turn, shown)` returns the next state and, if a reply
    was not finite, whose. Also return round, phase and client of that.
    """
    shown = index if stage == keys.ROUNDS else -1

    def visit(carry: Any, phase: Phase, number: int, turn: int) -> Any:
        state, failure = carry
        if failure is not None:
            return carry
        state, bad = exchange(state, phase, (stage, number), turn, shown)
        return state, None if bad is None else (shown, number, bad)

    return run_phases(job, stage, index, (state, None), visit, plain_loop)


def period_of(phases: Phases) -> int:
    """Return after how many rounds the same phases are due again."""
    return math.lcm(*(phase.every for phase in every_phase(phases)))


def drawn_times(root: Key, stage: int) -> Times:
    """Return how often a `Repeat` runs, drawn from the run's key where random."""

    def times(repeat: Repeat, first: int, index: Array | int) -> Any:
        if not repeat.random:
            return repeat.times
        where = (root, stage, first, index, repeat.times)
        if repeat.chance is None:
            return keys.draw_length(*where)
        return keys.draw_streak(*where, repeat.chance)

    return times


def compiled_loop(times: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Run a loop inside a program; its body is compiled once."""
    return jax.lax.fori_loop(0, times, body, carry)


def plain_loop(times: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Run a loop in Python."""
    for repetition in range(int(times)):
        carry = body(repetition, carry)
    return carry
