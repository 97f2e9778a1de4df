"""Sends packets to clients and sorts what comes back: taken, refused, or not come."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedbilevel.federation import wire
from fedbilevel.federation.refusals import RefusedError, RefusedThereError, refusal_of
from fedbilevel.federation.server.roster import Member, Roster
from fedbilevel.federation.wire import Bytes, Carried, Header

_GRACE = 1.0  # seconds that a client which was late before is given at least
# Client, what its reply says besides, and the leaves, listed and packed.
Read = Callable[[int, Mapping[str, Any], list, Bytes], Any]


@dataclass(frozen=True, eq=False)
class Request:
    """A request to clients; clients with the same request get the same bytes.

    Of leaves whose digest is among the `known`, only that is sent.
    """

    header: Header
    leaves: Sequence[np.ndarray] = ()
    known: frozenset[str] = frozenset()


RequestFor = Callable[[int, Member], Request]


@dataclass
class Answers:
    """Replies of clients; `refused` has a reason for each that was not taken.

    `traffic` are bytes down, bytes up, and of both those that are not leaves. `reply`
    is what the server makes of all that were taken. `came` is how many could be read,
    whatever became of them; None if no client was asked.
    """

    taken: dict[int, Any] = field(default_factory=dict)
    refused: dict[int, RefusedError] = field(default_factory=dict)
    traffic: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))
    reply: Any = None
    came: int | None = None


def ask(
    roster: Roster,
    clients: list[int],
    request_for: RequestFor,
    read: Read,
    largest: int,
) -> Answers:
    """Ask each client its own; `read` returns what an answer holds, or refuses it.

    Every request is sent under a number of its own, and so is one that is repeated.
    Clients that were late before are waited for no longer than the others took, and as
    long again. A client whose process is a new one is asked a second time.
    """
    answers, again = Answers(), []
    _ask_once(answers, roster, clients, request_for, read, largest)
    for client, refusal in answers.refused.items():
        if refusal.reason in ("unknown", "federation"):
            # Its process is a new one: it holds nothing, or forgot the hello.
            roster.members[client].known = frozenset()
            again.append(client)
        if refusal.reason == "federation":
            roster.again(client)
    if again:
        _ask_once(answers, roster, again, request_for, read, largest)
    for client in answers.taken:
        answers.refused.pop(client, None)
    answers.came = len(answers.taken)
    return answers


def _ask_once(
    answers: Answers,
    roster: Roster,
    clients: list[int],
    request_for: RequestFor,
    read: Read,
    largest: int,
) -> None:
    """Add what clients answer to `answers`."""
    roster.refresh()
    reached, number = roster.reachable(clients), roster.next_number()
    asked: dict[Request, list[int]] = {}
    for client in reached:
        asked.setdefault(request_for(client, roster.members[client]), []).append(client)
    headers, sealed = {}, {}
    for request, some in asked.items():
        header = replace(request.header, number=number, addressees=wire.mask_of(some))
        # Sealed once for all clients with the same request.
        packet = wire.pack(header, request.leaves, request.known, roster.seal)
        headers |= dict.fromkeys(some, header)
        sealed |= dict.fromkeys(some, packet)
    packets = {client: sealed[client] for client in reached}
    for packet in packets.values():
        length = int.from_bytes(packet[4 : wire.START_BYTES], "big")
        overhead = wire.START_BYTES + roster.seal.size + length
        answers.traffic += (len(packet), 0, overhead)
    for client, answer in _sent(roster, packets, largest).items():
        length = 0 if isinstance(answer, RefusedError) else len(answer)
        answers.traffic[1] += length
        try:
            header, listed, body = wire.unpack(answer, largest, roster.seal)
            answers.traffic[2] += length - len(body)
            _check(header, client, headers[client])
            answers.taken[client] = read(client, header.info or {}, listed, body)
        except Exception as error:
            answers.refused[client], told = refusal_of(error)
            if not isinstance(error, RefusedError):
                roster.report(f"client {client}: {told}")


def _check(header: Header, client: int, sent: Header) -> None:
    """Refuse an answer of somebody else, or to something else."""
    if header.client != client:
        raise RefusedError("client", f"answers as client {header.client}")
    # An unreadable packet has no number.
    asked = (header.number, header.addressees) == (sent.number, sent.addressees)
    if header.kind == "refused" and (asked or header.number == 0):
        raise RefusedThereError(header.info or {})
    if replace(header, client=sent.client, info=sent.info) != sent:
        raise RefusedError("replayed", "answers another packet than the one sent")


def _sent(
    roster: Roster, packets: Mapping[int, bytes], largest: int
) -> dict[int, Carried]:
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
        largest,
    )
    for client, node in node_of.items():
        late = node not in came
        if late != roster.members[client].late:
            roster.report(f"client {client} is {'late' if late else 'back in time'}")
        roster.members[client].late = late
    return {client_at[node]: answer for node, answer in came.items()}
