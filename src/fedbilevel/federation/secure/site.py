"""A site's side of secure aggregation: its keys, and what it answered under masks."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel._files import DAMAGED, write_atomically
from fedbilevel.errors import (
    CohortRefusedError,
    InvalidInputError,
    SecureAggregationError,
)
from fedbilevel.federation.checkpoints import put_aside
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure import layout
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.secure.layout import Announcement, MaskedExchange, Revealed
from fedbilevel.federation.secure.masks import SiteKeys
from fedbilevel.federation.secure.protocol import Answered, SecureSite
from fedbilevel.federation.signatures import SiteIdentity
from fedbilevel.federation.wire import Bytes, unpack_tree

_KEPT = 8  # answers a site remembers; numbers only grow


class SiteSecrets:
    """A site's keys for a federation and what it answered: those on disk, or new ones.

    Without a `folder` they are gone with the process. Without an `identity` the keys of
    others are trusted as the server sends them.
    """

    def __init__(
        self,
        federation: str,
        client: int,
        folder: Path | None,
        cohorts: Cohorts,
        identity: SiteIdentity | None = None,
    ) -> None:
        self.federation, self.client, self.identity = federation, client, identity
        self.path = None if folder is None else folder / f"{federation}.keys.json"
        self.keys, records = SiteKeys.generate(), {}
        if self.path is not None and self.path.exists():
            try:
                self.keys, records = _read(self.path)
            except DAMAGED as error:
                put_aside(self.path, error)
        sums = {"minimum": cohorts.minimum, "cohorts": cohorts}
        self.site = SecureSite(federation, client, self.keys, records=records, **sums)

    def introduction(self) -> dict[str, Any]:
        """Return what a hello holds: the public key, signed, and the minimum."""
        self._save()  # after a restart the next answer needs the same keys
        public = self.keys.public_bytes
        sent = {"key": public.hex(), "minimum": self.site.minimum}
        if self.identity is not None:
            signature = self.identity.sign(self.federation, self.client, public)
            sent["signature"] = signature.hex()
        return sent

    def mask(
        self,
        info: Mapping[str, Any],
        context: bytes,
        question: Question,
        reply: PyTree,
        share: float,
        about: PyTree | None,
    ) -> layout.MaskedReply:
        """Return a reply under its masks, and remember that it was given.

        `share` is the site's weight in parts of the largest.
        """
        announced = Announcement.read(info)
        self._meet(announced)
        scales = self._guarded(layout.scales_of, reply, about)
        known = (jax.tree.leaves(reply), share, scales, question)
        exchange = announced.exchange(context)
        masked = self._guarded(self.site.mask_reply, exchange, *known)
        self._remember()
        return masked

    def confirm(self, info: Mapping[str, Any]) -> np.ndarray:
        """Return this site's proofs, for the others, of the set in a sum."""
        tags = self._guarded(self.site.confirm, *self._asked(info))
        self._remember()
        return tags

    def reveal(self, info: Mapping[str, Any], listed: list, body: Bytes) -> Revealed:
        """Return what opens a sum that enough others confirmed to be the same."""
        exchange, survivors = self._asked(info)
        like = exchange.rows(layout.BOX_BYTES, layout.TAG_BYTES)
        boxes, tags = unpack_tree(listed, body, like)
        return self._guarded(self.site.reveal, exchange, survivors, boxes, tags)

    def _asked(self, info: Mapping[str, Any]) -> tuple[MaskedExchange, list[int]]:
        """Read which sum is asked for; what it is about is what was replied to."""
        survivors = info.get("survivors")
        if not (isinstance(survivors, list) and all(type(k) is int for k in survivors)):
            raise RefusedError("announcement", "does not name the set in the sum")
        rest = {k: v for k, v in info.items() if k != "survivors"}
        announced = Announcement.read(rest)
        before = self.site.records.get(announced.number)
        if before is None:
            why = "this site sent no reply to it, or forgot it"
            raise RefusedError("mask", f"exchange {announced.number}: {why}")
        self._meet(announced)
        return announced.exchange(before.context), survivors

    def _meet(self, announced: Announcement) -> None:
        """Take the keys of those announced, once they are checked."""
        roster = layout.by_client(announced.keys)
        if self.identity is not None:
            signed = layout.by_client(announced.signatures)
            self.identity.check(self.federation, roster, signed)
        self._guarded(self.site.meet, roster)

    def _guarded(self, function: Callable, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except CohortRefusedError as error:
            raise RefusedError("cohort", str(error)) from error
        except (SecureAggregationError, InvalidInputError) as error:
            raise RefusedError("mask", str(error)) from error

    def _remember(self) -> None:
        """Write down, before it leaves this site, what was answered."""
        self.site.records = dict(sorted(self.site.records.items())[-_KEPT:])
        self._save()

    def _save(self) -> None:
        if self.path is None:
            return
        records = {
            number: (one.exchange.hex(), one.context.hex(), one.question, one.survivors)
            for number, one in self.site.records.items()
        }
        held = {"private": self.keys.private_bytes.hex(), "records": records}
        # A private key: no other user may read it, not even for a moment.
        write_atomically(self.path, json.dumps(held), mode=0o600)


def _read(path: Path) -> tuple[SiteKeys, dict[int, Answered]]:
    held, records = json.loads(path.read_text()), {}
    for number, (*digests, question, survivors) in held["records"].items():
        exchange, context = map(bytes.fromhex, digests)
        known = (Question(*question), tuple(survivors))
        records[int(number)] = Answered(exchange, context, *known)
    return SiteKeys.from_bytes(bytes.fromhex(held["private"])), records
