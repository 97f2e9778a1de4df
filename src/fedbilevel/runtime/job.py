"""A job to run, and the state of the run."""

import math
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree, UInt8

from fedbilevel._blocks import combine, either, is_any, split
from fedbilevel._types import Key, Lower, Metrics, Pair, Scalar, Upper
from fedbilevel.algorithms import (
    AbstractAlgorithm,
    Phase,
    Phases,
    SeesTurn,
    SteadySteps,
    every_phase,
    steadied,
)
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import ClientInputError, InvalidInputError
from fedbilevel.problem import (
    Data,
    Oracle,
    PooledData,
    Problem,
    broken_derivative,
    check_problem,
    largest_curvature,
    opposed_curvatures,
)
from fedbilevel.runtime import keys
from fedbilevel.runtime.sampling import Sampling
from fedbilevel.runtime.server_seen import ServerSeen, sees_server
from fedbilevel.units import OfDistance, relative_kinds

Where = tuple[int, int]  # the stage of a phase, and its number there
# Of a client in an exchange.
ABSENT, PRESENT, RENEWED = 0, 1, 2
_SOON = 2 * 10**7  # clients times parameters whose curvature takes seconds
_FEWEST = 16  # clients of which it is measured
OWN_COLUMNS = ("round", "upper_loss", "lower_gradient_norm", "z_norm")
OWN_COLUMNS += ("exchanges", "bytes", "samples")


def is_renewed(came: Any) -> Any:
    """Say of entries of a record whether the client had lost what it kept."""
    return came == RENEWED


