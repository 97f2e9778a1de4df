"""The one definition of an exchange on both of its ends, and of what is measured."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import combine, is_any
from fedbilevel._types import Pair, Triple
from fedbilevel.algorithms import Each, Gathered, Phase, ServerTurn, Turn
from fedbilevel.channels import weighted_mean
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime import keys
from fedbilevel.runtime.job import (
    Job,
    Kept,
    State,
    Where,
    first_server,
    start_server,
    strongly_typed,
)

Across = Callable[[Any], Any]  # of what the devices hold


def server_turn(
    job: Job,
    where: tuple[int, int],
    index: Array | int,
    ids: Array | None,
    present: Array,
    weight: Array | None = None,
) -> ServerTurn:
    """Return what the server knows of an exchange."""
    shared = keys.shared_key(job.key, *where, index)
    return ServerTurn(index, shared, ids, present, job.clients, weight)


def asked_clients(
    job: Job,
    phase: Phase,
    where: tuple[int, int],
    index: Array | int,
    *at_keys: keys.AtKeys,
) -> Array:
    """Return the clients of an exchange, by place."""
    clients, count = job.clients, job.cohort(phase)
    if count == clients:
        return jnp.arange(count, dtype=jnp.int32)
    return keys.draw_cohort(job.key, *where, index, clients, count, *at_keys)


def attendance(
    job: Job, state: State, where: tuple[int, int], index: Array | int, asked: Array
) -> Array | None:
    """Return how those that are asked attend: as recorded, or drawn; None for all."""
    if job.attendance is not None:
        return job.attendance[state.exchanges, asked]
    if job.chances is None:
        return None
    drawn = keys.draw_replies(job.key, *where, index, job.chances, asked)
    return drawn.astype(jnp.uint8)


def for_place(sent: PyTree, place: Array | int) -> PyTree:
    """Return the message of one place: of every `Each` its own entry."""

    def entry(node: Any) -> Any:
        if not _is_each(node):
            return node
        return jax.tree.map(lambda leaf: leaf[place], node.tree)

    return jax.tree.map(entry, sent, is_leaf=_is_each)


def common_leaves(sent: PyTree) -> list[bool]:
    """Say of each leaf of what is sent whether all are sent it alike."""
    flags: list[bool] = []
    for node in jax.tree.leaves(sent, is_leaf=_is_each):
        flags += [not _is_each(node)] * len(jax.tree.leaves(node))
    return flags


def _is_each(node: Any) -> bool:
    return isinstance(node, Each)


def _check_places(message: PyTree, phase: str, cohort: int) -> None:
    """Raise unless every `Each` has an entry for each participant."""
    for node in jax.tree.leaves(message, is_leaf=_is_each):
        for leaf in jax.tree.leaves(node.tree) if _is_each(node) else ():
            if leaf.shape[:1] != (cohort,):
                raise InvalidInputError(
                    f"phase '{phase}' has messages for {leaf.shape[0]} participants, "
                    f"but {cohort} take part. Make the two numbers equal."
                )


class Link(eqx.Module):
    """One phase of a job between a client and the server, through the job's channel.

    `where` is the stage and the number of the phase; `like` has the shapes of a reply
    where the channel codes it.
    """

    job: Job
    phase: Phase
    where: tuple[int, int] = eqx.field(static=True)
    like: PyTree

    @staticmethod
    def of(job: Job, phase: Phase, where: tuple[int, int]) -> "Link":
        """Find out the shapes, where they are needed."""
        bare = Link(job, phase, where, None)
        like = bare.reply_shape() if job.channel.coders else None
        return Link(job, phase, where, like)

    @property
    def hides(self) -> bool:
        """Say whether clients keep blocks that the server does not have."""
        return is_any(self.job.private)

    def sent(self, server: PyTree, turn: ServerTurn) -> PyTree:
        """Return what travels to the clients.

        Where blocks are private this is all of the server's state. A client puts its
        own blocks in and forms the message itself.
        """
        if self.hides:
            return server
        message = self.phase.message(server, turn)
        _check_places(message, self.phase.name, self.job.cohort(self.phase))
        return message

    def work(
        self, sent: PyTree, kept: Kept, turn: Turn, client: Array | int
    ) -> tuple[Kept, PyTree, Array]:
        """Do one client's part.

        `sent` is what this client got. Return anew what it keeps, exactly what travels
        back, and whether all of the reply was finite.
        """
        kept, change, finite = self.change(sent, kept, turn, client)
        return *self.code(change, kept, turn), finite

    def change(
        self, sent: PyTree, kept: Kept, turn: Turn, client: Array | int
    ) -> tuple[Kept, PyTree, Array]:
        """Do all of it but the coding: return the change that is to be coded."""
        job, phase, own, message = self.job, self.phase, kept.own, sent
        alone = self._as_a_server(turn)
        if self.hides:
            server = combine(sent, own)
            message = phase.message(server, alone)
        memory, reply = phase.local(message, kept.memory, job.oracle(client), turn)
        if self.hides:
            # Private blocks are updated as the server updates the others.
            own = job.own(phase.taken_in(combine(sent, own), reply, alone))
        change = job.public(reply)
        if kept.channel is not None:
            known = self.known(sent, turn)
            change = change if known is None else _tree.subtract(change, known)
        return Kept(memory, own, kept.channel), change, _tree.all_finite(reply)

    def code(self, change: PyTree, kept: Kept, turn: Turn) -> tuple[Kept, PyTree]:
        """Return anew what a client keeps, and its change as it travels."""
        held = kept.channel
        if held is None:
            return kept, change
        coded, after = self.job.channel.encode(
            change, held[self.where], turn.channel_key()
        )
        held = {**held, self.where: after}
        return Kept(kept.memory, kept.own, held), coded

    def _as_a_server(self, turn: Turn) -> ServerTurn:
        everybody = jnp.ones(self.job.cohort(self.phase), bool)
        return ServerTurn(turn.index, turn.shared, None, everybody, self.job.clients)

    def known(self, sent: PyTree, turn: Turn | ServerTurn) -> PyTree | None:
        """Return what both sides know of a reply from what was sent; None for zeros."""
        if self.phase.about is None:
            return None
        if not self.hides:
            return self.phase.about(sent)
        alone = turn if isinstance(turn, ServerTurn) else self._as_a_server(turn)
        return self.phase.about(self.phase.message(sent, alone))

    def known_in_clear(self, sent: PyTree, turn: Turn | ServerTurn) -> PyTree | None:
        """Return the same of what travels; of changes nothing is known."""
        if self.job.channel.sends_changes:
            return None
        return self.known(jax.tree.map(jnp.asarray, sent), turn)

    def received(self, sent: PyTree, coded: PyTree, turn: Turn | ServerTurn) -> PyTree:
        """Do the server's part: return the reply that arrives with what was sent.

        `sent` is as the server knows it, and not as it was rounded in transit.
        """
        if not self.job.channel.sends_changes:
            return coded
        change = self.job.channel.decode(coded, self.like)
        known = self.known(sent, turn)
        return change if known is None else _tree.add(change, known)

    def answer(
        self, sent: PyTree, kept: Kept, turn: Turn, client: Array | int
    ) -> tuple[Kept, PyTree, Array]:
        """Do both, where nothing lies between them."""
        channel = self.job.channel
        heard = channel.received(channel.sent(sent), sent)
        kept, coded, finite = self.work(heard, kept, turn, client)
        return kept, self.received(sent, coded, turn), finite

    def reduced(
        self,
        replies: PyTree,
        weights: Float[Array, " places"],
        total: Across = lambda value: value,
        together: Across = lambda value: value,
    ) -> PyTree:
        """Make one reply of all, or gather them; places of weight 0 are not clients.

        `total` adds up what several devices hold, `together` lines it up.
        """
        reduction = self.job.channel.reduction
        if self.phase.gathers:
            count = self.job.cohort(self.phase)
            every = together((replies, weights))
            # Devices are filled up with padding.
            return Gathered(*jax.tree.map(lambda leaf: leaf[:count], every))
        if reduction.adds_up:
            return weighted_mean(replies, weights, total)
        return reduction(*together((replies, weights)))

    def absorb(self, server: PyTree, reply: PyTree, turn: ServerTurn) -> PyTree:
        """Return the server's state after it has taken in the replies."""
        try:
            return self.job.public(self.phase.taken_in(server, reply, turn))
        except (TypeError, ValueError, AttributeError) as error:
            if not self.hides:
                raise
            raise InvalidInputError(
                f"`{self.job.algorithm.title}`: phase '{self.phase.name}' "
                f"cannot take in a mean without the private blocks: {error}. On the "
                "server, `up` sees None in the place of every block that clients keep. "
                "It must work on what is left."
            ) from error

    def reply_shape(self) -> PyTree:
        """Return the shapes of what a client may send; nothing is computed."""
        return self.job.public(jax.eval_shape(self._first_reply))

    def _first_reply(self) -> PyTree:
        job = self.job
        memory = job.algorithm.init_client(job.x, job.y)
        sent = self.phase.message(first_server(job), self.first_turn())
        _check_places(sent, self.phase.name, job.cohort(self.phase))
        mine = keys.client_turn(job.key, self.where, 0, 0)
        return self.phase.local(for_place(sent, 0), memory, job.oracle(0), mine)[1]

    def sent_shape(self) -> PyTree:
        """Return the shapes of what travels to the clients; nothing is computed."""
        return jax.eval_shape(
            lambda: self.sent(start_server(self.job), self.first_turn())
        )

    def first_turn(self) -> ServerTurn:
        """Return the server's view of a first exchange."""
        ids = jnp.arange(self.job.cohort(self.phase), dtype=jnp.int32)
        return server_turn(self.job, self.where, 0, ids, jnp.ones(ids.shape, bool))


