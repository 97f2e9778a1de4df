"""Secure aggregation between server and sites: who masks what, and what is recovered.

With every exchange the server announces a number that is used once, who takes part, and
the public keys of all. A site answers with its masked reply. If somebody did not, the
others are asked for the seeds of the masks that they share with the missing.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.errors import InvalidInputError, SecureAggregationError
from fedbilevel.runtime.federation.roster import Roster
from fedbilevel.runtime.federation.wire import RefusedError
from fedbilevel.runtime.secure import (
    Answered,
    Exchange,
    SecureSite,
    SiteKeys,
    block_scales,
    decode_mean,
    unmask_sum,
)

__all__ = ["Announcement", "SiteSeal", "masked_like", "scales_of", "unsealed_mean"]

_KEPT = 8  # answers a site remembers; numbers only grow


def scales_of(like: PyTree, about: PyTree | None) -> list[int]:
    """Return the scales of the blocks of a reply, from what both sides know of it."""
    if about is None:
        return block_scales([np.zeros(leaf.shape) for leaf in jax.tree.leaves(like)])
    return block_scales([np.asarray(leaf) for leaf in jax.tree.leaves(about)])


def masked_like(like: PyTree) -> jax.ShapeDtypeStruct:
    """Return the shape of a masked reply: all its numbers, and a word to check."""
    size = sum(leaf.size for leaf in jax.tree.leaves(like)) + 1
    return jax.ShapeDtypeStruct((size,), np.dtype(np.uint64))


@dataclass(frozen=True)
class Announcement:
    """What is told with an exchange; weights count in parts of the largest."""

    number: int
    participants: list[int]
    keys: dict[str, str]
    largest: float

    @staticmethod
    def of(roster: Roster, number: int, participants: Sequence[int]) -> "Announcement":
        """Announce an exchange to clients that said hello."""
        members = roster.members
        return Announcement(
            number,
            sorted(participants),
            {str(k): str(members[k].info.get("key", "")) for k in participants},
            max(member.weight for member in members.values()),
        )

    @staticmethod
    def read(info: Mapping[str, Any]) -> "Announcement":
        """Read what a packet announces, or refuse it."""
        try:
            told = Announcement(**info)
            _ = told.exchange(), told.roster()
            if not (isinstance(told.largest, float) and told.largest > 0):
                raise ValueError("no weight")
            return told
        except (TypeError, ValueError, AttributeError) as error:
            text = f"cannot be read: {error}"
            raise RefusedError("announcement", text) from error

    def exchange(self) -> Exchange:
        """Return the exchange as the masks know it."""
        return Exchange(self.number, tuple(self.participants))

    def roster(self) -> dict[int, bytes]:
        """Return the public keys by client."""
        return {int(client): bytes.fromhex(key) for client, key in self.keys.items()}

    def info(self) -> dict[str, Any]:
        """Return it as it travels."""
        return asdict(self)


@dataclass
class SiteSeal:
    """A site's keys and what it answered, kept on disk where it has a folder."""

    experiment: str
    client: int
    path: Path | None
    keys: SiteKeys = field(default_factory=SiteKeys.generate)
    records: dict[int, Answered] = field(default_factory=dict)

    @staticmethod
    def of(experiment: str, client: int, folder: Path | None) -> "SiteSeal":
        """Return the keys of an experiment: those on disk, or new ones."""
        path = None if folder is None else folder / f"{experiment}.keys.json"
        seal = SiteSeal(experiment, client, path)
        if path is not None and path.exists():
            held = json.loads(path.read_text())
            seal.keys = SiteKeys.from_bytes(bytes.fromhex(held["private"]))
            seal.records = {
                int(number): Answered(
                    bytes.fromhex(exchange), bytes.fromhex(reply), tuple(dropped)
                )
                for number, (exchange, reply, dropped) in held["records"].items()
            }
        return seal

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
                self.experiment,
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


def unsealed_mean(
    told: Announcement,
    replies: Mapping[int, np.ndarray],
    seeds: Mapping[int, Mapping[int, bytes]],
    weights: Mapping[int, float],
    like: PyTree,
    about: PyTree | None,
) -> PyTree:
    """Return the mean reply of those who answered, as a tree like `like`."""
    leaves, scales = jax.tree.leaves(like), scales_of(like, about)
    total = unmask_sum(told.exchange(), replies, seeds)
    shares = {client: weights[client] / told.largest for client in replies}
    means = decode_mean(total, shares, scales, [leaf.shape for leaf in leaves])
    cast = [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), cast)
