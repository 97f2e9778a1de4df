"""What the sites tell of the server's point: measurements, conclusions at the end."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.federation.server.conclusions import read_conclusion
from fedbilevel.federation.server.exchanges import Exchanges, Stand
from fedbilevel.federation.server.guard import not_finite
from fedbilevel.federation.server.requests import Answers, Request
from fedbilevel.federation.server.roster import Member
from fedbilevel.federation.wire import Bytes, Header, RefusedError, unpack_tree


def measure(
    exchanges: Exchanges, header: Header, server: PyTree, stand: Stand
) -> Answers:
    """Return the numbers that clients measured, of those that do."""

    def read(reply: Header, listed: list, body: Bytes) -> dict[str, np.ndarray]:
        return unpack_tree(listed, body, exchanges.measurement, finite=False)

    clients, like = measuring(exchanges), exchanges.measurement
    answers = _at_point(exchanges, header, server, stand, clients, read, like)
    odd = not_finite(answers.taken)
    answers.taken = {k: one for k, one in answers.taken.items() if k not in odd}
    exchanges.name_refused(header, Answers(refused=odd))
    return answers


def measuring(exchanges: Exchanges) -> list[int]:
    """Return the clients that measure for the server."""
    members = exchanges.roster.members.items()
    return sorted(k for k, member in members if member.info.get("measures"))


def conclude(
    exchanges: Exchanges,
    header: Header,
    server: PyTree,
    stand: Stand,
    expected: Mapping[str, str],
) -> Answers:
    """Return what clients that have more to say of a finished run tell of it."""

    def read(reply: Header, listed: list, body: Bytes) -> dict[str, Any]:
        if listed or body:
            raise RefusedError("oversized", "a conclusion carries no leaves")
        return read_conclusion(reply.info or {}, expected)

    return _at_point(exchanges, header, server, stand, concluding(exchanges), read, ())


def concluding(exchanges: Exchanges) -> list[int]:
    """Return the clients that have more to say of a finished run."""
    members = exchanges.roster.members.items()
    return sorted(k for k, member in members if member.info.get("concludes"))


def _at_point(
    exchanges: Exchanges,
    header: Header,
    server: PyTree,
    stand: Stand,
    clients: list[int],
    read_values: Callable[[Header, list, Bytes], Any],
    like: PyTree,
) -> Answers:
    """Let clients look at the server's point, and return what they tell."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(server)]

    @functools.cache
    def request(accepted: int, kept: int) -> Request:
        return Request(replace(header, accepted=accepted, kept=kept), leaves)

    def request_for(client: int, member: Member) -> Request:
        return request(*stand(client))

    def read(client: int, reply: Header, listed: list, body: Bytes) -> Any:
        same = ("kind", "federation", "attempt", "round", "exchange")
        if any(getattr(reply, name) != getattr(header, name) for name in same):
            raise RefusedError("replayed", "answers another packet than the one sent")
        return read_values(reply, listed, body)

    answers = exchanges.ask(clients, request_for, read, like)
    exchanges.name_refused(header, answers)
    return answers
