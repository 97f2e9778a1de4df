"""Counts what a run costs from shapes and the traced program, without running it.

Floats and bytes come from the shapes of messages and replies. Where everyone takes part
in every exchange, a vector that is still as it was when last sent is not sent again;
in a cohort drawn anew a client may have seen none of it. Oracle calls and
samples come from the traced local program of one client: every oracle call is a named
inner function there, loops are multiplied by their length, and a call on stacked points
counts once per point. Totals are over all participants.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel.algorithms import Phase, Phases, Repeat, Turn, every_phase
from fedbilevel.runtime import _keys
from fedbilevel.runtime._walk import drawn_times, plain_loop, walk
from fedbilevel.runtime.job import Job

__all__ = ["count", "count_each"]

_GRADIENTS = {
    "_upper_gradients": "upper_gradients",
    "_lower_gradient": "lower_gradient",
    "_lower_gradient_upper": "lower_gradient_upper",
    "_hessian_product": "hessian_product",
    "_cross_product": "cross_product",
    "_unrolled_gradient": "unrolled_gradient",
}
_DRAWS = {"_draw_upper": "upper_samples", "_draw_lower": "lower_samples"}


def count(job: Job, rounds: int) -> dict[str, Any]:
    """Return rounds, exchanges, traffic, oracle calls and samples of a run."""
    before, each = count_each(job, rounds)
    total = Counter(before)
    for tally in each:
        total.update(tally)
    n, exchanges = job.participants, total.pop("exchanges", 0)
    kinds = ("floats_down", "floats_up", "bytes_down", "bytes_up")
    # The first round may send what later ones find known; it stands alone if it must.
    later = each[1:] or each
    mean = {kind: sum(tally[kind] for tally in later) / len(later) for kind in kinds}
    return {
        "rounds": rounds,
        "participants": n,
        "exchanges": exchanges,
        **{kind: total.pop(kind, 0) * n for kind in kinds},
        "per_client_and_round": {
            kind: int(value) if value.is_integer() else value
            for kind, value in mean.items()
        },
        "samples": {name: total.pop(name, 0) * n for name in _DRAWS.values()},
        "calls": {name: value * n for name, value in sorted(total.items())},
    }


def count_each(job: Job, rounds: int) -> tuple[Counter[str], list[Counter[str]]]:
    """Return what one participant does in the setup, and in each round."""
    before, known = _Stage(job, _keys.SETUP, job.algorithm.setup(), 1).tally(
        0, frozenset()
    )
    stage = _Stage(job, _keys.ROUNDS, job.algorithm.phases(), rounds)
    each, seen = [], {}
    for index in range(rounds):
        # Rounds that start alike and are as long cost the same.
        alike = (index == 0, known, stage.lengths(index))
        if alike not in seen:
            seen[alike] = stage.tally(index, known)
        tally, known = seen[alike]
        each.append(tally)
    return before, each


class _Stage:
    """The phases of a round, or of the setup, each traced once."""

    def __init__(self, job: Job, stage: int, phases: Phases, rounds: int) -> None:
        self.job, self.stage, self.phases = job, stage, phases
        self.server = job.algorithm.init_server(job.x, job.y)
        self.memory = job.algorithm.init_client(job.x, job.y)
        self.costs: dict[tuple[int, bool], Exchange] = {}
        self.random: dict[int, np.ndarray] = {}
        self._draw_lengths(phases, 0, rounds)

    def _draw_lengths(self, phases: Phases, first: int, turns: int) -> None:
        times = drawn_times(self.job.key, self.stage)
        for entry in phases:
            if isinstance(entry, Phase):
                first += 1
                continue
            if entry.random:
                every = jax.vmap(lambda turn, e=entry, f=first: times(e, f, turn))
                self.random[first] = np.asarray(every(jnp.arange(turns)))
            self._draw_lengths(entry.phases, first, turns * entry.times)
            first += len(every_phase(entry.phases))

    def lengths(self, index: int) -> tuple[int, ...]:
        """Return what makes this round as long as it is, for `Repeat`s not nested."""
        return tuple(int(drawn[index]) for drawn in self.random.values())

    def tally(self, index: int, known: frozenset[int]):
        """Add up one round from what clients know; return also what they know then."""
        tally: Counter[str] = Counter()

        def visit(known: frozenset[int], phase: Phase, number: int, turn: int):
            cost = self._cost(phase, number, turn == 0)
            tally.update(cost.calls)
            if self.job.algorithm.pools:
                return known
            tally.update(cost.traffic(known))
            # A cohort is drawn anew for every exchange: whoever comes may know nothing.
            everyone = self.job.participants == self.job.sites
            return cost.known_after(known) if everyone else frozenset()

        def times(repeat: Repeat, first: int, turn: int) -> int:
            return int(self.random[first][turn]) if repeat.random else repeat.times

        known = walk(self.phases, known, index, visit, plain_loop, times)
        return tally, known

    def _cost(self, phase: Phase, number: int, first: bool) -> "Exchange":
        if (number, first) not in self.costs:
            key = _keys.client_key(self.job.key, self.stage, number, 0)
            turn = Turn(key, 0 if first else 1)
            self.costs[number, first] = trace(
                self.job, phase, self.server, self.memory, turn
            )
        return self.costs[number, first]


class Exchange:
    """What one exchange costs a participant.

    `down` lists the leaves of the message: which leaf of the server's state each is, if
    any, its floats and bytes. `replaced` are the leaves of that state which change.
    """

    def __init__(self, calls, down, up, replaced) -> None:
        self.calls, self.down, self.up, self.replaced = calls, down, up, replaced

    def traffic(self, known: frozenset[int]) -> Counter[str]:
        """Count what travels; what a client already holds is not sent again."""
        sent = [(f, b) for source, f, b in self.down if source not in known]
        return Counter(
            exchanges=1,
            floats_down=sum(floats for floats, _ in sent),
            bytes_down=sum(size for _, size in sent),
            floats_up=self.up[0],
            bytes_up=self.up[1],
        )

    def known_after(self, known: frozenset[int]) -> frozenset[int]:
        """Return which leaves of the server's state clients hold after the exchange."""
        received = {source for source, _, _ in self.down if source is not None}
        return frozenset((known | received) - self.replaced)


