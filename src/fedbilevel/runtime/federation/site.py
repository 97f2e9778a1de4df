"""A site's side of a federation: packets in, packets out, its rows stay here.

A site takes part in an exchange, measures at the server's point, and says hello. It
answers every packet; one that does not fit is answered with the reason, and changes
nothing. It executes nothing that it is sent.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel._blocks import join
from fedbilevel._types import Key
from fedbilevel.algorithms import AbstractAlgorithm, Phase, Turn, every_phase
from fedbilevel.channels import SecureMean
from fedbilevel.runtime import _keys
from fedbilevel.runtime._exchange import Link, client_measurement
from fedbilevel.runtime.federation.generations import Generations
from fedbilevel.runtime.federation.wire import (
    EVERYONE,
    Header,
    RefusedError,
    digest,
    pack,
    unpack,
    unpack_tree,
)
from fedbilevel.runtime.job import Job, start_kept, start_server

__all__ = ["Marks", "Site", "phases_of", "shared_reference"]

_SPARE = 1 << 20  # bytes a packet may have beyond its leaves


@dataclass(frozen=True)
class Marks:
    """The fingerprints both sides compare: of the settings, and of what was built."""

    task: str
    algorithm: str


def phases_of(algorithm: AbstractAlgorithm, stage: int) -> list[Phase]:
    """Return the phases of the setup or of a round, by number."""
    setup = stage == _keys.SETUP
    return every_phase(algorithm.setup() if setup else algorithm.phases())


class NoisyTurn(Turn):
    """A turn whose noise comes from a key of the site's own."""

    secret: Key

    def channel_key(self) -> Key:
        """Return the site's own key."""
        return self.secret


def shared_reference(job: Job, phase: Phase, message: PyTree) -> PyTree | None:
    """Return what both sides know of a reply before it comes; None where zero."""
    if job.channel.coders or phase.about is None:
        return None
    return phase.about(message)


