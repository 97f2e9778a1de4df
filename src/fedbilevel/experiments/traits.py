"""Requirements and answers of a method, read from the method itself.

Its oracle calls and exchanges are those of its traced program, as it is built by its
name for a small task; nothing is run. Whose y it finds and how it is known is what its
file says of it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from fedbilevel import algorithms
from fedbilevel.algorithms import Entry, every_phase
from fedbilevel.errors import FedbilevelError, InvalidInputError, unknown_name
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.runtime import count
from fedbilevel.tasks import Task

QUESTIONS = {
    "shared-y": "one y for all clients, and x",
    "own-y": "a y for every client, and a shared x",
    "single-level": "y alone, at the x that is given",
    "single-machine": "x and y, from rows that are in one place",
}
TRAITS = {
    "hessian": "products with second derivatives",
    "alike-clients": "clients that are alike: each inverts its own Hessian",
    "more-exchanges": "more than one exchange a round, for slopes of all at one point",
    "all-clients": "an answer of every client in some exchange",
    "single-replies": "replies one by one, which secure aggregation hides",
}
KNOWN = {
    "read": "its listing was read in the paper",
    "partly": "read in part or in a program, or known from memory",
    "reconstructed": "reconstructed from an abstract, unverified",
}
_PRODUCTS = ("hessian_product", "cross_product", "unrolled_gradient")
_SMALL = {"q": "2"}  # factors of a series, where a method has one


def question_of(entry: Entry) -> str:
    """Return the question that a method answers, in a word of `QUESTIONS`."""
    if entry.pools:
        return "single-machine"
    if "x fixed" in entry.answers:
        return "single-level"
    return "own-y" if entry.answers.startswith("own y") else "shared-y"


def known_how(entry: Entry) -> str:
    """Return how a method is known, in a word of `KNOWN`."""
    if entry.provenance.startswith("listing read"):
        return "read"
    return "reconstructed" if "reconstructed" in entry.provenance else "partly"


def reconstructed(name: str) -> bool:
    """Say whether a method of ours was reconstructed from an abstract."""
    ours = name in algorithms.names()
    return ours and known_how(algorithms.find(name)) == "reconstructed"


@cache
def traits_of(name: str) -> tuple[str, ...]:
    """Return what a method asks for, by its name, in words of `TRAITS`."""
    entry, task = algorithms.find(name), _small_task()
    small, algorithm = _small_method(entry)
    job = small.setting(task, entry, small.channel()).job(algorithm)
    calls = count(job, 2)["calls"]
    phases = every_phase(algorithm.phases())
    own = question_of(entry) in ("own-y", "single-machine")
    found = {
        "hessian": any(calls.get(product, 0) for product in _PRODUCTS),
        "alike-clients": algorithm.inverts_locally and not own,
        "more-exchanges": len(phases) > 1 and not entry.pools,
        "all-clients": any(phase.everyone for phase in phases),
        "single-replies": any(phase.gathers for phase in phases),
    }
    return tuple(word for word in TRAITS if found[word])


def drifts(name: str) -> bool:
    """Say whether a method drifts where clients that differ make many local steps."""
    _, algorithm = _small_method(algorithms.find(name))
    return algorithm.drifts()


def _small_method(entry: Entry) -> tuple[Experiment, Any]:
    small = Experiment("two-client", entry.name, local_steps=2, safeguard=False)
    task = _small_task()
    recommended = {**task.recommended, **_SMALL}
    return small, small.algorithm_by(entry, recommended, task.data.clients)


@cache
def _small_task() -> Task:
    task, _, _ = Experiment("two-client").build_task()
    return task


def fitting(
    *,
    question: str | None = None,
    needs: Sequence[str] = (),
    without: Sequence[str] = (),
    known: str | None = None,
) -> list[Entry]:
    """Return the methods that answer a question, need or do without, and are known so.

    Programs are traced only of those that the rest leaves over. One of another package
    that cannot be built fits nothing that is asked for of its needs.
    """
    _check("question", [question] if question else [], QUESTIONS)
    _check("need", [*needs, *without], TRAITS)
    _check("value of known", [known] if known else [], KNOWN)
    twice = sorted({*needs} & {*without})
    if twice:
        raise InvalidInputError(f"a method cannot need {twice[0]} and do without it.")
    found = [
        one
        for one in map(algorithms.find, algorithms.names())
        if question in (None, question_of(one)) and known in (None, known_how(one))
    ]
    found += [one for one in _of_packages() if question is None and known is None]
    if not needs and not without:
        return found
    return [one for one in found if _suits(one.name, needs, without)]


def _of_packages() -> list[Entry]:
    entries = []
    for name in algorithms.installed():
        with suppress(FedbilevelError):
            entries.append(algorithms.find(name))
    return entries


def _suits(name: str, needs: Sequence[str], without: Sequence[str]) -> bool:
    with suppress(FedbilevelError):
        words = {*traits_of(name)}
        return {*needs} <= words and not {*without} & words
    return False


def _check(kind: str, given: Sequence[str], known: Mapping[str, Any]) -> None:
    for word in given:
        if word not in known:
            raise unknown_name(kind, word, known)
