"""The server's requests to the sites, and the answers that it accepts."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from fedbilevel.algorithms import ServerTurn
from fedbilevel.channels import SecureMean
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.federation import wire
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.server import guard, requests
from fedbilevel.federation.server.blind_job import algorithm_fingerprint
from fedbilevel.federation.server.requests import Answers, Read, Request, RequestFor
from fedbilevel.federation.server.roster import Member, Roster
from fedbilevel.federation.wire import Bytes, Header
from fedbilevel.runtime import exchange
from fedbilevel.runtime.job import Job, start_server

if TYPE_CHECKING:
    from fedbilevel.federation.secure.server import MaskedServer

_PAUSE = 0.5  # seconds before too few replies are asked for again
_TRIES = 3  # to ask, if all answers are refused
_STUCK = 10  # times in a row that the same clients may be refused and not go without
_ALTERNATING = 30  # the same, of clients that take turns
# After which exchange a client stands, and which one no restart can undo.
Stand = Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class Question:
    """One exchange: the server's messages and their receivers.

    `asked` are clients in their places, `sent` is what travels to them, and `turn` what
    the server knows before the replies are there.
    """

    header: Header
    link: exchange.Link
    asked: list[int]
    turn: ServerTurn
    sent: PyTree
    _messages: dict[int, PyTree] = field(default_factory=dict)

    @functools.cached_property
    def apart(self) -> bool:
        """Whether each client is sent something of its own."""
        return not all(exchange.common_leaves(self.sent))

    def place(self, client: int) -> int:
        """Return whose message a client gets: that of its place, or the common one."""
        return self.asked.index(client) if self.apart else 0

    def message(self, place: int) -> PyTree:
        """Return what is sent to a place."""
        if place not in self._messages:
            own = exchange.for_place(self.sent, place)
            self._messages[place] = jax.tree.map(jnp.asarray, own)
        return self._messages[place]

    def leaves(self, place: int) -> list[np.ndarray]:
        """Return what travels to a place."""
        sent = self.link.job.channel.sent(exchange.for_place(self.sent, place))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(sent)]

    @functools.cached_property
    def alike(self) -> list[str]:
        """The digests of leaves that all are sent alike."""
        leaves = zip(self.leaves(0), exchange.common_leaves(self.sent), strict=True)
        return [wire.digest(leaf) for leaf, alike in leaves if alike]

    def present(self, taken: Mapping[int, Any]) -> Bool[Array, " places"]:
        """Flag the places of those whose reply was taken."""
        return jnp.asarray([client in taken for client in self.asked])


class Exchanges:
    """Asks the sites of a roster, and leaves out what cannot be believed.

    `metrics` names what the sites measure. `left_out` is called with every reply that
    was not taken: which, and why.
    """

    def __init__(
        self,
        job: Job,
        roster: Roster,
        metrics: tuple[str, ...],
        left_out: Callable[[dict[str, Any]], None],
    ) -> None:
        self.job, self.roster, self.left_out = job, roster, left_out
        roster.agree(algorithm_fingerprint(job))
        self._futile = 0  # how often all answers were refused, in a row
        self._stuck: list[set[int]] = []  # clients refused each time there were too few
        self._links = exchange.links_of(job)
        self._coded = {
            where: job.channel.coded_shape(link.reply_shape())
            for where, link in self._links.items()
        }
        shapes = jax.eval_shape(
            lambda: exchange.client_scalars(
                job, 0, start_server(job), exchange.start_kept(job).own
            )
        )
        names = (*shapes, *metrics)
        self.measurement = {name: shapes["upper_loss"] for name in names}

    def question(
        self,
        header: Header,
        server: PyTree,
        where: tuple[int, int],
        index: int,
        asked: list[int],
    ) -> Question:
        """Return what is said in one phase, which ran `index` times before."""
        link, everybody = self._links[where], jnp.ones(len(asked), bool)
        ids = jnp.asarray(asked, jnp.int32)
        turn = exchange.server_turn(self.job, where, index, ids, everybody)
        sent = link.sent(jax.tree.map(jnp.asarray, server), turn)
        stage, number = where
        header = replace(
            header, stage=stage, phase=number, name=link.phase.name, index=index
        )
        return Question(header, link, asked, turn, jax.tree.map(np.asarray, sent))

    def exchange(self, question: Question, stand: Stand) -> Answers:
        """Return the replies, and what they make together."""
        coded = self._coded[question.link.where]
        masked = isinstance(self.job.channel.reduction, SecureMean)
        if masked:
            answers = self._masked_exchange(question, stand, coded)
        else:
            answers = self._replies(question, question.asked, stand, coded)
            self._reduce(answers, question)
        guard.require_finite(answers.reply, question.header, "the mean of the replies")
        self.name_refused(question.header, answers)
        if masked:
            self._masked.check_progress()
        return answers

    def _masked_exchange(
        self, question: Question, stand: Stand, coded: PyTree
    ) -> Answers:
        link = question.link
        if question.apart and link.phase.about is not None:
            raise InvalidInputError(
                f"phase '{link.phase.name}' sends each client a message of its own, so "
                "that masked replies have no common scale. Use another aggregation."
            )
        if question.header.exchange > 1:
            last = question.header.exchange - 1
            everybody = range(self.roster.clients)
            members = {k for k in everybody if stand(k)[0] == last}
            # Of drawn cohorts the last sum may have had others, not asked now.
            if members <= set(question.asked):
                self._masked.goes_on(members)
        announced = self._masked.announced(question.asked, question.header.exchange)
        if announced is None:
            return Answers()
        header = replace(question.header, info=asdict(announced))
        question = replace(question, header=header)
        like = self._masked.like(coded, announced)
        answers = self._replies(question, announced.participants, stand, like)
        about = link.known_in_clear(question.sent, question.turn)
        alike = (question.header, question.alike)
        self._masked.average(answers, announced, alike, coded, about)
        if answers.taken:
            answers.reply = link.received(question.sent, answers.reply, question.turn)
        return answers

    @functools.cached_property
    def _masked(self) -> "MaskedServer":
        # Modules for masks are loaded only if there are any.
        from fedbilevel.federation.secure.server import MaskedServer

        return MaskedServer(self.roster, self.ask)

    def _replies(
        self, question: Question, clients: list[int], stand: Stand, like: PyTree
    ) -> Answers:
        """Return what came back (tree, whether renewed), each checked by itself."""
        header = question.header
        common = frozenset(question.alike)

        @functools.cache
        def request(
            place: int, accepted: int, kept: int, known: frozenset[str]
        ) -> Request:
            leaves = question.leaves(place)
            return Request(replace(header, accepted=accepted, kept=kept), leaves, known)

        def request_for(client: int, member: Member) -> Request:
            # In a cohort drawn anew a client may have missed what it should hold.
            everyone = self.job.participants == self.roster.clients
            known = member.known if everyone and member.info.get("holds") else ()
            return request(question.place(client), *stand(client), frozenset(known))

        def read(client: int, info: Mapping[str, Any], listed: list, body: Bytes):
            tree = wire.unpack_tree(listed, body, like)
            self.roster.members[client].known = common
            return tree, bool(info.get("renewed"))

        return self.ask(clients, request_for, read, like)

    def _reduce(self, answers: Answers, question: Question) -> None:
        """Decode the replies, leave out those that are far off, reduce the others."""
        link, turn = question.link, question.turn
        replies = self._decoded(answers, question)
        places = {client: question.place(client) for client in replies}
        known = {
            place: link.known(question.message(place), turn)
            for place in set(places.values())
        }
        tolerance = self.roster.terms.tolerance
        far, doubt = guard.implausible(replies, places, known, tolerance)
        if doubt:
            where = f"round {question.header.round}, phase '{question.header.name}'"
            self.roster.report(f"{where}: {doubt}; all are taken")
        for client, how in far.items():
            del answers.taken[client], replies[client]
            answers.refused[client] = RefusedError("implausible", how)
        if not replies:
            return
        # In all places, as in the simulator: one without a reply weighs nothing.
        somebody = next(iter(replies.values()))
        placed = [replies.get(client, somebody) for client in question.asked]
        stacked = jax.tree.map(lambda *one: jnp.asarray(np.stack(one)), *placed)
        present = question.present(replies)
        weights = jnp.where(present, self.weights(question.asked), 0)
        guard.require_weight(weights, question.header)
        answers.reply = link.reduced(stacked, weights)

    def _decoded(self, answers: Answers, question: Question) -> dict[int, PyTree]:
        """Return the replies as numbers, and leave out those that cannot be.

        Each is validated by itself, before they are compared.
        """
        replies, channel = {}, self.job.channel
        for client, (coded, _) in list(answers.taken.items()):
            reason, wrong = "range", channel.why_impossible(coded, question.link.like)
            if not wrong:
                if channel.coders:
                    # Not before: masked replies have 64 bits, whatever the precision.
                    coded = jax.tree.map(jnp.asarray, coded)
                message = question.message(question.place(client))
                replies[client] = question.link.received(message, coded, question.turn)
                reason, wrong = "not-finite", guard.why_unusable(replies[client])
            if wrong:
                replies.pop(client, None)
                del answers.taken[client]
                answers.refused[client] = RefusedError(reason, wrong)
        return replies

    def weights(self, clients: list[int]) -> Float[Array, " clients"]:
        """Return the weights of some clients; of one that never came it is 0."""
        known = {k: member.weight for k, member in self.roster.members.items()}
        return jnp.asarray([known.get(client, 0.0) for client in clients])

    def share(self, clients: list[int]) -> Float[Array, ""]:
        """Return the share that some clients have of the weight of all."""
        every = jnp.asarray(self.roster.weights, float)
        return jnp.sum(every[jnp.asarray(clients)]) / jnp.sum(every)

    def enough(self, answers: Answers, asked: list[int]) -> bool:
        """Say whether so many replies make one: by the terms, and by the reduction."""
        count = len(answers.taken)
        if count < max(min(self.roster.terms.minimum, len(asked)), 1):
            return False
        try:
            self.job.channel.reduction.check(count)
        except InvalidInputError as error:
            self.roster.report(f"{count} replies are too few: {error}")
            return False
        return True

    def ask(
        self, clients: list[int], request_for: RequestFor, read: Read, like: PyTree
    ) -> Answers:
        """Ask clients for answers like `like`."""
        largest = wire.size_of(like) + wire.SPARE
        answers = requests.ask(self.roster, clients, request_for, read, largest)
        self._futile = 0 if answers.taken else self._futile
        return answers

    def settled(self) -> None:
        """Note that an exchange was made, whether or not clients were refused."""
        self._stuck = []

    def _check_stuck(self, answers: Answers) -> None:
        """Raise if too few replies are left because some are refused each time."""
        self._stuck = [*self._stuck, set(answers.refused)][-_ALTERNATING:]
        last, blamed, times = self._stuck[-_STUCK:], set(), _STUCK
        if len(last) == _STUCK:
            blamed = set.intersection(*last)
        if len(self._stuck) == _ALTERNATING and all(self._stuck) and not blamed:
            blamed, times = set.union(*self._stuck), _ALTERNATING
        if not blamed:
            return
        reasons = {k: str(why) for k, why in sorted(answers.refused.items())}
        raise FedbilevelError(
            f"{len(answers.taken)} replies are too few, and clients {sorted(blamed)} "
            f"were refused {times} times in a row: {reasons}. Look at their nodes, or "
            "serve without them: with fewer clients, a lower --minimum, or another "
            "--aggregate."
        )

    def name_refused(self, header: Header, answers: Answers) -> None:
        """Report the clients left out, and why."""
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
        self._check_stuck(answers)
        futile = answers.refused and not answers.taken
        self._futile = self._futile + 1 if futile else 0
        if self._futile >= _TRIES:
            reasons = {k: str(why) for k, why in sorted(answers.refused.items())}
            raise FedbilevelError(
                f"every reply was refused {_TRIES} times in a row. By client: {reasons}"
            )
        self.roster.report(f"only {len(answers.taken)} replies, asking again")
        time.sleep(_PAUSE)
