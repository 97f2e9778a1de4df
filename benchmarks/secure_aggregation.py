"""What a secure sum costs in bytes and seconds, for 4 to 256 sites in one process.

Real packets between the server's side and the sites' side of secure aggregation, with
signed keys; replies of 100,000 numbers stand ready, and nothing is learned. The first
exchange makes all secrets and checks all signatures, the following ones are counted:
with everybody, and with one site that drops out. Seconds are those of the processor.

    python benchmarks/secure_aggregation.py [sites ...]
"""

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedbilevel.federation import Identity, Roster, Terms
from fedbilevel.federation.secure.cohorts import Cohorts
from fedbilevel.federation.secure.layout import context_of, question_of
from fedbilevel.federation.secure.server import MaskedServer
from fedbilevel.federation.secure.site import SiteSecrets
from fedbilevel.federation.server.requests import Answers, Request, ask
from fedbilevel.federation.signatures import SiteIdentity
from fedbilevel.federation.wire import (
    EVERYONE,
    Carried,
    Header,
    digest,
    pack,
    unpack,
    unpack_tree,
)

NUMBERS, REPEATS = 100_000, 2
LIKE = jax.ShapeDtypeStruct((NUMBERS,), np.dtype(np.float32))
MESSAGE = np.zeros(NUMBERS, np.float32)


class Crowd:
    """Sites that answer packets, and the seconds they took."""

    def __init__(self, count: int) -> None:
        private = [ec.generate_private_key(ec.SECP384R1()) for _ in range(count)]
        public = [key.public_key() for key in private]
        self.sites = [
            SiteSecrets(
                "bench", k, None, Cohorts(2), SiteIdentity(k, private[k], public)
            )
            for k in range(count)
        ]
        self.values = np.random.default_rng(0).normal(size=NUMBERS).astype(np.float32)
        self.seconds, self.lost = 0.0, -1

    def nodes(self) -> set[int]:
        """Return the nodes that are there: all."""
        return set(range(len(self.sites)))

    def key(self, node: int) -> str:
        """Return the name of a node's key."""
        return str(node)

    def exchange(
        self,
        packets: Mapping[int, bytes],
        seconds: float,
        enough: Callable,
        largest: int,
    ) -> dict[int, Carried]:
        """Let the sites answer, one after the other."""
        del seconds, enough, largest
        began = time.process_time()
        came = {node: self._answer(node, packet) for node, packet in packets.items()}
        self.seconds += time.process_time() - began
        return {node: answer for node, answer in came.items() if answer}

    def _answer(self, node: int, packet: bytes) -> bytes | None:
        header, listed, body = unpack(packet, 1 << 30)
        own, info = self.sites[node], header.info or {}
        leaves = []
        if header.kind == "hello":
            info = {"facts": {}, "holds": False, "concludes": False}
            info |= own.introduction()
        elif header.kind == "exchange" and node == self.lost:
            return None
        elif header.kind == "exchange":
            (message,) = unpack_tree(listed, body, [LIKE])
            names = [digest(message)]
            asked = (context_of(header, names), question_of(header, names))
            leaves = list(own.mask(info, *asked, self.values, 1.0, None))
        elif header.kind == "agree":
            leaves = [own.confirm(info)]
        else:
            leaves = list(own.reveal(info, listed, body))
        told = info if header.kind == "hello" else None
        return pack(replace(header, client=node, info=told), leaves)


def exchange_once(server: MaskedServer, roster: Roster, number: int) -> Answers:
    """Make one exchange as a federation's server does."""
    told = server.announced(list(range(roster.clients)), number)
    assert told is not None
    # Every exchange asks another question: a site answers one in a single sum.
    header = Header(
        "exchange", "bench", "", "", EVERYONE, 1, exchange=number, index=number
    )
    header = replace(header, info=asdict(told))
    request, like = Request(header, [MESSAGE]), server.like(LIKE, told)
    answers = ask(
        roster,
        told.participants,
        lambda client, member: request,
        lambda client, reply, listed, body: (unpack_tree(listed, body, like), False),
        1 << 30,
    )
    server.average(answers, told, (header, [digest(MESSAGE)]), LIKE, None)
    assert answers.taken
    return answers


def measure(count: int) -> None:
    """Print the lines of one number of sites."""
    crowd = Crowd(count)
    roster = Roster(crowd, count, Identity("bench", "", 1), Terms(), lambda text: None)
    roster.gather(1.0, enough=count)
    server = MaskedServer(
        roster,
        lambda clients, request_for, read, like: ask(
            roster, clients, request_for, read, 1 << 30
        ),
    )
    crowd.seconds = 0.0
    exchange_once(server, roster, 1)
    first = crowd.seconds / count
    numbers = itertools.count(2)
    for lost in (-1, 1):
        crowd.lost, crowd.seconds, began = lost, 0.0, time.process_time()
        made = [exchange_once(server, roster, next(numbers)) for _ in range(REPEATS)]
        elapsed = (time.process_time() - began) / REPEATS
        sites = crowd.seconds / REPEATS
        down, up, _ = (n / count / 1000 for n in made[-1].traffic)
        print(
            f"| {count} | {int(lost >= 0)} | {down:.0f} | {up:.0f} | "
            f"{sites / count:.3f} | {elapsed - sites:.2f} | {first:.2f} |",
            flush=True,
        )


def main(counts: list[int]) -> None:
    """Print the table."""
    plain = NUMBERS * 4 / 1000
    print(f"{NUMBERS:,} numbers; without masks {plain:.0f} kB down and up a site.\n")
    print("| sites | lost | kB down | kB up | s a site | s server | first s a site |")
    print("|---|---|---|---|---|---|---|")
    for count in counts:
        measure(count)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [4, 16, 64, 256])
