"""Packets written by hand: another header or other leaves, and a frame that fits."""

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbilevel.federation.wire import CHECKSUM, START_BYTES

KIND = "kind"
_NUMBERS = itertools.count(10**6)  # beyond those of any run here


def opened(packet: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header as JSON has it, and the bytes of the leaves."""
    length = int.from_bytes(packet[4:8], "big")
    rest = packet[START_BYTES + CHECKSUM.size :]
    return json.loads(rest[:length]), rest[length:]


def closed(packet: bytes, head: Any, body: bytes) -> bytes:
    """Return a packet of the same protocol; a header may be text that is no JSON."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    length = len(text).to_bytes(4, "big")
    digest = hashlib.sha256(length + text + body).digest()
    return packet[:4] + length + digest + text + body


def with_info(packet: bytes, **more: Any) -> bytes:
    """Return a packet that says more, or something else, in its `info`."""
    head, body = opened(packet)
    head["info"] = {**(head["info"] or {}), **more}
    return closed(packet, head, body)


def with_header(packet: bytes, **fields: Any) -> bytes:
    """Return a packet with other fields in its header."""
    head, body = opened(packet)
    return closed(packet, {**head, **fields}, body)


def with_leaves(packet: bytes, change: Callable[[int, np.ndarray], Any]) -> bytes:
    """Return a packet whose leaves are changed, types and shapes staying as listed."""
    head, body = opened(packet)
    position, leaves = 0, []
    for number, (kind, shape, _) in enumerate(head["leaves"]):
        count = int(np.prod(shape))
        leaf = np.frombuffer(body, kind, count, position).reshape(shape).copy()
        position += leaf.nbytes
        leaves.append(np.asarray(change(number, leaf), kind).reshape(shape).tobytes())
    return closed(packet, head, b"".join(leaves))


def renewed(packet: bytes) -> bytes:
    """Return a request that nobody answered yet."""
    return with_header(packet, number=next(_NUMBERS))


def kind_of(packet: bytes) -> str:
    """Return what a packet is for."""
    return opened(packet)[0][KIND]
