"""Secure sums without packets: what an honest server does with what sites give it."""

from collections.abc import Iterable, Mapping

import numpy as np

from fedbilevel.federation.secure.layout import (
    BOX_BYTES,
    MaskedExchange,
    MaskedReply,
    Revealed,
)
from fedbilevel.federation.secure.protocol import SecureSite
from fedbilevel.federation.secure.unmasking import Unmasking


def confirmations(
    members: Iterable[SecureSite], exchange: MaskedExchange, survivors: Iterable[int]
) -> dict[int, np.ndarray]:
    """Let sites confirm a sum; return what each tells the others."""
    survivors = list(survivors)
    return {one.client: one.confirm(exchange, survivors) for one in members}


def for_site(
    client: int,
    exchange: MaskedExchange,
    replies: Mapping[int, MaskedReply],
    tags: Mapping[int, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes and tags that are for one site."""
    count, place = len(exchange.participants), exchange.places
    boxes = np.zeros((count, BOX_BYTES), np.uint8)
    proofs = np.zeros((count, 16), np.uint8)
    for other, reply in replies.items():
        boxes[place[other]] = reply.sealed[place[client], :BOX_BYTES]
    for other, row in tags.items():
        proofs[place[other]] = row[place[client]]
    return boxes, proofs


def revealed(
    members: Iterable[SecureSite],
    exchange: MaskedExchange,
    replies: Mapping[int, MaskedReply],
    tags: Mapping[int, np.ndarray],
    survivors: Iterable[int] | None = None,
) -> dict[int, Revealed]:
    """Ask sites for what opens the sum over the replies."""
    survivors = sorted(replies) if survivors is None else list(survivors)
    return {
        one.client: one.reveal(
            exchange, survivors, *for_site(one.client, exchange, replies, tags)
        )
        for one in members
    }


def opened(
    members: Iterable[SecureSite],
    exchange: MaskedExchange,
    replies: Mapping[int, MaskedReply],
    silent: Iterable[int] = (),
) -> np.ndarray:
    """Return the sum of the replies; the silent confirm it and are gone then."""
    here = [one for one in members if one.client in replies]
    tags = confirmations(here, exchange, replies)
    staying = [one for one in here if one.client not in set(silent)]
    given = revealed(staying, exchange, replies, tags)
    return Unmasking(exchange, replies, given).total()
