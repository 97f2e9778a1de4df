"""A site's side of secure aggregation: its keys, and what it answered under masks."""

import json
from collections.abc import Mapping
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
        self.federation, self.client = federation, client
        self.minimum, self.identity = cohorts.minimum, identity
        self.path = None if folder is None else folder / f"{federation}.keys.json"
        self._site: SecureSite | None = None
        self.keys, self.records = SiteKeys.generate(), {}
        self.cohorts = cohorts
        if self.path is not None and self.path.exists():
            try:
                self.keys, self.records = _read(self.path)
            except DAMAGED as error:
                put_aside(self.path, error)

    def introduction(self) -> dict[str, Any]:
        """Return what a hello holds: the public key, signed, and the minimum."""
        self._save()  # after a restart the next answer needs the same keys
        public = self.keys.public_bytes
        sent = {"key": public.hex(), "minimum": self.minimum}
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
        site = self._member(announced)
        blocks = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(reply)]
        scales = self._guarded(layout.scales_of, reply, about)
        known = (announced.exchange(context), blocks, share, scales, question)
        masked = self._guarded(site.mask_reply, *known)
        self._remember(site)
        return masked

    def confirm(self, info: Mapping[str, Any]) -> np.ndarray:
        """Return this site's proofs, for the others, of the set in a sum."""
        site, exchange, survivors = self._asked(info)
        tags = self._guarded(site.confirm, exchange, survivors)
        self._remember(site)
        return tags

    def reveal(self, info: Mapping[str, Any], listed: list, body: Bytes) -> Revealed:
        """Return what opens a sum that enough others confirmed to be the same."""
        site, exchange, survivors = self._asked(info)
        like = exchange.rows(layout.BOX_BYTES, layout.TAG_BYTES)
        boxes, tags = unpack_tree(listed, body, like)
        return self._guarded(site.reveal, exchange, survivors, boxes, tags)

    def _asked(
        self, info: Mapping[str, Any]
    ) -> tuple[SecureSite, MaskedExchange, list[int]]:
        """Read which sum is asked for; what it is about is what was replied to."""
        survivors = info.get("survivors")
        if not (isinstance(survivors, list) and all(type(k) is int for k in survivors)):
            raise RefusedError("announcement", "does not name the set in the sum")
        announced = Announcement.read(
            {k: v for k, v in info.items() if k != "survivors"}
        )
        before = self.records.get(announced.number)
        if before is None:
            why = "this site sent no reply to it, or forgot it"
            raise RefusedError("mask", f"exchange {announced.number}: {why}")
        exchange = announced.exchange(before.context)
        return self._member(announced), exchange, survivors

    def _member(self, announced: Announcement) -> SecureSite:
        """Return this site among those announced, once their keys are checked."""
        roster = layout.by_client(announced.keys)
        if self.identity is not None:
            signed = layout.by_client(announced.signatures)
            self.identity.check(self.federation, roster, signed)
        site = self._site
        if site is None:
            made = (self.federation, self.client, self.keys, roster)
            more = {
                "minimum": self.minimum,
                "records": self.records,
                "cohorts": self.cohorts,
            }
            site = self._site = self._guarded(SecureSite, *made, **more)
        else:
            self._guarded(site.meet, roster)
        return site

    def _guarded(self, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except CohortRefusedError as error:
            raise RefusedError("cohort", str(error)) from error
        except (SecureAggregationError, InvalidInputError) as error:
            raise RefusedError("mask", str(error)) from error

    def _remember(self, site: SecureSite) -> None:
        """Write down, before it leaves this site, what was answered."""
        newest = sorted(site.records)[-_KEPT:]
        self.records = {number: site.records[number] for number in newest}
        site.records = dict(self.records)
        self._save()

    def _save(self) -> None:
        if self.path is None:
            return
        records = {
            number: (one.exchange.hex(), one.context.hex(), one.question, one.survivors)
            for number, one in self.records.items()
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
