"""Which rows a site draws: those of the run's seed, or others that only it knows.

The seed was agreed on, so a server can compute which rows it draws. If it knew those in
many masked sums, it could solve for what each row adds to them. So under masks or noise
rows are drawn by a secret of the site, and anew for every question: two sums of the
same rows at points nearby, one over a site more, would show what that site sent.
"""

import json
import os
from collections.abc import Iterable
from hashlib import blake2b

import jax.numpy as jnp

from fedbilevel.algorithms import Turn
from fedbilevel.channels import SecureMean
from fedbilevel.federation.own_rows import OwnRows
from fedbilevel.federation.wire import Header
from fedbilevel.runtime import keys
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.privacy import is_noisy


class Draws:
    """Draws of one client. The secret is that of a state folder, if there is one.

    So a site that restarts draws the same rows for the same question.
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
