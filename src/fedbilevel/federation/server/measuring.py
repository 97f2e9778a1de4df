"""Reports of sites at the server's point: measurements, conclusions at the end."""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.federation.refusals import RefusedError, is_plain
from fedbilevel.federation.server.exchanges import Exchanges, Stand
from fedbilevel.federation.server.guard import not_finite
from fedbilevel.federation.server.requests import Answers, Read, Request
from fedbilevel.federation.wire import Bytes, Header, unpack_tree

KINDS = ("number", "texts")
_LONGEST_TEXT = 400  # characters
_MOST_TEXTS = 4096
_LARGEST_WHOLE = 2**53  # beyond it whole numbers are not exact


def willing(exchanges: Exchanges, what: str) -> list[int]:
    """Return the clients that said of themselves that they measure, or conclude."""
    members = exchanges.roster.members.items()
    return sorted(k for k, member in members if member.info.get(what))


def measure(
    exchanges: Exchanges, header: Header, server: PyTree, stand: Stand
) -> Answers:
    """Return the numbers that clients measured, of those that do."""
    like = exchanges.measurement

    def read(client: int, info: Mapping[str, Any], listed: list, body: Bytes) -> PyTree:
        return unpack_tree(listed, body, like, finite=False)

    answers = _at_point(exchanges, header, server, stand, "measures", read, like)
    odd = not_finite(answers.taken)
    answers.taken = {k: one for k, one in answers.taken.items() if k not in odd}
    exchanges.name_refused(header, Answers(refused=odd))
    return answers


def conclude(
    exchanges: Exchanges,
    header: Header,
    server: PyTree,
    stand: Stand,
    expected: Mapping[str, str],
) -> Answers:
    """Return what clients that have more to say of a finished run report of it."""

    def read(client: int, info: Mapping[str, Any], listed: list, body: Bytes) -> dict:
        if listed or body:
            raise RefusedError("oversized", "a conclusion carries no leaves")
        return read_conclusion(info, expected)

    return _at_point(exchanges, header, server, stand, "concludes", read, ())


def _at_point(
    exchanges: Exchanges,
    header: Header,
    server: PyTree,
    stand: Stand,
    what: str,
    read: Read,
    like: PyTree,
) -> Answers:
    """Let willing clients look at the server's point; return what they report."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(server)]

    @functools.cache
    def request(accepted: int, kept: int) -> Request:
        return Request(replace(header, accepted=accepted, kept=kept), leaves)

    clients = willing(exchanges, what)
    answers = exchanges.ask(clients, lambda k, _: request(*stand(k)), read, like)
    exchanges.name_refused(header, answers)
    return answers


def read_conclusion(
    given: Mapping[str, Any], expected: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a site reports of a finished run; refuse what it did not announce."""
    for name, value in given.items():
        if name not in expected:
            raise RefusedError("conclusion", f"{name!r:.80} was not announced")
        right = _is_finite(value) if expected[name] == "number" else _are_texts(value)
        if not right:
            raise RefusedError("conclusion", f"{name} cannot be {value!r:.80}")
    return dict(given)


def _is_finite(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < _LARGEST_WHOLE
    return type(value) is float and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    right = isinstance(value, list) and len(value) <= _MOST_TEXTS
    return right and all(is_plain(one, _LONGEST_TEXT) for one in value)


def together(conclusions: list[dict[str, Any]]) -> dict[str, Any]:
    """Average the numbers that sites concluded with; list what is no number."""
    merged = {}
    for name in sorted({name for one in conclusions for name in one}):
        values = [one[name] for one in conclusions if name in one]
        numbers = all(isinstance(value, int | float) for value in values)
        merged[name] = float(np.mean(values)) if numbers else values
    return merged