class Job(eqx.Module):
    """An algorithm on a problem with data, start, metrics, cohort size, key, channel.

    `clients` is K; a site of a federation holds the data of one of them alone. Which
    of those that are asked reply is in the record `attendance`, or drawn by `chances`.
    `channel` is what is done to replies between clients and server.
    """

    algorithm: AbstractAlgorithm
    problem: Problem
    data: Data
    x: Upper
    y: Lower
    metrics: Metrics | None
    key: Key
    private: Pair = eqx.field(static=True)
    clients: int = eqx.field(static=True)
    participants: int = eqx.field(static=True)
    upper_batch: int | None = eqx.field(static=True)
    lower_batch: int | None = eqx.field(static=True)
    attendance: UInt8[Array, "exchanges clients"] | None = None
    channel: Channel = PLAIN
    chances: Float[Array, " clients"] | None = None

    @staticmethod
    def of(
        algorithm: AbstractAlgorithm,
        problem: Problem,
        data: Data,
        x: Upper,
        y: Lower,
        *,
        metrics: Metrics | None = None,
        seed: int = 0,
        sampling: Sampling | None = None,
        channel: Channel = PLAIN,
    ) -> "Job":
        """Check everything that can be checked before running, and bind it.

        An algorithm with steps in units that a run measures is made to measure them.
        """
        algorithm = steadied(algorithm)
        x, y = jax.tree.map(strongly_typed, (x, y))
        drawn = sampling or Sampling(batch=1)
        count = data.clients if drawn.participants is None else drawn.participants
        if not 1 <= count <= data.clients:
            raise InvalidInputError(
                f"participants={count}: choose between 1 and the {data.clients} "
                "clients there are."
            )
        check_problem(problem, data, x, y)
        flags = _private_blocks(algorithm, problem, data, x, y)
        if OfDistance in relative_kinds(algorithm) and any(jax.tree.leaves(flags.x)):
            raise InvalidInputError(
                "a measured step of x (upper_step=auto) needs an x that all clients "
                "share, but here each keeps blocks of it. Give a number."
            )
        sizes = (data.clients, count)
        start = (algorithm, problem, data, x, y, metrics, jr.key(seed), flags, *sizes)
        rows, chances = drawn.rows(data), drawn.chances(data)
        job = Job(*start, rows, rows, chances=chances)
        _check_phases(job)
        # Where all rows are in one place nothing travels, and nothing is compressed.
        own = algorithm.channel() if data.travels else PLAIN
        channel = channel.joined(own, algorithm.title)
        job = replace(job, channel=_checked(channel, job))
        job.check_curvature(algorithm)
        job._check_metrics()
        return job

    def oracle(self, client: Array | int) -> Oracle:
        """Return the oracle of one client."""
        return Oracle(
            self.problem, self.data, client, self.upper_batch, self.lower_batch
        )

    def broken_derivative(self, client: int) -> str:
        """Say which derivative of a client is not finite at the start, if one is.

        What half precision of a frozen model cannot hold has another cure.
        """
        if self.problem.coarse_type:
            return ""
        second = self.algorithm.needs_hessian
        return broken_derivative(self.oracle(client), self.x, self.y, second)

    def measured(self, x: Upper, y: Lower, server: PyTree = None) -> dict[str, Scalar]:
        """Return the metrics at a point, if there are any; at first `server` is made.

        Metrics with a parameter `server` get what it carries between rounds.
        """
        if self.metrics is None:
            return {}
        seen: dict[str, Any] = {}
        if sees_server(self.metrics):
            state = first_server(self) if server is None else server
            seen = {"server": ServerSeen.of(self.algorithm, state)}
        return self.metrics(*self.problem.whole(x, y), *self.problem.inputs, **seen)

    def phases(self, stage: int) -> Phases:
        """Return what a round runs, or what the setup before the first one does."""
        if stage == keys.ROUNDS:
            return self.algorithm.phases()
        return self.algorithm.setup()

    def every_phase(self) -> dict[Where, Phase]:
        """Return the phases of a round and of the setup, by stage and number."""
        return {
            (stage, number): phase
            for stage in (keys.ROUNDS, keys.SETUP)
            for number, phase in enumerate(every_phase(self.phases(stage)))
        }

    def cohort(self, phase: Phase) -> int:
        """Return how many clients a phase asks."""
        return self.clients if phase.everyone else self.participants

    def public(self, tree: PyTree) -> PyTree:
        """Return what of a message, a reply or the server's state may travel."""
        return split(tree, self.private)[0]

    def own(self, tree: PyTree) -> PyTree:
        """Return the rest, which stays on its client."""
        return split(tree, self.private)[1]

    def replaying(self, attendance: np.ndarray) -> "Job":
        """Return the job with the clients of every exchange as recorded.

        ABSENT, PRESENT, or RENEWED: the client took part after it had lost what it
        kept. A client that is absent keeps what it had before. In an exchange that was
        made again of other rows, its clients have 2 more for each repeat.
        """
        shape = (attendance.ndim, attendance.shape[-1:])
        if shape != (2, (self.clients,)) or not (attendance > ABSENT).any(axis=1).all():
            raise InvalidInputError(
                f"attendance of shape {attendance.shape}: give a row per exchange with "
                f"an entry for each of the {self.clients} clients, one of them present."
            )
        gathers = any(phase.gathers for phase in self.every_phase().values())
        if self.participants < self.clients and gathers:
            raise InvalidInputError(
                f"`{self.algorithm.title}` keeps replies apart by the places "
                "of a drawn cohort, which a record of attendance does not hold. Only "
                "runs in which all clients take part can be replayed."
            )
        self.channel.reduction.check(int((attendance > ABSENT).sum(axis=1).min()))
        record = jnp.asarray(attendance, jnp.uint8)
        everyone = {"participants": self.clients, "chances": None}
        return replace(self, attendance=record, **everyone)

    def check_curvature(self, *algorithms: AbstractAlgorithm) -> None:
        """Raise if a level curves too much at the start for one of them."""
        start = (self.x, self.y)

        def asked() -> tuple[Oracle, Key]:
            return self.oracle(jnp.asarray(0)), jr.fold_in(self.key, 2)

        if any(_minds_curvature(one) for one in algorithms):
            (oracle, probe), clients = asked(), self._looked_at()
            found = largest_curvature(oracle, jnp.asarray(clients), *start, probe)
            values = np.asarray(found)
            worst = int(np.argmax(values))
            who = int(clients[worst])
            broken = "" if np.isfinite(values[worst]) else self.broken_derivative(who)
            if broken:
                raise ClientInputError(who, f": {broken}")
            for algorithm in algorithms:
                algorithm.check(float(values[worst]), who)

        def curvatures(factor: float) -> tuple[float, float]:
            oracle, probe = asked()
            found = opposed_curvatures(oracle, *start, jnp.asarray(factor), probe)
            return float(found[0]), float(found[1])

        for algorithm in algorithms:
            algorithm.check_balance(curvatures)

    def _looked_at(self) -> np.ndarray:
        """Return the clients whose curvature is measured: all, if that is soon done.

        Of many clients with large models some, evenly spaced: each takes as long as
        several rounds do, and the largest that is found is a bound from below anyway.
        """
        parameters = sum(leaf.size for leaf in jax.tree.leaves((self.x, self.y)))
        some = min(max(_FEWEST, _SOON // parameters), self.data.clients)
        spaced = np.linspace(0, self.data.clients - 1, some)
        return np.round(spaced).astype(np.int32)

    def _check_metrics(self) -> None:
        for name, shape in jax.eval_shape(self.measured, self.x, self.y).items():
            if name in OWN_COLUMNS or shape.shape != ():
                raise InvalidInputError(
                    f"metric '{name}' of shape {shape.shape}: a metric is one number, "
                    f"under a name other than {', '.join(OWN_COLUMNS)}."
                )


class Kept(eqx.Module):
    """The state that one client keeps between exchanges, or all of them, stacked.

    `memory` is the algorithm's, `own` the private blocks that the server never has,
    `channel` what its coders remember of each phase, by stage and number.
    """

    memory: PyTree
    own: PyTree
    channel: dict[tuple[int, int], PyTree] | None = None


class State(eqx.Module):
    """The state of the server, and that of every client, stacked over clients.

    `exchanges` counts those so far where a record of attendance is replayed. `places`
    says where in `clients` each client is, if only those of one round are there.
    """

    server: PyTree
    clients: Kept
    exchanges: PyTree = None
    places: PyTree = None

    def joined(self) -> PyTree:
        """Return the server's state with the private blocks of all clients, stacked."""
        return combine(self.server, self.clients.own)


def first_server(job: Job) -> PyTree:
    """Return the server's state before the first exchange, with all blocks."""
    return jax.tree.map(strongly_typed, job.algorithm.init_server(job.x, job.y))


def start_server(job: Job) -> PyTree:
    """Return what the server carries before the first exchange."""
    return job.public(first_server(job))


def _checked(channel: Channel, job: Job) -> Channel:
    """Return the channel for the participants of a job that it suits."""
    if channel.is_plain:
        return channel
    name = job.algorithm.title
    if not job.data.travels:
        raise InvalidInputError(
            "all rows are in one place, so nothing travels that a channel could "
            "protect, compress or reduce. Leave it out."
        )
    gathering = [one.name for one in job.every_phase().values() if one.gathers]
    if gathering and not channel.plain_mean:
        raise InvalidInputError(
            f"`{name}` needs every reply by itself in '{gathering[0]}', so that they "
            f"cannot be reduced by `{type(channel.reduction).__name__}`. Leave out the "
            "reduction, or use another algorithm."
        )
    weights = np.asarray(job.data.weights)
    if channel.privacy is not None and (weights != weights[0]).any():
        raise InvalidInputError(
            "clip and noise protect clients of equal weight: the mean of others "
            f"depends more on some of them. The weights are {weights.min():g} to "
            f"{weights.max():g}. Make them equal, or leave out clip and noise."
        )
    if channel.privacy is not None and not job.algorithm.bears_noise:
        raise InvalidInputError(
            f"`{name}` solves systems made of what clients send, which clip and noise "
            "would break. Leave them out, or use a method of one loop, such as fedbio."
        )
    if channel.privacy is not None and isinstance(job.algorithm, SteadySteps):
        raise InvalidInputError(
            "clip and noise hide what a safeguard and steps in units of the curvature "
            "look at. Give plain numbers for all steps, and leave out the safeguard "
            "(--no-safeguard)."
        )
    if channel.privacy is not None and job.chances is not None:
        raise InvalidInputError(
            "clients that do not reply bring no share of the noise, which a simulation "
            "does not count. Leave out participation, or clip and noise."
        )
    if job.chances is not None:
        channel.reduction.check(1)  # a single client may be all that replies
    channel.reduction.check(job.participants)
    return channel.shared_by(job.participants)


def _private_blocks(
    algorithm: AbstractAlgorithm, problem: Problem, data: Data, x: Upper, y: Lower
) -> Pair:
    of_many = isinstance(data, PooledData) and data.parts.clients > 1
    if is_any(problem.private) and of_many:
        raise InvalidInputError(
            "blocks of this problem are private to each client, but all rows are in "
            "one place, where there is only one copy of them. Leave the rows on their "
            "clients, or take a single client (--clients 1)."
        )
    if is_any(problem.private) and not algorithm.allows_private:
        raise InvalidInputError(
            f"`{algorithm.title}` needs whole levels in one place, but blocks "
            "of this problem are private to each client. Use a method of one loop, "
            "such as FedBiO or LocalBSGVRM."
        )
    try:
        return either(problem.private, algorithm.private_blocks(), x, y)
    except ValueError as error:
        raise InvalidInputError(
            f"private={problem.private}: give True, False, or a tree of them shaped "
            f"like the start, for each of x and y. {error}"
        ) from error


def _minds_curvature(algorithm: AbstractAlgorithm) -> bool:
    """Say whether some curvature is too large, so that it must be measured.

    Steps in units of the curvature suit any.
    """
    if not algorithm.needs_hessian:
        return False
    try:
        algorithm.check(math.inf, 0)
    except InvalidInputError:
        return True
    return False


def _check_phases(job: Job) -> None:
    """Raise where the phases of an algorithm do not suit private blocks."""
    if not is_any(job.private):
        return
    for phase in job.every_phase().values():
        if phase.gathers or isinstance(phase.down, SeesTurn):
            raise InvalidInputError(
                f"`{job.algorithm.title}`: phase '{phase.name}' speaks to "
                "each client apart, which it cannot where blocks are private."
            )


def strongly_typed(leaf: Any) -> Array:
    """Strip the weak type of `jnp.asarray(0.5)`: it would make two programs of one."""
    value = jnp.asarray(leaf)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    if getattr(value, "weak_type", False) and not isinstance(value, Tracer):
        return jax.device_put(np.array(value))  # JAX would compile a program
    return jnp.asarray(value, dtype=value.dtype)
