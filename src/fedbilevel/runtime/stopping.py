"""When a run ends before its last round: a target, a lack of progress, or a budget.

The rule is part of the compiled loop, so that a run ends at the very round at which it
holds, whatever the host looks at and when. Only a budget of seconds depends on the
machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from fedbilevel import _tree
from fedbilevel._types import Key
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.runtime.counts import Ledger

# In the place of rounds between measurements, more than any run has: at first they are
# dense, then fewer and fewer.
SPARSE = 2**31 - 1
RUNNING, TARGET, PATIENCE, BUDGET, FINISHED = range(5)
_BUDGETS = ("bytes", "samples")


def is_measured(done: Any, every: Any) -> Any:
    """Say whether a measurement is due after so many rounds.

    `SPARSE` measures every round up to 8, then four times while their number doubles:
    10, 12, 14, 16, 20, 24, 28, 32, 40. Known in advance, it is the same on every
    machine, and does not depend on how many rounds there are.
    """
    ones = done
    for bits in (1, 2, 4, 8, 16):
        ones = ones | (ones >> bits)  # below the first one, all are
    sparse = (every == SPARSE) & ((done & (ones >> 3)) == 0)
    return (done % every == 0) | sparse


def spacing(measure_every: int | None) -> int:
    """Return the rounds between measurements as programs take them."""
    return SPARSE if measure_every is None else measure_every


@dataclass(frozen=True)
class Stopping:
    """Conditions that end a run before its last round; None never does.

    `target`: `metric` is measured at or below it. `patience`: so many measurements in a
    row were no better than the best before. `bytes` and `samples` are what all clients
    together may send, receive and draw: the run ends after the last round that they
    pay for. `seconds` are those of running, looked at about twice a second.
    """

    metric: str = "upper_loss"
    target: float | None = None
    patience: int | None = None
    bytes: int | None = None
    samples: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("patience", "bytes", "samples", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInputError(
                    f"`Stopping({name}={value})`: it must be above 0. None is never."
                )

    @property
    def looks(self) -> bool:
        """Say whether measurements decide."""
        return self.target is not None or self.patience is not None

    def why(self, reason: int, done: int, rounds: int) -> str:
        """Say in words why a run ended after so many rounds."""
        if reason == TARGET:
            return f"after round {done}: {self.metric} reached {self.target:g}"
        if reason == PATIENCE:
            return (
                f"after round {done}: {self.patience} measurements without a lower "
                f"{self.metric}"
            )
        if reason == FINISHED:
            return f"after round {done}: the method reached its own tolerance"
        if reason == BUDGET and done < rounds:
            spent = [n for n in (*_BUDGETS, "seconds") if getattr(self, n) is not None]
            return f"after round {done}: the budget of {' or '.join(spent)} is spent"
        return f"after all {rounds} rounds"


class Rule(eqx.Module):
    """The condition after a round: one entry for each run of a sweep.

    Without a metric nothing but the limit on rounds counts.
    """

    target: Float[Array, "..."]
    patience: Int[Array, "..."]
    limit: Int[Array, "..."]
    metric: str | None = eqx.field(static=True)

    @staticmethod
    def of(stopping: Stopping, limit: ArrayLike) -> "Rule":
        """Write a stopping rule as numbers."""
        most = jnp.iinfo(jnp.int32).max
        target = -jnp.inf if stopping.target is None else stopping.target
        patience = most if stopping.patience is None else stopping.patience
        return Rule(
            _tree.filled((), target),
            jax.device_put(np.asarray(patience, np.int32)),
            jax.device_put(np.asarray(limit, np.int32)),
            stopping.metric if stopping.looks else None,
        )

    def counts(self, done: Any, every: Any) -> Any:
        """Say which runs measure after so many rounds when they are alone.

        The rows of a sweep are there for all of its runs, also where one of them ends.
        """
        return is_measured(jnp.asarray(done), every) | (done == self.limit)

    def check(self, names: Iterable[str]) -> None:
        """Raise unless the metric is one of those that are measured."""
        if self.metric is not None and self.metric not in names:
            known = set(names) - {"round"}
            raise unknown_name("metric of the stopping rule", self.metric, known)


class Track(eqx.Module):
    """How a run stands: its best value, since how many measurements, why it ended."""

    best: Float[Array, "..."]
    stale: Int[Array, "..."]
    reason: Int[Array, "..."]
    ended: Int[Array, "..."]

    @staticmethod
    def start(runs: tuple[int, ...] = ()) -> "Track":
        """Return that of a run, or of many, before the first round."""
        zero = jax.device_put(np.zeros(runs, np.int32))
        return Track(_tree.filled(runs, jnp.inf), zero, zero, zero)

    def seen(self, rule: Rule, values: Any, due: Any) -> "Track":
        """Take in a measurement, where one is due."""
        if rule.metric is None:
            return self
        value = jnp.asarray(values[rule.metric], self.best.dtype)
        better = value < self.best
        stale = jnp.where(better, 0, self.stale + 1)
        found = jnp.where(value <= rule.target, TARGET, RUNNING)
        found = jnp.where(
            (found == RUNNING) & (stale >= rule.patience), PATIENCE, found
        )
        fresh = due & (self.reason == RUNNING)
        return Track(
            jnp.where(fresh & better, value, self.best),
            jnp.where(fresh, stale, self.stale).astype(jnp.int32),
            jnp.where(fresh, found, self.reason).astype(jnp.int32),
            self.ended,
        )

    def after(self, rule: Rule, done: Any, finished: Any = False) -> "Track":
        """Take in that so many rounds are over, or the method is."""
        reason = jnp.where((self.reason == RUNNING) & finished, FINISHED, self.reason)
        spent = (reason == RUNNING) & (jnp.asarray(done) >= rule.limit)
        reason = jnp.where(spent, BUDGET, reason).astype(jnp.int32)
        fresh = (reason != RUNNING) & (self.ended == 0)
        ended = jnp.where(fresh, done, self.ended).astype(jnp.int32)
        return Track(self.best, self.stale, reason, ended)


def tracked(
    rule: Rule, columns: dict[str, np.ndarray], runs: tuple[int, ...], every: int
) -> Track:
    """Return where a run stands by the measurements that it has made so far."""
    track = Track.start(runs)
    for row, done in enumerate(columns.get("round", ())):
        values = {name: column[row] for name, column in columns.items()}
        due = rule.counts(int(done), every)
        track = track.seen(rule, values, due).after(rule, int(done))
    return track


def affordable_rounds(
    stopping: Stopping, rounds: int, ledger: Ledger, roots: Sequence[Key]
) -> np.ndarray:
    """Return how many rounds the budgets of bytes and samples pay for, by run."""
    limits = []
    for root in roots:
        limit = rounds
        for name in _BUDGETS:
            budget = getattr(stopping, name)
            if budget is None:
                continue
            costs = ledger.cumulative(root, rounds)[name]
            paid = int(np.searchsorted(costs, budget, side="right"))
            if paid == 0:
                raise InvalidInputError(
                    f"a budget of {budget:,} {name}: the first round alone takes "
                    f"{int(costs[0]):,}. Allow at least as many."
                )
            limit = min(limit, paid)
        limits.append(limit)
    return np.asarray(limits, np.int32)