def links_of(job: Job) -> dict[Where, Link]:
    """Return what happens in each phase, by its stage and number."""
    every = job.every_phase().items()
    return {where: Link.of(job, phase, where) for where, phase in every}


def start_kept(job: Job) -> Kept:
    """Return what a client keeps before its first exchange."""
    memory = jax.tree.map(strongly_typed, job.algorithm.init_client(job.x, job.y))
    channel = None
    if job.channel.sends_changes:
        links = links_of(job).items()
        channel = {where: job.channel.start(link.like) for where, link in links}
    return Kept(memory, job.own(first_server(job)), channel)


def start_state(job: Job) -> State:
    """Return the states before the first exchange."""
    clients = jax.tree.map(
        lambda a: jnp.broadcast_to(a, (job.data.clients, *a.shape)), start_kept(job)
    )
    counter = None if job.attendance is None else jnp.zeros((), jnp.int32)
    return State(start_server(job), clients, counter)


class Measurement(eqx.Module):
    """Measurements of one client at its point; means over clients make the columns.

    All but the slope are single numbers, or the shapes of such.
    """

    upper: PyTree
    slope: PyTree
    own_slope: PyTree
    metrics: dict[str, PyTree]


def client_scalars(
    job: Job, client: Array | int, server: PyTree, own: PyTree
) -> dict[str, Array]:
    """Measure single numbers over all of a client's rows: loss and metrics."""
    whole, oracle = combine(server, own), job.oracle(client)
    point = job.algorithm.point(whole)
    upper = oracle.upper_loss(point.x, point.y, oracle.all_upper())
    return {"upper_loss": upper, **job.measured(point.x, point.y, whole)}


