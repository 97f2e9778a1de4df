"""Computations of a site: the rows it draws, its part of an exchange, measurements.

Programs are compiled once. Rows are inputs of theirs, and no constants.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel.algorithms import Turn
from fedbilevel.channels import SecureMean
from fedbilevel.federation.noise import SiteNoise
from fedbilevel.federation.own_rows import OwnRows
from fedbilevel.federation.wire import Header
from fedbilevel.runtime import keys
from fedbilevel.runtime.exchange import Link, client_scalars, for_place, links_of
from fedbilevel.runtime.job import Job, Kept, Where, start_server
from fedbilevel.runtime.privacy import blocks_of, is_noisy
from fedbilevel.runtime.progress import COMPILING, RUNNING, report


class Draws:
    """Which rows a client draws: those of the run's seed, or others only it knows.

    The seed was agreed on, so a server can compute which rows it draws. If it knew
    those in many masked sums, it could solve for what each row adds to them. So under
    masks or noise rows are drawn by a secret of the site, and anew for every question:
    two sums of the same rows at points nearby, one over a site more, would show what
    that site sent. The secret is that of a state folder, if there is one, so that a
    site that restarts draws the same rows for the same question.
    """

    def __init__(self, client: int, folder: OwnRows | None) -> None:
        self.client = client
        self._secret = os.urandom(64) if folder is None else folder.secret

    def turn(self, job: Job, header: Header, names: Iterable[str]) -> Turn:
        """Return the turn of an exchange; `names` are digests of what was sent."""
        index = jnp.asarray(header.index, jnp.int32)
        where = (header.stage, header.phase)
        turn = keys.client_turn(job.key, where, self.client, index)
        masked = isinstance(job.channel.reduction, SecureMean)
        if not (masked or is_noisy(job)):
            return turn
        from fedbilevel.federation.secure.layout import Announcement, question_of

        if masked:
            Announcement.read(header.info or {})
        asked = json.dumps([self.client, *question_of(header, names)])
        return keys.by_secret(turn, blake2b(asked.encode(), key=self._secret).digest())


class SiteWork:
    """The programs of one client, whose rows `job` holds alone, as client 0.

    `seen` is the job that is measured, if any is. `state` and `sent` have the shapes of
    the server's state and of what travels here in each phase, `blocks` those of a
    reply that count in epsilon. `is_noisy` says whether replies carry noise.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.links = job, links_of(job)
        self.seen: Job | None = job
        self.programs: dict[Any, Callable] = {}
        privacy = job.channel.privacy
        self._noise = SiteNoise(privacy) if privacy and is_noisy(job) else None
        self.is_noisy = self._noise is not None
        self.blocks = blocks_of(job) if self._noise else {}
        self.state = jax.eval_shape(start_server, job)
        self._messages = {
            where: jax.eval_shape(lambda sent: for_place(sent, 0), link.sent_shape())
            for where, link in self.links.items()
        }
        self.sent = {
            where: jax.eval_shape(job.channel.sent, message)
            for where, message in self._messages.items()
        }

    def take(self, job: Job, seen: Job | None) -> None:
        """Work on another job of the same shapes, and measure on `seen`."""
        fixed = [eqx.filter((self.job, self.seen), eqx.is_array, inverse=True)]
        self.job, self.seen, self.links = job, seen, links_of(job)
        fixed.append(eqx.filter((job, seen), eqx.is_array, inverse=True))
        if not eqx.tree_equal(*fixed):  # else the programs are the same
            self.programs = {}

    def exchange(
        self, where: Where, sent: PyTree, kept: Kept, turn: Turn
    ) -> tuple[Kept, PyTree, bool]:
        """Return what is kept, what travels, and whether all of it was finite.

        Noise is drawn between two programs, from bits that are no key of either. What
        follows it, which may compress, only sees what may be seen. Under noise a change
        that is not finite is one of 0: that it was not would be seen without noise.
        """
        at = (where,)
        kept, reply, finite = self._run(self._work, self.job, at, sent, kept, turn)
        if self._noise is None:
            return kept, reply, bool(finite)
        if not finite:
            reply = _tree.zeros_like(reply)
        noisy = self._noise.protect(reply)
        coded = self._run(self._coded, self.job, at, noisy, kept, turn)
        return *coded, bool(finite)

    def measure(self, server: PyTree, own: PyTree) -> dict[str, np.ndarray]:
        """Return the loss and the metrics at a point."""
        assert self.seen is not None
        return self._run(client_scalars, self.seen, (0,), server, own)

    def _work(self, job: Job, where: Where, sent: PyTree, kept: Kept, turn: Turn):
        heard = job.channel.received(sent, self._messages[where])
        link = _link(job, where)
        work = link.work if self._noise is None else link.change
        return work(heard, kept, turn, 0)

    def _coded(self, job: Job, where: Where, change: PyTree, kept: Kept, turn: Turn):
        job = replace(job, channel=job.channel.protected())
        return _link(job, where).code(change, kept, turn)

    def _run(
        self, function: Callable, job: Job, where: tuple[Any], *arguments: Any
    ) -> Any:
        """Run a program; the first time says that it compiles, and may be ended."""
        arrays, static = eqx.partition(job, eqx.is_array)
        name = (function.__name__, where)
        if name in self.programs:
            return self.programs[name](arrays, *arguments)

        def whole(arrays: PyTree, *arguments: Any) -> PyTree:
            return function(eqx.combine(arrays, static), *where, *arguments)

        self.programs[name] = jax.jit(whole)
        report(COMPILING)
        found = self.programs[name](arrays, *arguments)
        report(RUNNING)
        return found


def _link(job: Job, where: Where) -> Link:
    return Link.of(job, job.every_phase()[where], where)
