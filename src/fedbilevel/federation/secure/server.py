"""The server's side of secure aggregation: it sees masked replies, and their mean."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.errors import UnmaskingError
from fedbilevel.federation.secure.announcement import (
    Announcement,
    masked_like,
    scales_of,
)
from fedbilevel.federation.secure.protocol import decode_mean, unmask_sum
from fedbilevel.federation.server.requests import Answers, Request
from fedbilevel.federation.server.roster import Member, Roster
from fedbilevel.federation.wire import Header, RefusedError

__all__ = ["MaskedServer"]

_FEWEST = 2  # replies in a sum
Seeds = dict[int, dict[int, bytes]]


class MaskedServer:
    """Announces exchanges, and takes the masks of the missing out of sums.

    `ask(clients, request_for, read, like)` is how it talks to clients.
    """

    def __init__(self, roster: Roster, ask: Callable[..., Answers]) -> None:
        self.roster, self._ask, self._asked = roster, ask, 0

    def announced(self, chosen: list[int]) -> Announcement | None:
        """Return who of the chosen is announced under a new number, if enough."""
        self.roster.refresh()
        present = self.roster.reachable(chosen)
        if len(present) < _FEWEST:
            return None
        self._asked += 1
        number = self.roster.identity.attempt * 2**32 + self._asked
        return Announcement.of(self.roster, number, present)

    def like(self, coded: PyTree) -> jax.ShapeDtypeStruct:
        """Return the shape of a masked reply."""
        return masked_like(coded)

    def average(
        self,
        answers: Answers,
        header: Header,
        told: Announcement,
        coded: PyTree,
        about: PyTree | None,
    ) -> None:
        """Set the mean of what was taken, or take nothing if it cannot be had."""
        missing = sorted(set(told.participants) - set(answers.taken))
        seeds: Seeds = {}
        if missing and answers.taken:
            seeds = self._revealed(answers, header, told, missing)
        if len(answers.taken) < _FEWEST or (missing and set(seeds) != {*answers.taken}):
            answers.taken.clear()
            return
        replies = {client: masked for client, (masked, _) in answers.taken.items()}
        weights = {client: self.roster.members[client].weight for client in replies}
        try:
            answers.reply = _unmasked_mean(told, replies, seeds, weights, coded, about)
        except UnmaskingError as error:
            self.roster.report(f"exchange {header.exchange}: {error}")
            answers.taken.clear()

    def _revealed(
        self, answers: Answers, header: Header, told: Announcement, missing: list[int]
    ) -> Seeds:
        """Ask those who replied for the seeds they share with those who did not."""
        info = {**told.info(), "dropped": missing}
        request = Request(replace(header, kind="reveal", info=info))

        def request_for(client: int, member: Member) -> Request:
            return request

        def read(client: int, reply: Header, listed: list, body: bytes):
            if reply.kind != "reveal" or reply.exchange != header.exchange:
                raise RefusedError("replayed", "answers another packet")
            return _read_seeds((reply.info or {}).get("seeds"), missing)

        more = self._ask(sorted(answers.taken), request_for, read, ())
        answers.traffic += more.traffic
        answers.refused |= more.refused
        return more.taken


def _read_seeds(told: Any, missing: list[int]) -> dict[int, bytes]:
    try:
        seeds = {int(client): bytes.fromhex(seed) for client, seed in told.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RefusedError("garbage", "seeds cannot be read") from error
    if sorted(seeds) != missing or any(len(seed) != 32 for seed in seeds.values()):
        raise RefusedError("garbage", "seeds of others than were asked for")
    return seeds


def _unmasked_mean(
    told: Announcement,
    replies: Mapping[int, np.ndarray],
    seeds: Mapping[int, Mapping[int, bytes]],
    weights: Mapping[int, float],
    like: PyTree,
    about: PyTree | None,
) -> PyTree:
    """Return the mean reply of those who answered, as a tree like `like`."""
    leaves, scales = jax.tree.leaves(like), scales_of(like, about)
    total = unmask_sum(told.exchange(), replies, seeds)
    shares = {client: weights[client] / told.largest for client in replies}
    means = decode_mean(total, shares, scales, [leaf.shape for leaf in leaves])
    cast = [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), cast)
