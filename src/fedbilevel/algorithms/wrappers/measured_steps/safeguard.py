r"""Safeguard: a diverging run rolls back and continues with smaller steps.

Rounds are judged in tens. Of each ten the server knows F, the mean upper loss of the
clients' batches at the points that it sent, e, the standard error of F, and
G = L1 ||y - y before them||, which is how steep the lower level was. The state is kept
after ten rounds that were no worse than the best ones:

    F <= F_best + e   or   G <= 1.5 G_best

A run rolls back to it if the loss had fallen and both got much worse, because x is too
fast for y and z:

    F_first > F_best + 4 e,   F > F_best + (F_first - F_best) / 10 + 4 e,
    G > 3 G_best   and   G > G_first

A loss that rises alone may mean that y approaches a minimum that overfits, or its
maximum in a minimax problem. A run rolls back immediately if half of the replies are
not finite, y goes a hundred times as far as in the first rounds and farther than its
own size (in units of how fast momentum makes it), or x ten times as far as it ever was
from its start. It continues with a quarter of the steps of x and half of those of the
lower level. Steps that follow the curvature are shortened less. A run that rolled back
12 times ends with an error. Where the stride of x is measured and x turns round
(`dog_stride.py`), that stride is limited.

Clients send F, and whether their reply was finite, with what was known of a reply in
its place where it was not: such a client is left out of the round. Less than half of
them cannot turn a run back, so that no single one can hold it up. All of it is a part
of the server's state, so that a run can be resumed, replayed and deployed as any other.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedbilevel import _tree
from fedbilevel.algorithms.one_loop import when

MOST = 12  # rollbacks before a run is given up
UNKNOWN = float(jnp.finfo(jnp.float32).max)
_HUGE = 1e18  # a loss whose square is still a number
_EVERY = 10  # rounds that are judged together
_MANY = 0.5  # of the replies of a round
_FAR, _CALM = 100.0, 10.0  # times as far as in the first rounds
_GROWTH = 2.0  # by which the usual may grow in one of the first rounds
_SHARE, _ERRORS = 0.1, 4.0  # of the descent, and of standard errors
_STEEP, _ALIKE = 3.0, 1.5  # times the slope of the best rounds
EXPLODED, GREW, TURNED, UNFIT, SOFT = range(5)
_EVENTS = {
    EXPLODED: "the run diverged in round {now}: it rolled back to round {back} and "
    "continued with half the steps, and a quarter of that of x",
    GREW: "the upper loss grew until round {now}, x being too fast for y: the run "
    "rolled back to round {back} and continued with half the steps, and a quarter of "
    "that of x",
    TURNED: "x turned round in round {now}, too fast for y: its step became a quarter "
    "of what it was",
    UNFIT: "theta did not fit any more in round {now}: it was larger than 1/L1, where "
    "its series need not converge (theta=auto follows L1)",
    SOFT: "the lower level curves downward, or not at all, along z since round {now}: "
    "z solves a damped system, and the hypergradient is biased by that",
}


class Move(NamedTuple):
    """The y after a round, that of the kept state, its speed, and the curvature.

    Both are blocks: a y that clients keep to themselves is none of the server's. Where
    the stride of x is measured, x may have `turned` round, or `leapt`.
    """

    y: PyTree
    kept: PyTree
    speed: Any
    curvature: Any
    turned: Bool[Array, ""]
    leapt: Bool[Array, ""]


class Record(eqx.Module):
    """The upper losses of these rounds, and those and the slopes of first and best.

    Before ten rounds have been judged `first`, `best`, `slope`, which is that of the
    best, and `steep`, that of the first, are the largest number there is: a state with
    infinity would be taken for one that is broken.
    """

    total: Float[Array, ""]
    squares: Float[Array, ""]
    count: Float[Array, ""]
    first: Float[Array, ""]
    best: Float[Array, ""]
    slope: Float[Array, ""]
    steep: Float[Array, ""]

    @staticmethod
    def new() -> "Record":
        """Begin with nothing."""
        none, most = jnp.zeros((), jnp.float32), jnp.full((), UNKNOWN, jnp.float32)
        return Record(none, none, none, most, most, most, most)

    def seen(self, loss: Array) -> "Record":
        """Return the same with one round more."""
        loss = jnp.nan_to_num(loss.astype(jnp.float32), nan=_HUGE)
        loss = jnp.clip(loss, -_HUGE, _HUGE)
        sums = (self.total + loss, self.squares + loss**2, self.count + 1)
        return replace(self, total=sums[0], squares=sums[1], count=sums[2])

    def mean(self) -> Array:
        """Return the mean loss of these rounds, that of the best if there is none."""
        here = self.total / jnp.maximum(self.count, 1)
        return jnp.where(self.count > 0, here, self.best)

    def judged(self, slope: Array) -> tuple[Array, Array, "Record"]:
        """Say whether ten rounds were good or bad, and return the memory after them."""
        count, mean = jnp.maximum(self.count, 1), self.mean()
        spread = jnp.maximum(self.squares / count - mean**2, 0)
        error = jnp.sqrt(spread / count)
        good = ~(mean > self.best + error) | (slope <= _ALIKE * self.slope)
        fell, noise = self.first - self.best, _ERRORS * error
        worse = (fell > noise) & ~(mean <= self.best + _SHARE * fell + noise)
        bad = worse & (slope > jnp.maximum(_STEEP * self.slope, self.steep))
        after = replace(
            self.emptied(),
            first=jnp.where(self.first < UNKNOWN, self.first, mean),
            best=jnp.minimum(self.best, mean),
            slope=jnp.minimum(self.slope, slope),
            steep=jnp.where(self.steep < UNKNOWN, self.steep, slope),
        )
        return good, bad, after

    def emptied(self) -> "Record":
        """Return the same, without the rounds that were not judged yet."""
        none = jnp.zeros_like(self.total)
        return replace(self, total=none, squares=none, count=none)


class Guard(eqx.Module):
    """The rollback state, the usual speed, and past interventions.

    `kept` is the server's state after round `stood`. `before` is y after the last ten
    rounds, `usual` the distance it moved in the first ones, and `trouble` the share of
    replies of this round that were not finite. `replaced` counts the rounds that left a
    reply out, `halvings` the rollbacks that halved steps. `happened` counts events, and
    `rounds` has their kind, round and target. `unfit` is the first round whose L1 was
    too large for a given theta, or 0, and `soft` the first one with a damped system.
    """

    kept: PyTree
    before: PyTree
    stood: Int[Array, ""]
    usual: Float[Array, ""]
    trouble: Float[Array, ""]
    record: Record
    replaced: Int[Array, ""]
    halvings: Int[Array, ""]
    happened: Int[Array, ""]
    rounds: Int[Array, "places 3"]
    unfit: Int[Array, ""]
    soft: Int[Array, ""]

    @staticmethod
    def of(state: PyTree, y: PyTree) -> "Guard":
        """Begin with nothing usual."""
        none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        rounds, known = jnp.zeros((2 * MOST, 3), jnp.int32), (none, zero, zero)
        record = Record.new()
        return Guard(state, y, *known, record, none, none, none, rounds, none, none)

    def expected(self) -> Array:
        """Return the upper loss of the rounds before, 0 while there were none."""
        known = self.record.mean()
        return jnp.where(known < UNKNOWN, known, 0)

    def told(self, troubled: Array, loss: Array | None) -> "Guard":
        """Remember until the round is judged what its replies say."""
        trouble = self.trouble + troubled.astype(self.trouble.dtype)
        record = self.record if loss is None else self.record.seen(loss)
        return replace(self, trouble=trouble, record=record)

    def judged(self, state: PyTree, move: Move, index: Any) -> tuple[PyTree, "Guard"]:
        """Return the next state after a round, and the updated guard."""
        index = jnp.asarray(index, jnp.int32)
        far = _size(_tree.subtract(move.y, self.before)) / move.speed
        too_far = (self.usual > 0) & (far > _FAR * self.usual)
        broken = (self.trouble >= _MANY) | ~_tree.all_finite(state) | move.leapt
        due = index % _EVERY == _EVERY - 1

        def looked_at() -> tuple[PyTree, Guard]:
            exploded = broken | (too_far & (far > _size(self.before) / move.speed))
            return self._changed(state, move, far, exploded, due, index)

        # Most rounds end here: nothing of the states, which may be large, is copied.
        return when(
            too_far | broken | move.turned | due,
            looked_at,
            lambda: (state, self._quiet(far, jnp.zeros((), bool), index)),
        )

    def _quiet(self, far: Array, returned: Array, index: Array) -> "Guard":
        """Return the memory of any round: the usual speed and the replies left out."""
        grown = jnp.where(index < _EVERY, _GROWTH * self.usual, self.usual)
        usual = jnp.where(self.usual > 0, jnp.minimum(far, grown), far)
        return replace(
            self,
            usual=jnp.where(returned, self.usual, jnp.maximum(self.usual, usual)),
            trouble=jnp.zeros_like(self.trouble),
            replaced=self.replaced + (self.trouble > 0).astype(jnp.int32),
        )

    def _changed(self, state, move, far, exploded, due, index):
        """Return the next state, and the updated guard."""
        calm = (index < _EVERY) | (far <= _CALM * self.usual)
        curvature = jnp.asarray(move.curvature, jnp.float32)
        good, grew, after = self.record.judged(far * curvature)
        grew &= due
        record = _tree.select(due & ~exploded, after, self.record)
        returned = exploded | grew
        returned &= self.halvings < MOST
        turned = move.turned & ~returned & (self.happened - self.halvings < MOST)
        kept = due & calm & good & ~returned
        record = _tree.select(returned, record.emptied(), record)
        state = _tree.select(returned, self.kept, state)
        after = replace(
            self._quiet(far, returned, index),
            kept=_tree.select(kept, state, self.kept),
            before=_tree.select(
                returned, move.kept, _tree.select(due, move.y, self.before)
            ),
            stood=jnp.where(kept, index + 1, self.stood),
            halvings=self.halvings + returned.astype(jnp.int32),
            record=record,
        )
        what = jnp.where(exploded, EXPLODED, jnp.where(returned, GREW, TURNED))
        return state, after._noted(returned | turned, what, index + 1, self.stood)

    def _noted(
        self, happened: Bool[Array, ""], what: Array, now: Array, back: Array
    ) -> "Guard":
        entry = jnp.stack([what.astype(jnp.int32), now, back])
        rounds = jnp.where(
            happened, self.rounds.at[self.happened].set(entry), self.rounds
        )
        count = self.happened + happened.astype(jnp.int32)
        return replace(self, happened=count, rounds=rounds)

    def noting(self, name: str, is_so: Bool[Array, ""], index: Any) -> "Guard":
        """Remember the first round in which theta was `unfit`, or the system `soft`."""
        first = getattr(self, name)
        now = jnp.asarray(index, jnp.int32) + 1
        return replace(self, **{name: jnp.where(is_so & (first == 0), now, first)})

    def gave_up(self) -> str:
        """Describe the divergence if too many rollbacks did not help."""
        if int(self.halvings) < MOST:
            return ""
        values = (self.record.first, self.record.best, self.record.mean())
        first, best, now = map(float, values)
        if now <= first:
            return ""
        since, until = int(self.rounds[0, 1]), int(self.rounds[: 2 * MOST, 1].max())
        return (
            f"the run diverges: from round {since} to round {until} it rolled back "
            f"{MOST} times, with ever smaller steps. The upper loss was {first:.4g} in "
            f"the first rounds, {best:.4g} in the best and {now:.4g} in the last ones. "
            "Give the lower level a minimum that is unique, by a penalty such as 0.01 "
            "||y||^2, draw more rows, or give steps as numbers."
        )

    def events(self, times: int = 1) -> list[str]:
        """Describe interventions in order. A round was judged so many times."""
        listed = self.rounds[: int(self.happened)].tolist()
        firsts = {UNFIT: int(self.unfit), SOFT: int(self.soft)}
        listed += [[what, now, 0] for what, now in firsts.items() if now]
        said = [
            _EVENTS[what].format(now=(now - 1) // times + 1, back=back // times)
            for what, now, back in sorted(listed, key=lambda one: one[1])
        ]
        if int(self.replaced):
            said.append(
                f"in {int(self.replaced)} rounds replies that were not finite were "
                "left out"
            )
        return said


def _size(block: PyTree) -> Array:
    return _tree.norm(block).astype(jnp.float32)
