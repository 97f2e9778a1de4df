"""Which two or three methods fit a situation, why, and how they did when measured.

`field.json` has what was measured. It is a list of rows, one for each setting (a task,
or a task and a word after a dash) and method: `metric` and its `mean` over seeds,
`early` after a tenth of the rounds, `exchanges`, `megabytes`, `samples`, `seconds`, and
`diverged`, the share of trials that did; or `failed`, with the reason. A row with a
`note` cannot be compared, for the reason that it gives. `benchmarks/field.py` writes
it. A lower mean is better.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel import algorithms
from fedbilevel._blocks import is_any
from fedbilevel.algorithms import Entry
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.experiments import traits
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.tasks import Task

Row = Mapping[str, Any]
MANY = 2.5  # two exchanges a round, and one now and then, are not many
MOST = 3
_SMALL = 1000  # entries of x and of y, of which a server can hold a square


@dataclass(frozen=True)
class Situation:
    """The known facts about a problem; None where unknown.

    `differ` says whether clients hold data of different kinds; not known, they may.
    Without `hessian` gradients are all that can be had. With `few_rounds` it counts
    what is reached early, and by few exchanges. `participants` of the `clients` take
    part in an exchange. `question` is one of those in
    `fedbilevel.experiments.traits.QUESTIONS`.
    """

    clients: int | None = None
    participants: int | None = None
    differ: bool | None = None
    hessian: bool = True
    few_rounds: bool = False
    question: str | None = None

    def __post_init__(self) -> None:
        for name in ("clients", "participants"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{name}={value}: give at least 1.")
        if None not in (self.clients, self.participants) and (
            self.participants > self.clients  # pyright: ignore[reportOperatorIssue]
        ):
            raise InvalidInputError(
                f"participants={self.participants}: there are {self.clients} clients."
            )
        if self.question is not None and self.question not in traits.QUESTIONS:
            raise unknown_name("question", self.question, traits.QUESTIONS)

    @property
    def some(self) -> bool:
        """Say whether only some of the clients take part."""
        return self.participants is not None and self.participants != self.clients


class Advice(NamedTuple):
    """A method that fits, why it does, how it is known, and what was measured."""

    name: str
    summary: str
    reasons: tuple[str, ...]
    known: str
    measured: str


class _Known(NamedTuple):
    """The relevant facts about a task."""

    name: str | None = None
    algorithm: str | None = None
    clients: int | None = None
    private: bool = False  # whether clients keep blocks to themselves
    own_lower: bool = False  # whether those are blocks of y
    small: bool = False  # whether Hessians of y can travel


def recommend(
    task: str | Experiment | None = None,
    situation: Situation | None = None,
    *,
    rows: Sequence[Row] | None = None,
) -> list[Advice]:
    """Return the two or three methods that fit best, the best first.

    `task` is a name, or an experiment. `rows` are measured ones, as this module
    describes them; those of the package if left out. Where a task was measured the
    order is that of its results; else that of the mean place in all that was measured,
    and where there is nothing of that how well a method is known. Where both levels are
    small, a method that sends Hessians is among them: it needs no steps, and is exact.
    It leads where the task itself chooses it.
    """
    asked = situation or Situation()
    known = _known_of(task, asked)
    question = asked.question or _question(known)
    entries = _candidates(known, asked, question)
    every = shipped() if rows is None else rows
    ranking = _Ranking.of(every, known, asked, [one.name for one in entries])

    def order(entry: Entry) -> tuple:
        own = entry.name != known.algorithm
        well = list(traits.KNOWN).index(traits.known_how(entry))
        needs = len(traits.traits_of(entry.name))
        return (*ranking.order(entry.name), own, well, needs)

    ordered = sorted(entries, key=lambda one: (*order(one), one.name))
    return [
        Advice(
            one.name,
            one.summary,
            _reasons(one, known, question),
            one.provenance,
            ranking.measured(one.name),
        )
        for one in _with_exact(ordered, known)
    ]


def _with_exact(ordered: list[Entry], known: _Known) -> list[Entry]:
    """Return the first ones, among them one that sends Hessians, if there is any."""
    best = ordered[:MOST]
    exact = [one for one in ordered[MOST:] if one.kind.sends_hessian][:1]
    best = [*best[: MOST - len(exact)], *exact]
    return sorted(best, key=lambda one: one not in exact or one.name != known.algorithm)


def _known_of(task: str | Experiment | None, asked: Situation) -> _Known:
    if task is None:
        return _Known(clients=asked.clients)
    if not isinstance(task, Experiment):
        task = Experiment(task, clients=asked.clients)
    built, _, _ = task.build_task()
    private, count = built.problem.private, sum(map(jnp.size, jax.tree.leaves(built.x)))
    return _Known(
        task.label,
        built.algorithm,
        built.data.clients,
        is_any(private),
        own_lower=any(jax.tree.leaves(private.y)),
        small=max(count, _largest(built)) <= _SMALL,
    )


def _largest(built: Task) -> int:
    """Return how many entries of y its Hessian couples."""
    every = jax.tree.leaves(built.y)
    blocks = every[0].shape[0] if built.problem.separate else 1
    return sum(jnp.size(leaf) for leaf in every) // blocks


def _question(known: _Known) -> str:
    if known.clients == 1:
        return "single-machine"
    if known.own_lower:
        return "own-y"
    if known.algorithm is not None:
        return traits.question_of(algorithms.find(known.algorithm))
    return "shared-y"


def _candidates(known: _Known, asked: Situation, question: str) -> list[Entry]:
    """Return the methods that can do it."""
    without = {
        "hessian": not asked.hessian,
        # With personal y, a client's own Hessian is the right one.
        "alike-clients": asked.differ is not False and not known.own_lower,
        "all-clients": asked.some,
    }
    left_out = [word for word, flag in without.items() if flag]
    found = traits.fitting(question=question, without=left_out)
    if known.own_lower and question == "own-y":
        found += traits.fitting(question="shared-y", without=left_out)
    if not known.small:
        found = [one for one in found if not one.kind.sends_hessian]
    if known.private:
        found = [one for one in found if one.kind.allows_private]
    if not found:
        raise InvalidInputError(
            f"no method answers '{question}' and does without {', '.join(left_out)}. "
            "Ask for less, or for another question."
        )
    return found


def _reasons(entry: Entry, known: _Known, question: str) -> tuple[str, ...]:
    needs, reasons = (
        traits.traits_of(entry.name),
        [f"finds {traits.QUESTIONS[question]}"],
    )
    if entry.name == known.algorithm:
        reasons.append("is the task's own choice")
    if "alike-clients" in needs and not known.own_lower:
        reasons.append("is right for clients that are alike, and for those alone")
    elif question == "shared-y" and traits.drifts(entry.name):
        reasons.append("is right where clients differ, and drifts with local_steps > 1")
    elif question == "shared-y":
        reasons.append("is right where clients differ, too")
    if entry.kind.sends_hessian:
        reasons.append("sends Hessians of y: exact, with no rounds or steps to choose")
    hessian = "hessian" in needs
    reasons.append("multiplies by Hessians" if hessian else "asks for gradients alone")
    if question != "single-machine":
        several = "more-exchanges" in needs
        many = "several exchanges" if several else "one exchange"
        reasons.append(f"has {many} a round")
    return tuple(reasons)


class Place(NamedTuple):
    """Where a method came among those that are compared: the first has rank 1."""

    rank: int
    among: int
    row: Row


def shipped() -> list[Row]:
    """Return the rows that come with the package."""
    place = resources.files("fedbilevel.experiments") / "field.json"
    return json.loads(place.read_text("utf-8"))


def settings_of(rows: Sequence[Row], task: str) -> list[str]:
    """Return the settings of a task that were measured, the plain one first."""
    every = {row["setting"] for row in rows}
    own = [one for one in every if one == task or one.startswith(f"{task}-")]
    return sorted(own, key=lambda one: (len(one), one))


def places(
    rows: Sequence[Row], setting: str, names: Collection[str], column: str
) -> dict[str, Place]:
    """Return the places of some methods in one setting, by one column.

    Early on exchanges count: a method with over `MANY` times as many in a round as the
    most frugal one comes after all others.
    """
    found = [
        row
        for row in rows
        if row["setting"] == setting
        and row["method"] in names
        and "note" not in row
        and math.isfinite(row.get(column, math.nan))
    ]
    fewest = min((row["exchanges"] for row in found), default=0)

    def order(row: Row) -> tuple:
        many = column == "early" and row["exchanges"] > MANY * fewest
        return many, row[column], row["method"]

    found.sort(key=order)
    return {
        row["method"]: Place(rank, len(found), row) for rank, row in enumerate(found, 1)
    }


@dataclass(frozen=True)
class _Ranking:
    """The places of all candidates in the settings that count."""

    task: str | None
    column: str
    own: bool  # whether the settings are those of the task
    by_setting: dict[str, dict[str, Place]]
    failed: dict[str, str]

    @staticmethod
    def of(
        rows: Sequence[Row], known: _Known, asked: Situation, names: Collection[str]
    ) -> "_Ranking":
        """Find the settings that count, and the places of methods."""
        column = "early" if asked.few_rounds else "mean"
        own = [] if known.name is None else settings_of(rows, known.name)
        # A setting with a word after a dash, such as shards, has clients that differ.
        chosen = own[-1:] if asked.differ else own[:1]
        settings = chosen or list(dict.fromkeys(row["setting"] for row in rows))
        found = {one: places(rows, one, names, column) for one in settings}
        failed = {
            row["method"]: str(row["failed"])
            for row in rows
            if row["setting"] in chosen and "failed" in row
        }
        return _Ranking(known.name, column, bool(chosen), found, failed)

    def _places(self, name: str) -> dict[str, Place]:
        return {s: found[name] for s, found in self.by_setting.items() if name in found}

    def order(self, name: str) -> tuple[int, float]:
        """Return what sorts measured methods first, and failed ones last."""
        found = self._places(name).values()
        if not found:
            return (2 if name in self.failed else 1), 0.0
        shares = [place.rank / place.among for place in found]
        return 0, sum(shares) / len(shares)

    def measured(self, name: str) -> str:
        """Say how a method did."""
        found = self._places(name)
        if self.own and found:
            ((setting, place),) = found.items()
            return _described(setting, place, self.column)
        if name in self.failed:
            return f"failed on {self.task}: {self.failed[name]}"
        here = "" if self.task is None else f" on {self.task}"
        if not found:
            return f"not measured{here}"
        others = ", ".join(
            f"{one.rank} of {one.among} on {setting}" for setting, one in found.items()
        )
        return f"not measured{here}; elsewhere {others}" if here else others


def _described(setting: str, place: Place, column: str) -> str:
    row = place.row
    when = " after a tenth of the rounds" if column == "early" else ""
    text = (
        f"{place.rank} of {place.among} that fit on {setting}: {row['metric']} "
        f"{row[column]:.4g}{when}; {row['exchanges']:,} exchanges, "
        f"{row['megabytes']:.3g} MB, {row['samples']:,} samples, {row['seconds']:.2g} s"
    )
    if row["diverged"]:
        text += f"; {row['diverged']:.0%} of its trials diverged"
    return text