def trace(
    job: Job, phase: Phase, server: PyTree, memory: PyTree, turn: Turn
) -> Exchange:
    """Trace one exchange, without computing anything."""
    calls: Counter[str] = Counter()

    def local(message: PyTree, memory: PyTree):
        return phase.local(message, memory, job.oracle(0), turn)

    traced, (_, reply) = jax.make_jaxpr(local, return_shape=True)(
        phase.down(server), memory
    )
    _walk_program(traced.jaxpr, 1, job, calls)
    public = job.public(server)
    message, shapes = jax.make_jaxpr(phase.down, return_shape=True)(public)
    inputs = message.jaxpr.invars
    down = [
        (inputs.index(leaf) if leaf in inputs else None, *_weigh(shape))
        for leaf, shape in zip(
            message.jaxpr.outvars, jax.tree.leaves(shapes), strict=True
        )
    ]
    reply = job.public(reply)
    after = jax.make_jaxpr(lambda s, r: job.public(phase.up(s, r)))(public, reply).jaxpr
    same = zip(after.invars, after.outvars, strict=False)
    replaced = {i for i, (old, new) in enumerate(same) if old is not new}
    return Exchange(calls, down, _weigh(reply), replaced)


def _weigh(tree: PyTree) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return (
        sum(leaf.size for leaf in floats),
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )


def _walk_program(jaxpr: Any, times: int, job: Job, tally: Counter[str]) -> None:
    for equation in jaxpr.eqns:
        name = equation.params.get("name")
        sizes = [variable.aval.size for variable in equation.outvars]
        if name in _GRADIENTS:
            tally[_GRADIENTS[name]] += times * _points(name, sizes, job)
        elif name in _DRAWS:
            rows = job.data.upper if name == "_draw_upper" else job.data.lower
            one_row = math.prod(jax.tree.leaves(rows)[0].shape[2:])
            tally[_DRAWS[name]] += times * (sizes[0] // one_row)
        else:
            inner = times * equation.params.get("length", 1)
            for body in _bodies(equation.params):
                _walk_program(body, inner, job, tally)


def _points(name: str, sizes: list[int], job: Job) -> int:
    """Return at how many stacked points a call is evaluated."""
    like_x = [leaf.size for leaf in jax.tree.leaves(job.x)]
    like_y = [leaf.size for leaf in jax.tree.leaves(job.y)]
    expected = {
        "_upper_gradients": like_x + like_y,
        "_lower_gradient": like_y,
        "_hessian_product": like_y,
    }.get(name, like_x)
    # Outputs that do not depend on the point stay unstacked; the others tell.
    return max(size // one for size, one in zip(sizes, expected, strict=True))


def _bodies(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                found.append(item)
            elif hasattr(item, "jaxpr"):
                found.append(item.jaxpr)
    return found
