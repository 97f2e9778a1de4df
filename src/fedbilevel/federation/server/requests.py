"""Sends packets to clients and sorts what comes back: taken, refused, or not come."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbilevel.federation.server.roster import Member, Roster
from fedbilevel.federation.wire import FRAME_BYTES, Header, RefusedError, unpack

__all__ = ["Answers", "PacketFor", "Read", "ask"]

_GRACE = 1.0  # seconds that a client which was late before is given at least
PacketFor = Callable[[int, Member], bytes]
Read = Callable[[int, Header, list, bytes], Any]


@dataclass
class Answers:
    """What clients answered; `refused` has a reason for each that was not taken.

    `traffic` are bytes down, bytes up, and of both those that are not leaves. `reply`
    is what the server makes of all that were taken. `came` is how many could be read,
    whatever became of them; None if nobody was asked.
    """

    taken: dict[int, Any] = field(default_factory=dict)
    refused: dict[int, RefusedError] = field(default_factory=dict)
    traffic: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))
    reply: Any = None
    came: int | None = None


def ask(
    roster: Roster,
    clients: list[int],
    packet_for: PacketFor,
    read: Read,
    largest: int,
) -> Answers:
    """Send each client its packet; `read` returns what an answer holds, or refuses it.

    Clients that were late before are waited for no longer than the others took, and as
    long again. A client whose process is a new one is asked a second time.
    """
    answers = _ask_once(roster, clients, packet_for, read, largest)
    again = []
    for client, refusal in answers.refused.items():
        if refusal.reason in ("unknown", "federation"):
            # Its process is a new one: it holds nothing, or forgot the hello.
            roster.members[client].known = frozenset()
            again.append(client)
        if refusal.reason == "federation":
            roster.again(client)
    if again:
        more = _ask_once(roster, again, packet_for, read, largest)
        answers.taken |= more.taken
        answers.refused = {
            client: refusal
            for client, refusal in (answers.refused | more.refused).items()
            if client not in more.taken
        }
        answers.traffic += more.traffic
    answers.came = len(answers.taken)
    return answers


def _ask_once(
    roster: Roster,
    clients: list[int],
    packet_for: PacketFor,
    read: Read,
    largest: int,
) -> Answers:
    answers = Answers()
    roster.refresh()
    reached = roster.reachable(clients)
    packets = {client: packet_for(client, roster.members[client]) for client in reached}
    for packet in packets.values():
        answers.traffic += (len(packet), 0, overhead(packet))
    for client, answer in _sent(roster, packets).items():
        answers.traffic[1] += len(answer)
        try:
            answers.taken[client] = _read(client, answer, read, largest, answers)
        except RefusedError as refusal:
            answers.refused[client] = refusal
    return answers


def overhead(packet: bytes) -> int:
    """Return the bytes of a packet that are not leaves."""
    return FRAME_BYTES + int.from_bytes(packet[4:8], "big")


def _read(
    client: int, answer: bytes, read: Read, largest: int, answers: Answers
) -> Any:
    header, listed, body = unpack(answer, largest)
    answers.traffic[2] += overhead(answer)
    info = header.info or {}
    if header.kind == "refused":
        raise RefusedError(str(info.get("reason")), str(info.get("detail")))
    if header.client != client:
        raise RefusedError("client", f"answers as client {header.client}")
    return read(client, header, listed, body)


def _sent(roster: Roster, packets: Mapping[int, bytes]) -> dict[int, bytes]:
    node_of = {client: roster.members[client].node for client in packets}
    client_at = {node: client for client, node in node_of.items()}
    punctual = {node for node, k in client_at.items() if not roster.members[k].late}
    waited: list[float] = []

    def enough(answered: set[int], elapsed: float) -> bool:
        if not punctual or not punctual <= answered:
            return False
        if not waited:
            waited.append(elapsed)
        return elapsed > 2 * waited[0] + _GRACE

    came = roster.transport.exchange(
        {node_of[client]: packet for client, packet in packets.items()},
        roster.terms.deadline,
        enough,
    )
    for client, node in node_of.items():
        late = node not in came
        if late != roster.members[client].late:
            roster.report(f"client {client} is {'late' if late else 'back in time'}")
        roster.members[client].late = late
    return {client_at[node]: answer for node, answer in came.items()}