class Site:
    """One client of a federation; `job` holds its rows alone, as client 0.

    `facts` are told to the server when it says hello. With a `folder` what the client
    keeps outlives this process. `holds` says whether this process sees all packets, so
    that the server need not repeat what it sent before. `conclude(state)` tells more of
    a finished run from the server's state with the client's own blocks, stacked.
    """

    def __init__(
        self,
        job: Job,
        client: int,
        marks: Marks,
        *,
        facts: Mapping[str, Any],
        folder: Path | None = None,
        holds: bool = True,
        conclude: Callable[[PyTree], Mapping[str, Any]] | None = None,
    ) -> None:
        self.job, self.client, self.marks, self.facts = job, client, marks, facts
        self.folder, self.holds, self.conclude = folder, holds, conclude
        self.generations: dict[str, Generations] = {}
        self._held: dict[str, np.ndarray] = {}
        self._arrays, self._static = eqx.partition(job, eqx.is_array)
        self._programs: dict[Any, Callable] = {}
        self._sealed = isinstance(job.channel.reduction, SecureMean)
        self._seals: dict[str, Any] = {}
        self._secret = jax.random.wrap_key_data(
            jnp.asarray(np.frombuffer(os.urandom(8), np.uint32))
        )
        state = jax.eval_shape(start_server, job)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        self.largest = 4 * size + _SPARE

    def handle(self, packet: bytes) -> bytes:
        """Answer a packet, whatever it holds."""
        header = Header("refused", "", "", "", self.client, 0)
        try:
            header, listed, body = unpack(packet, self.largest)
            return self._answer(header, listed, body)
        except RefusedError as refusal:
            info = {"reason": refusal.reason, "detail": refusal.detail}
            return self._reply(replace(header, kind="refused", info=info))

    def _answer(self, header: Header, listed: list, body: bytes) -> bytes:
        kinds = {
            "hello": self._hello,
            "exchange": self._exchange,
            "measure": self._measure,
            "reveal": self._reveal,
        }
        if header.kind not in kinds:
            raise RefusedError("garbage", f"kind {header.kind!r:.40} is not known")
        if header.task != self.marks.task:
            raise RefusedError(
                "task", "the server runs with other settings than this site"
            )
        if header.kind != "hello":
            self._check(header)
        return kinds[header.kind](header, listed, body)

    def _reply(self, header: Header, leaves: Sequence[np.ndarray] = ()) -> bytes:
        return pack(replace(header, client=self.client), leaves)

    def _check(self, header: Header) -> None:
        if header.algorithm != self.marks.algorithm:
            raise RefusedError(
                "algorithm", "the server built another algorithm than here"
            )
        if header.client != EVERYONE:
            raise RefusedError("client", f"comes from client {header.client}")
        held = self._generations(header.experiment)
        if held is None:
            raise RefusedError("experiment", f"{header.experiment!r:.40} said no hello")
        if header.attempt < held.attempt:
            raise RefusedError("attempt", "from a server that was replaced since")
        held.attempt = header.attempt

    def _generations(self, experiment: str) -> Generations | None:
        """Return the state of an experiment that said hello, maybe before a restart."""
        if experiment not in self.generations and experiment.isalnum():
            found = Generations(
                start_kept(self.job), self.folder, experiment, self.client
            )
            if found.found:
                self.generations[experiment] = found
        return self.generations.get(experiment)

    def _hello(self, header: Header, listed: list, body: bytes) -> bytes:
        if listed or body:
            raise RefusedError("oversized", "a hello carries no leaves")
        if not (header.experiment.isalnum() and len(header.experiment) <= 64):
            raise RefusedError("experiment", "its name is not letters and digits")
        if self._generations(header.experiment) is None:
            fresh = Generations(
                start_kept(self.job), self.folder, header.experiment, self.client
            )
            fresh.attempt = header.attempt
            fresh.save()
            self.generations = {header.experiment: fresh}
        self._held = {}
        info = {
            **self.facts,
            "weight": float(self.job.data.weights[0]),
            "holds": self.holds,
        }
        if self._sealed:
            info["key"] = self._seal(header.experiment).public
        reply = replace(header, algorithm=self.marks.algorithm, info=info)
        return self._reply(reply, _leaves((self.job.x, self.job.y)))

    def _exchange(self, header: Header, listed: list, body: bytes) -> bytes:
        phases = phases_of(self.job.algorithm, min(header.stage, _keys.SETUP))
        began = time.perf_counter()
        known = header.stage in (_keys.ROUNDS, _keys.SETUP)
        if not known or header.phase >= len(phases) or header.exchange < 1:
            raise RefusedError(
                "phase", f"there is no phase {header.phase} in this stage"
            )
        phase = phases[header.phase]
        if phase.name != header.name:
            raise RefusedError(
                "phase", f"'{header.name:.40}' where '{phase.name}' is due"
            )
        like = jax.eval_shape(lambda: phase.down(start_server(self.job)))
        message = unpack_tree(listed, body, like, self._held)
        generations = self.generations[header.experiment]
        base = generations.at(header.accepted)
        renewed = base is None
        program = self._program(self._work, header.stage, header.phase)
        key = _keys.client_key(self.job.key, header.stage, header.phase, self.client)
        turn = Turn(key, jnp.asarray(header.turn, jnp.int32))
        if self.job.channel.privacy is not None:
            turn = NoisyTurn(turn.key, turn.round, self._noise_key(header, body))
        kept, reply, finite = program(
            self._arrays, message, generations.start if renewed else base, turn
        )
        if not bool(finite):
            raise RefusedError(
                "not-finite", "the reply computed here holds NaN or infinity"
            )
        generations.put(header.exchange, kept, header.kept)
        if self.holds:
            self._held = {digest(leaf): leaf for leaf in jax.tree.leaves(message)}
        leaves = _leaves(reply)
        if self._sealed:
            about = shared_reference(self.job, phase, message)
            told, weight = header.info or {}, float(self.job.data.weights[0])
            seal = self._seal(header.experiment)
            leaves = [seal.mask(told, reply, weight, about)]
        info = {"renewed": renewed, "seconds": time.perf_counter() - began}
        return self._reply(replace(header, info=info), leaves)

    def _reveal(self, header: Header, listed: list, body: bytes) -> bytes:
        if not self._sealed or listed or body:
            raise RefusedError("mask", "there is nothing to reveal")
        told = header.info or {}
        if not isinstance(told.get("dropped"), list):
            raise RefusedError("announcement", "nobody is said to have dropped out")
        seeds = self._seal(header.experiment).reveal(told)
        return self._reply(replace(header, info={"seeds": seeds}))

    def _measure(self, header: Header, listed: list, body: bytes) -> bytes:
        server = unpack_tree(listed, body, jax.eval_shape(start_server, self.job))
        generations = self.generations[header.experiment]
        base = generations.at(header.accepted) or generations.start
        measured = self._program(self._measured)(self._arrays, server, base.own)
        info = None
        if header.info and header.info.get("final") and self.conclude is not None:
            stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], base.own)
            info = dict(self.conclude(join(server, stacked)))
        return self._reply(replace(header, info=info), _leaves(measured))

    def _seal(self, experiment: str) -> Any:
        """Return this site's keys; what they need is loaded only if they are."""
        if experiment not in self._seals:
            from fedbilevel.runtime.federation.sealing import SiteSeal

            seal = SiteSeal.of(experiment, self.client, self.folder)
            self._seals = {experiment: seal}
        return self._seals[experiment]

    def _noise_key(self, header: Header, body: bytes) -> Key:
        """Return a key that nobody else can know, another one for every message.

        Noise that was used twice could be subtracted, as could noise that follows from
        the run's key, which the server knows.
        """
        told = hashlib.sha256(repr(header).encode() + body).digest()
        for word in np.frombuffer(told, np.uint32)[:4]:
            self._secret = jax.random.fold_in(self._secret, word)
        return self._secret

    def _work(self, job: Job, stage: int, number: int, *rest: Any) -> Any:
        message, kept, turn = rest
        phase = phases_of(job.algorithm, stage)[number]
        return Link.of(job, phase, (stage, number)).work(message, kept, turn, 0)

    def _measured(self, job: Job, server: PyTree, own: PyTree) -> PyTree:
        return client_measurement(job, 0, server, own, everything=True)

    def _program(self, function: Callable, *where: int) -> Callable:
        """Compile once; rows are an input, so that they are no constants in there."""
        if (function.__name__, where) not in self._programs:

            def whole(arrays: PyTree, *arguments: Any) -> PyTree:
                return function(eqx.combine(arrays, self._static), *where, *arguments)

            self._programs[function.__name__, where] = jax.jit(whole)
        return self._programs[function.__name__, where]


def _leaves(tree: PyTree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
