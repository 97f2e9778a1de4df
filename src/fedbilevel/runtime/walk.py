"""Goes through the phases of a round, whoever runs them and however loops are run."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from fedbilevel._types import Key
from fedbilevel.algorithms import Phase, Phases, Repeat, every_phase
from fedbilevel.runtime import keys

# carry, phase, its number, how often it ran before -> carry
Visit = Callable[[Any, Phase, int, Any], Any]
# times, body(repetition, carry) -> carry, carry -> carry
Loop = Callable[[Any, Callable[[Any, Any], Any], Any], Any]
# repeat, number of its first phase, how often it ran before -> times
Times = Callable[[Repeat, int, Any], Any]


def walk(
    phases: Phases,
    carry: Any,
    index: Any,
    visit: Visit,
    loop: Loop,
    times: Times,
    first: int = 0,
) -> Any:
    """Visit every exchange of the round `index`.

    A phase inside a `Repeat` has run index * times + repetition times before.
    """
    for entry in phases:
        if isinstance(entry, Phase):
            carry, first = visit(carry, entry, first, index), first + 1
            continue

        def body(repetition: Any, carry: Any, entry=entry, first=first) -> Any:
            before = index * entry.times + repetition
            return walk(entry.phases, carry, before, visit, loop, times, first)

        carry = loop(times(entry, first, index), body, carry)
        first += len(every_phase(entry.phases))
    return carry


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
