"""The participants of a federation: the client of each node, and late ones."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedbilevel._schema import Terms
from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import wire
from fedbilevel.federation.refusals import RefusedError, RefusedThereError, refusal_of
from fedbilevel.federation.wire import Bytes, Carried, Header, Seal
from fedbilevel.problem import as_weights

_LARGEST_HELLO = 1 << 32  # bytes, until it is known how large the model is
_PAUSE = 0.2  # seconds between two looks for nodes
_SHORT = 1.0  # seconds to wait for a node that did not answer before
_FETCHED = 5.0  # seconds in which a node fetches a notice


class Transport(Protocol):
    """Carries packets to nodes and back."""

    def nodes(self) -> set[int]:
        """Return the nodes that can be reached now."""
        ...

    def key(self, node: int) -> str:
        """Return the fingerprint of the key by which a node was let in."""
        ...

    def exchange(
        self,
        packets: Mapping[int, bytes],
        seconds: float,
        enough: Callable[[set[int], float], bool],
        largest: int,
    ) -> dict[int, Carried]:
        """Send to nodes; return what came back in time.

        Waits until all answered, `seconds` passed, or `enough(answered, elapsed)`. A
        reply of more than `largest` bytes is not fetched, but refused.
        """
        ...


@dataclass(frozen=True)
class Identity:
    """Which federation this is, by a name drawn for it and its settings' fingerprint.

    `attempt` counts the starts of its server.
    """

    federation: str
    settings: str
    attempt: int


@dataclass
class Member:
    """A client and the node where it is.

    `info` is what it said of itself, `start` the leaves of its first x and y, `known`
    the digests of the leaves it holds. `weight` is what it counts in means, which the
    operator of the server decides, and never the client.
    """

    node: int
    algorithm: str
    info: Mapping[str, Any]
    start: list[np.ndarray]
    weight: float = 1.0
    late: bool = False
    known: frozenset[str] = field(default_factory=frozenset)

    @property
    def declared(self) -> str:
        """A digest of what it said of itself that must stay as it is."""
        names = ("facts", "holds", "concludes")
        said = {name: self.info.get(name) for name in names}
        leaves = [wire.digest(leaf) for leaf in self.start]
        text = json.dumps([self.algorithm, said, leaves], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def facts(self) -> Mapping[str, Any]:
        """Its view of the task."""
        return self.info["facts"]


class Roster:
    """The clients that said hello.

    A node that comes later in a client's name wins: it is the same site, started again,
    and must say of itself what it said before. `weights` are those of clients 0, 1, ...
    in means, all 1 if there are none. `check_facts(facts, leaves)` refuses what a site
    cannot know of a task, or not with so many leaves of x and y. `seal` is how sites
    know the server's packets, and it knows theirs. `steps` go with a hello to sites
    that take theirs from the server.
    """

    def __init__(
        self,
        transport: Transport,
        clients: int,
        identity: Identity,
        terms: Terms,
        report: Callable[[str], None],
        *,
        weights: Sequence[float] = (),
        check_facts: Callable[[Mapping[str, Any], int], None] = lambda *facts: None,
        seal: Seal = wire.CHECKSUM,
        steps: Mapping[str, Any] | None = None,
    ) -> None:
        self.transport, self.clients, self.steps = transport, clients, steps
        self.identity, self.terms, self.report = identity, terms, report
        every = as_weights(weights or None, clients)
        self.weights: list[float] = np.asarray(every).tolist()
        self._check_facts, self.seal, self._number = check_facts, seal, 0
        self.members: dict[int, Member] = {}
        self.algorithm = ""  # its fingerprint, once that is agreed on
        self._declared: dict[int, str] = {}  # by each client, once that is so
        self._largest = _LARGEST_HELLO
        self._met: set[int] = set()
        self._present: set[int] = set()  # when last looked
        self._silent: set[int] = set()  # did not answer our last hello
        self._turned_away: dict[int, str] = {}  # why, by node

    def gather(self, seconds: float, enough: int) -> None:
        """Wait until all clients came; raise if fewer than `enough` are there then."""
        end, said = time.monotonic() + seconds, []
        while True:
            self.refresh()
            missing = sorted(set(range(self.clients)) - set(self.members))
            if not missing:
                return
            if missing != said:
                said, named = missing, f"client{'s' if len(missing) > 1 else ''}"
                self.report(f"waiting for {named} {', '.join(map(str, missing))}")
            if time.monotonic() > end:
                break
            time.sleep(_PAUSE)
        if len(self.members) < enough:
            reasons = self._turned_away.values()
            turned = "".join(f" Not taken: {why}." for why in reasons)
            raise FedbilevelError(
                f"clients {missing} did not come within {seconds:g} seconds.{turned} "
                "Start their nodes, with the settings of the server, and serve again."
            )
        self.report(f"continuing without clients {missing}")

    def farewell(self) -> None:
        """Notify all nodes that the federation is over, and wait until they know."""
        self.refresh()
        nodes = {one.node for one in self.members.values()} & self._present
        self._notify(nodes, {"over": True}, wait=True)

    def _notify(self, nodes: set[int], what: dict[str, Any], *, wait: bool) -> None:
        """Send a notice, which needs no answer."""
        header = self.header(wire.NOTICE, number=self.next_number(), info=what)
        packets = dict.fromkeys(nodes, wire.pack(header, seal=self.seal))
        self.transport.exchange(packets, _FETCHED, lambda *_: not wait, wire.SPARE)

    def header(self, kind: str, **more: Any) -> Header:
        """Return the header of a packet to all clients."""
        made, named = self.identity, {"algorithm": self.algorithm, **more}
        named |= {"client": wire.EVERYONE, "attempt": made.attempt}
        return Header(kind, made.federation, made.settings, **named)

    def next_number(self) -> int:
        """Return the number of a request; no two of one attempt have the same."""
        self._number += 1
        return self._number

    def refresh(self) -> None:
        """Forget nodes that left; say hello to those that are new."""
        self._present = self.transport.nodes()
        self._met &= self._present
        fresh = self._present - self._met
        if not fresh:
            return
        number = self.next_number()
        hello = self.header("hello", algorithm="", number=number, info=self.steps)
        answers = self.transport.exchange(
            dict.fromkeys(fresh, wire.pack(hello, seal=self.seal)),
            self.terms.deadline,
            lambda answered, elapsed: self._enough(fresh, answered, elapsed),
            self._largest,
        )
        self._silent = fresh - set(answers)
        for node, answer in answers.items():
            self._met.add(node)
            self._enlist(node, answer, number)

    def _enough(self, asked: set[int], answered: set[int], elapsed: float) -> bool:
        """Say whether to wait no longer for answers to a hello.

        Nodes that were killed are still listed for a while. They are not waited for if
        every client can have a node without them, and not as long a second time.
        """
        if len(answered) >= self.clients:
            return True
        return asked - answered <= self._silent and elapsed > _SHORT

    def agree(self, algorithm: str) -> None:
        """Keep the members that built this algorithm, and take no others from now."""
        self.algorithm = algorithm
        for client, member in list(self.members.items()):
            if member.algorithm != algorithm:
                del self.members[client]
                self.report(f"client {client} is not taken: built another algorithm")
        self._declared = {k: member.declared for k, member in self.members.items()}
        sizes = (wire.size_of(member.start) for member in self.members.values())
        self._largest = max(sizes, default=0) + wire.SPARE
        if not self.members:
            raise FedbilevelError(
                "all clients built another algorithm than the server. Start them with "
                "the same settings and the same version of fedbilevel."
            )

    def reachable(self, clients: list[int]) -> list[int]:
        """Return those of the clients that had a node when last looked."""
        known = [client for client in clients if client in self.members]
        return [k for k in known if self.members[k].node in self._present]

    def again(self, client: int) -> None:
        """Say hello once more to a site that forgot us."""
        self._met.discard(self.members[client].node)

    def _enlist(self, node: int, answer: Carried, number: int) -> None:
        try:
            header, leaves, body = wire.unpack(answer, self._largest, self.seal)
            if header.number != number and header.kind != "refused":
                raise RefusedError("replayed", "answers another hello")
            member = self._member(node, header, leaves, body)
        except Exception as error:
            refusal, told = refusal_of(error)
            self._turned_away[node] = f"node {node}, {told}"
            self.report(f"node {node} is not taken: {told}")
            # A node that refused knows why.
            if not isinstance(error, RefusedThereError):
                why = {"reason": refusal.reason, "detail": refusal.detail}
                self._notify({node}, {"over": False, **why}, wait=False)
            return
        self._turned_away.pop(node, None)
        self.members[header.client] = member
        self.report(f"client {header.client} is at node {node}")

    def _member(self, node: int, header: Header, leaves: list, body: Bytes) -> Member:
        info = header.info or {}
        if header.kind == "refused":
            raise RefusedThereError(info)
        self._check_origin(node, header)
        facts, flags = info.get("facts"), (info.get("holds"), info.get("concludes"))
        if not isinstance(facts, dict) or not all(type(one) is bool for one in flags):
            raise RefusedError("garbage", f"client {header.client} reports no facts")
        self._check_facts(facts, len(leaves))
        start = self._shared(wire.unpack_start(leaves, body))
        weight = self.weights[header.client]
        member = Member(node, header.algorithm, info, start, weight)
        # Known once all agreed on an algorithm: until then a site may be mended.
        before = self._declared.get(header.client, member.declared)
        if member.declared != before:
            raise RefusedError(
                "changed",
                f"client {header.client} says something else of its task than when "
                "the run started",
            )
        if self.algorithm:
            self._declared[header.client] = member.declared
        return member

    def _check_origin(self, node: int, header: Header) -> None:
        if (header.kind, header.federation) != ("hello", self.identity.federation):
            raise RefusedError("federation", "answers another server")
        if header.settings != self.identity.settings:
            raise RefusedError("settings", "runs with other settings")
        if header.client >= self.clients:
            raise RefusedError("client", f"number {header.client} of {self.clients}")
        expected = self.terms.keys[header.client : header.client + 1]
        if expected and self.transport.key(node) != expected[0]:
            raise RefusedError(
                "key", f"says it is client {header.client}, by its key not"
            )
        if self.algorithm and header.algorithm != self.algorithm:
            raise RefusedError("algorithm", "built another algorithm than the server")

    def _shared(self, start: list[np.ndarray]) -> list[np.ndarray]:
        """Return these leaves, or those of a client that sent the same before.

        So a server holds the start of the sites once, however many they are.
        """
        names = [wire.digest(leaf) for leaf in start]
        for member in self.members.values():
            if [wire.digest(leaf) for leaf in member.start] == names:
                return member.start
        return start