def client_measurement(
    job: Job, client: Array | int, server: PyTree, own: PyTree
) -> Measurement:
    """Measure over all of a client's rows, at the shared point with its own blocks.

    Metrics of a point that all share are left to the server.
    """
    whole, oracle = combine(server, own), job.oracle(client)
    point = job.algorithm.point(whole)
    upper = oracle.upper_loss(point.x, point.y, oracle.all_upper())
    slope = Pair(None, oracle.lower_gradient(point.x, point.y, oracle.all_lower()))
    mine = job.own(slope)
    square = _tree.dot(mine, mine) if jax.tree.leaves(mine) else jnp.zeros_like(upper)
    metrics = job.measured(point.x, point.y, whole) if is_any(job.private) else {}
    return Measurement(upper, job.public(slope), square, metrics)


def server_columns(job: Job, server: PyTree) -> dict[str, Array]:
    """Return the columns that the server's state alone decides.

    A method that carries z has its norm: it should settle before the hypergradient is
    trusted.
    """
    blocks = job.algorithm.blocks(server)
    if not isinstance(blocks, Triple) or not jax.tree.leaves(blocks.z):
        return {}
    return {"z_norm": _tree.norm(blocks.z)}


def combine_measurements(job: Job, server: PyTree, mean: Measurement) -> dict:
    """Return the columns of one round from the clients' mean measurements.

    The slope of a private block is its root mean square over clients. Where blocks are
    private a metric is the mean of its values on the clients.
    """
    square = mean.own_slope
    if jax.tree.leaves(mean.slope):
        square = square + _tree.dot(mean.slope, mean.slope)
    columns = {"upper_loss": mean.upper, "lower_gradient_norm": jnp.sqrt(square)}
    columns |= server_columns(job, server)
    if is_any(job.private) or job.metrics is None:
        return {**columns, **mean.metrics}
    point = job.algorithm.point(server)
    return {**columns, **job.measured(point.x, point.y, server)}
