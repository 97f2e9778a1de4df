"""What the server says to the sites and what it takes of their answers."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedbilevel.algorithms import Phase, Turn
from fedbilevel.channels import SecureMean
from fedbilevel.errors import FedbilevelError
from fedbilevel.runtime._exchange import (
    Link,
    Measurement,
    client_measurement,
    reduce_replies,
)
from fedbilevel.runtime.federation.asking import Answers, ask
from fedbilevel.runtime.federation.guard import implausible
from fedbilevel.runtime.federation.plan import algorithm_mark
from fedbilevel.runtime.federation.roster import Member, Roster
from fedbilevel.runtime.federation.site import shared_reference
from fedbilevel.runtime.federation.wire import (
    EVERYONE,
    Header,
    RefusedError,
    digest,
    pack,
    unpack_tree,
)
from fedbilevel.runtime.job import Job, start_kept, start_server

__all__ = ["Conversation"]

_SPARE = 1 << 20  # bytes a packet may have beyond its leaves
_PAUSE = 0.5  # seconds before too few replies are asked for again
_TRIES = 3  # to ask, if all who answer are refused


class Conversation:
    """Asks the sites of a roster, and leaves out what cannot be believed.

    `left_out` is called with every reply that was not taken: which, and why.
    """

    def __init__(
        self,
        job: Job,
        roster: Roster,
        metrics: tuple[str, ...],
        left_out: Callable[[dict[str, Any]], None],
    ) -> None:
        self.job, self.roster, self.left_out = job, roster, left_out
        roster.agree(algorithm_mark(job, roster.clients))
        self.site_seconds = 0.0  # of the slowest site in every exchange
        self._futile = 0  # how often all answers were refused, in a row
        self._shapes: dict[tuple[int, int], PyTree] = {}
        shapes = jax.eval_shape(
            lambda: client_measurement(job, 0, start_server(job), start_kept(job).own)
        )
        numbers = {name: shapes.upper for name in metrics}
        self._measurement = replace(shapes, metrics=numbers)

    def header(self, kind: str, shown: int, exchange: int) -> Header:
        """Return the header of a packet to all clients; round -1 is the setup."""
        identity = self.roster.identity
        return Header(
            kind,
            identity.experiment,
            self.roster.algorithm,
            identity.task,
            EVERYONE,
            attempt=identity.attempt,
            round=shown + 1,
            exchange=exchange,
        )

    def exchange(
        self,
        header: Header,
        phase: Phase,
        message: PyTree,
        chosen: list[int],
        stand: Callable[[int], tuple[int, int]],
    ) -> Answers:
        """Return who of the chosen clients replied, and the mean reply.

        `stand(client)` says after which exchange it stands, and which is kept for good.
        """
        link = Link.of(self.job, phase, (header.stage, header.phase))
        coded = self._coded_like(header, link)
        sealed = None
        if isinstance(self.job.channel.reduction, SecureMean):
            sealed = self._sealing.announced(chosen)
            if sealed is None:
                return Answers()
            header, chosen = replace(header, info=sealed.info()), sealed.participants
        like = coded if sealed is None else self._sealing.like(coded)
        answers = self._replies(header, message, chosen, stand, like)
        if sealed is None:
            self._average(answers, link, message)
        else:
            about = shared_reference(self.job, phase, message)
            self._sealing.average(answers, header, sealed, coded, about)
            if answers.taken:
                answers.mean = link.received(message, answers.mean)
        self._name(header, answers)
        return answers

    def _replies(
        self,
        header: Header,
        message: PyTree,
        chosen: list[int],
        stand: Callable[[int], tuple[int, int]],
        like: PyTree,
    ) -> Answers:
        """Return what came back (tree, whether renewed), each checked by itself."""
        leaves, spent = jax.tree.leaves(message), []
        names = frozenset(digest(leaf) for leaf in leaves)

        @functools.cache
        def packed(accepted: int, kept: int, known: frozenset[str]) -> bytes:
            return pack(replace(header, accepted=accepted, kept=kept), leaves, known)

        def packet_for(client: int, member: Member) -> bytes:
            # In a cohort drawn anew a client may have missed what it should hold.
            everyone = self.job.participants == self.roster.clients
            known = member.known if everyone and member.info.get("holds") else ()
            return packed(*stand(client), frozenset(known))

        def read(client: int, reply: Header, listed: list, body: bytes):
            accepted, kept = stand(client)
            asked = replace(header, client=client, accepted=accepted, kept=kept)
            if replace(reply, info=header.info) != asked:
                raise RefusedError(
                    "replayed", "answers another packet than the one sent"
                )
            tree = unpack_tree(listed, body, like)
            self.roster.members[client].known = names
            info = reply.info or {}
            seconds = info.get("seconds")
            spent.append(seconds if isinstance(seconds, float) else 0.0)
            return tree, bool(info.get("renewed"))

        answers = self.ask(chosen, packet_for, read, like)
        self.site_seconds += max(spent, default=0.0)
        return answers

    def _average(self, answers: Answers, link: Link, message: PyTree) -> None:
        """Decode the replies, leave out those that are far off, reduce the others."""
        replies = {
            client: link.received(message, jax.tree.map(jnp.asarray, coded))
            for client, (coded, _) in answers.taken.items()
        }
        about = None if link.phase.about is None else link.phase.about(message)
        far = implausible(replies, about, self.roster.terms.tolerance)
        for client, how in far.items():
            del answers.taken[client], replies[client]
            answers.refused[client] = RefusedError("implausible", how)
        if not replies:
            return
        clients = sorted(replies)
        stacked = jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *(replies[client] for client in clients)
        )
        weights = self.weights(clients)
        answers.mean = reduce_replies(self.job, stacked, weights, _here, _here)

    def weights(self, clients: list[int]) -> Float[Array, " clients"]:
        """Return the weights of some clients."""
        return jnp.asarray([self.roster.members[client].weight for client in clients])

    def measure(
        self, header: Header, server: PyTree, stand: Callable[[int], tuple[int, int]]
    ) -> Answers:
        """Return the measurements (values, more) of all clients that answer."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(server)]
        like = self._measurement

        @functools.cache
        def packed(accepted: int, kept: int) -> bytes:
            return pack(replace(header, accepted=accepted, kept=kept), leaves)

        def packet_for(client: int, member: Member) -> bytes:
            return packed(*stand(client))

        def read(client: int, reply: Header, listed: list, body: bytes):
            same = ("kind", "experiment", "attempt", "round", "exchange")
            if any(getattr(reply, name) != getattr(header, name) for name in same):
                raise RefusedError(
                    "replayed", "answers another packet than the one sent"
                )
            values: Measurement = unpack_tree(listed, body, like, finite=False)
            return values, dict(reply.info or {})

        everyone = list(range(self.roster.clients))
        answers = self.ask(everyone, packet_for, read, like)
        self._name(header, answers)
        return answers

    def ask(
        self,
        clients: list[int],
        packet_for: Callable[[int, Member], bytes],
        read: Callable[[int, Header, list, bytes], Any],
        like: PyTree,
    ) -> Answers:
        """Ask clients; ask again those whose process is a new one."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        answers = ask(self.roster, clients, packet_for, read, size + _SPARE)
        if answers.taken:
            self._futile = 0
        again = []
        for client, refusal in answers.refused.items():
            member = self.roster.members[client]
            if refusal.reason in ("unknown", "experiment"):
                # Its process is a new one: it holds nothing, or forgot the hello.
                member.known = frozenset()
                again.append(client)
            if refusal.reason == "experiment":
                self.roster.again(client)
        if again:
            more = ask(self.roster, again, packet_for, read, size + _SPARE)
            answers.taken |= more.taken
            answers.refused = {
                client: refusal
                for client, refusal in (answers.refused | more.refused).items()
                if client not in more.taken
            }
            answers.traffic += more.traffic
        return answers

    def _name(self, header: Header, answers: Answers) -> None:
        for client, refusal in sorted(answers.refused.items()):
            entry = {
                "round": header.round,
                "exchange": header.exchange,
                "phase": header.name or header.kind,
                "client": client,
                "reason": refusal.reason,
                "detail": refusal.detail,
            }
            self.left_out(entry)
            self.roster.report(
                f"round {header.round}, exchange {header.exchange}: client {client} "
                f"is left out ({refusal})"
            )

    def pause(self, answers: Answers) -> None:
        """Wait a little before asking again; raise where that would not help.

        Nodes may come back, however long it takes. But if those that are there are
        refused again and again, somebody must look.
        """
        futile = answers.refused and not answers.taken
        self._futile = self._futile + 1 if futile else 0
        if self._futile >= _TRIES:
            reasons = {k: str(why) for k, why in sorted(answers.refused.items())}
            raise FedbilevelError(
                f"every reply was refused {_TRIES} times in a row. By client: {reasons}"
            )
        self.roster.report(f"only {len(answers.taken)} replies, asking again")
        time.sleep(_PAUSE)

    def _coded_like(self, header: Header, link: Link) -> PyTree:
        """Return the shapes of what travels back in a phase."""
        where = (header.stage, header.phase)
        if where not in self._shapes:
            job = self.job

            def reply() -> PyTree:
                turn = Turn(job.key, jnp.zeros((), jnp.int32))
                message = link.phase.down(start_server(job))
                return link.work(message, start_kept(job), turn, 0)[1]

            self._shapes[where] = jax.eval_shape(reply)
        return self._shapes[where]

    @functools.cached_property
    def _sealing(self) -> Any:
        # What masks need is loaded only if there are any.
        from fedbilevel.runtime.federation.unsealing import Unsealing

        return Unsealing(self.roster, self.ask)


def _here(value: Any) -> Any:
    return value
