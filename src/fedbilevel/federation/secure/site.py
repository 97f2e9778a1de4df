"""A site's side of secure aggregation: its keys, and what it answered under masks."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.errors import InvalidInputError, SecureAggregationError
from fedbilevel.federation.checkpoints import put_aside
from fedbilevel.federation.secure.announcement import Announcement, scales_of
from fedbilevel.federation.secure.protocol import Answered, SecureSite, SiteKeys
from fedbilevel.federation.wire import RefusedError
from fedbilevel.runtime.checkpoint import DAMAGED

__all__ = ["SiteSecrets"]

_KEPT = 8  # answers a site remembers; numbers only grow


@dataclass
class SiteSecrets:
    """A site's keys and what it answered, kept on disk where it has a folder."""

    federation: str
    client: int
    path: Path | None
    keys: SiteKeys = field(default_factory=SiteKeys.generate)
    records: dict[int, Answered] = field(default_factory=dict)

    @staticmethod
    def of(federation: str, client: int, folder: Path | None) -> "SiteSecrets":
        """Return the keys for a federation: those on disk, or new ones."""
        path = None if folder is None else folder / f"{federation}.keys.json"
        own = SiteSecrets(federation, client, path)
        if path is not None and path.exists():
            try:
                own._read(path)
            except DAMAGED as error:
                put_aside(path, error)
                return SiteSecrets(federation, client, path)
        return own

    def _read(self, path: Path) -> None:
        held = json.loads(path.read_text())
        self.keys = SiteKeys.from_bytes(bytes.fromhex(held["private"]))
        self.records = {
            int(number): Answered(
                bytes.fromhex(exchange), bytes.fromhex(reply), tuple(dropped)
            )
            for number, (exchange, reply, dropped) in held["records"].items()
        }

    @property
    def public(self) -> str:
        """The public key, as it travels."""
        return self.keys.public_bytes.hex()

    def mask(
        self,
        info: Mapping[str, Any],
        reply: PyTree,
        weight: float,
        about: PyTree | None,
    ) -> np.ndarray:
        """Return a reply under its masks, and remember that it was given."""
        told = Announcement.read(info)
        self._check_new(told.number)
        site = self._site(told)
        blocks = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(reply)]
        scales, share = scales_of(reply, about), weight / told.largest
        masked = self._guarded(site.mask_reply, told.exchange(), blocks, share, scales)
        self._remember(site)
        return masked

    def reveal(self, info: Mapping[str, Any]) -> dict[str, str]:
        """Return the seeds that recovery from dropouts needs."""
        told = Announcement.read({k: v for k, v in info.items() if k != "dropped"})
        site = self._site(told)
        seeds = self._guarded(site.reveal_seeds, told.exchange(), info["dropped"])
        self._remember(site)
        return {str(client): seed.hex() for client, seed in seeds.items()}

    def _check_new(self, number: int) -> None:
        if self.records and number < max(self.records):
            raise RefusedError("mask", f"exchange {number} is before the last one")

    def _site(self, told: Announcement) -> SecureSite:
        def make() -> SecureSite:
            return SecureSite(
                self.federation,
                self.client,
                self.keys,
                told.roster(),
                records=self.records,
            )

        return self._guarded(make)

    def _guarded(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (SecureAggregationError, InvalidInputError) as error:
            raise RefusedError("mask", str(error)) from error

    def _remember(self, site: SecureSite) -> None:
        """Write down, before it leaves this site, what was answered."""
        newest = sorted(site.records)[-_KEPT:]
        self.records = {number: site.records[number] for number in newest}
        if self.path is None:
            return
        held = {
            "private": self.keys.private_bytes.hex(),
            "records": {
                number: (one.exchange.hex(), one.reply.hex(), list(one.dropped))
                for number, one in self.records.items()
            },
        }
        beside = self.path.with_suffix(".new")
        beside.parent.mkdir(parents=True, exist_ok=True)
        # A private key: nobody else may read it, not even for a moment.
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(held, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
