"""Ledgers on disk: releases of a site and of a server, and the site's limits.

Everything is written down before it leaves, so that no crash and no restart forgets it,
and is counted over all federations: a server that begins another one gains nothing. A
server counts what it asked for under noise, and an exchange that is made again, after a
restart or for want of replies, as one release more. A site gives the last reply again
byte for byte, if it still has it, which is none; else it draws other noise.

A server can still learn of a site that measures one loss and one value of each metric,
at a point of its choice, for every exchange that it claims to have made. The point
cannot be checked, since only the server knows what it made of all replies. From losses
at d + 1 points near each other a gradient in d dimensions can be estimated. So
`max_exchanges`, which bounds replies and measurements alike, or `measure` none is what
protects against a server that lies; with masks or noise nothing is measured by default.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel._files import write_atomically
from fedbilevel._schema import Limits
from fedbilevel.channels import SecureMean
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.federation import own_rows
from fedbilevel.federation.own_rows import Spent
from fedbilevel.federation.refusals import RefusedError, read_json
from fedbilevel.federation.wire import Bytes, Header, sha256_of
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.privacy import (
    IN_THE_CLEAR,
    Release,
    epsilon_of,
    is_noisy,
    privacy_of_releases,
    release_of,
)

_CHOICES = {"measure": ("none", "scalars"), "cohorts": ("any", "apart")}
# Single numbers by which a server scales the steps of a site; it divides by the first.
_OF_STEPS = ("curvature", "damping", "stride", "halvings")
_FEDERATIONS = 64  # of which the last measurement is remembered
Releases = Counter[tuple[int, int]]


def read_releases(held: Any) -> Releases:
    """Read releases by blocks and shares of noise, as they were written."""
    releases: Releases = Counter()
    for blocks, shares, times in held:
        if not all(type(n) is int and n >= 0 for n in (blocks, shares, times)):
            raise ValueError(f"a release of {blocks}, {shares}, {times}")
        releases[blocks, shares] += times
    return releases


def write_releases(releases: Releases) -> list[list[int]]:
    """Return them as plain lists."""
    return [[*kind, times] for kind, times in sorted(releases.items()) if times]


@dataclass(frozen=True)
class SiteLimits(Limits):
    """How much a site reports to a server, and from how many rows.

    `measure` is none, or scalars: the loss and the metrics of all its rows, a number
    each, no gradient. Where it is left out a site measures, unless its replies are
    masked or noisy: a number in the clear would go around that. With noise measuring
    cannot be allowed, as epsilon would not count it; with masks the operator may.

    `max_exchanges` are the replies that a site gives, and as many measurements at most;
    `max_epsilon` is the privacy that it spends, both over all federations that its
    state folder has seen. `minimum_batch` and `minimum_rows` are refused to go below.
    `largest_point` bounds what a site is sent, and `cohorts` the sums it is in.
    How much is given is not limited by default: a site cannot know how long a run is.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None:
                continue
            if name in _CHOICES:
                if value not in _CHOICES[name]:
                    choices = " or ".join(_CHOICES[name])
                    raise InvalidInputError(f"{name}='{value}': choose {choices}.")
            elif not (value > 0 and math.isfinite(value)):
                raise InvalidInputError(
                    f"{name}={value}: a limit is above 0 and finite. Leave it out "
                    "to have none."
                )

    def measures(self, job: Job) -> bool:
        """Say whether the site measures."""
        if self.measure is None:
            masked = isinstance(job.channel.reduction, SecureMean)
            return not (masked or is_noisy(job))
        return self.measure == "scalars"

    def apart(self, job: Job) -> bool:
        """Say whether all masked sums must be over the same sites.

        Where a reply is of all rows no batch hides the difference of two sums.
        """
        if self.cohorts is None:
            batches = (job.upper_batch, job.lower_batch)
            return None in batches or job.algorithm.sends_hessian
        return self.cohorts == "apart"

    def check_point(self, point: PyTree) -> None:
        """Refuse to work at a point that is farther out than any model is.

        Outlying single rows can be distinguished in a sum. Numbers that scale local
        steps would lead there, too. Other single numbers of a server's state, which
        travels where blocks are private, may say that nothing is known.
        """
        most = self.largest_point
        for path, leaf in jax.tree_util.tree_leaves_with_path(point):
            name, value = getattr((None, *path)[-1], "name", ""), np.asarray(leaf)
            far = value.ndim and np.max(np.abs(value), initial=0) > most
            where = f"beyond {most:g}"
            if not value.ndim and name in _OF_STEPS and np.isfinite(value):
                least = 1 / most if name == "curvature" else 0
                far = not least <= value <= most
                where = f"outside of {least:g} to {most:g}"
            if far:
                what = f"{name or 'a block'} holds a number {where}"
                raise RefusedError("point", what)

    def check(self, job: Job) -> None:
        """Raise unless a site with these rows and settings may start at all."""
        sizes = (job.data.upper_sizes, job.data.lower_sizes)
        rows = min(int(size[0]) for size in sizes)
        if rows < self.minimum_rows:
            raise InvalidInputError(
                f"this site has {rows} rows at one of the levels, but minimum_rows is "
                f"{self.minimum_rows}. Take part with more rows, or allow fewer."
            )
        batches = [job.upper_batch or rows, job.lower_batch or rows]
        batch = min(*batches, rows)
        if batch < self.minimum_batch:
            raise InvalidInputError(
                f"a sample is of {batch} rows, but minimum_batch is "
                f"{self.minimum_batch}. Choose a larger batch, on the server and at "
                "all sites alike, or allow smaller ones."
            )
        self._check_noise(job)

    def _check_noise(self, job: Job) -> None:
        if is_noisy(job) and self.measure == "scalars":
            raise InvalidInputError(
                "measure='scalars' with noise: measurements have none, so that epsilon "
                "would not hold. Leave out one of them."
            )
        if self.max_epsilon is None:
            return
        if not is_noisy(job):
            raise InvalidInputError(
                f"max_epsilon={self.max_epsilon:g} without noise: there is no epsilon "
                "that could be kept. Add clip and noise, or leave out the limit."
            )
        privacy_of_releases(job, {(1, 1): 1})  # or why it cannot be computed

    @staticmethod
    def read(given: dict[str, Any]) -> "SiteLimits":
        """Read limits from names and texts, as Flower's node configuration has them."""
        kinds: dict[str, type] = dict.fromkeys(_CHOICES, str)
        kinds |= dict.fromkeys(("max_epsilon", "largest_point"), float)
        names = [one.name for one in fields(SiteLimits) if one.name in given]
        try:
            found = {name: kinds.get(name, int)(given[name]) for name in names}
        except ValueError as error:
            raise InvalidInputError(f"the limits of this node: {error}.") from error
        return SiteLimits(**found)


class ServerReleases:
    """Counts asked exchanges by the blocks of a reply, and by how many replied."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.counts = path, Counter()
        if path is None or not path.exists():
            return
        try:
            self.counts = read_releases(read_json(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}), so that epsilon is not known. Put back "
                "a copy, or choose a new folder."
            ) from error

    def ask(self, blocks: int, asked: int) -> None:
        """Count an exchange that is about to be asked for, as if all would reply."""
        self.counts[blocks, asked] += 1
        self._save()

    def settle(self, blocks: int, asked: int, taken: int, came: int | None) -> None:
        """Correct the last one by the replies: absent clients bring no noise.

        Replies that `came` count, even if they made no mean; None if no client was
        asked.
        """
        if came == 0:
            return  # replies were computed even if none arrived
        self.counts[blocks, asked] -= 1
        if came is not None:
            self.counts[blocks, taken or came] += 1
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            text = json.dumps(write_releases(self.counts)) + "\n"
            write_atomically(self.path, text)


class SiteLedger:
    """Counts what was released of a site's rows, and keeps its limits.

    All ledgers in the `folder` that have rows in common count together, for every
    server and under every client number. Without a folder all is forgotten with the
    process. `source` is the file or folder that has the rows; without one they are
    those of the job. `spent` is what was released of exactly these rows.
    """

    def __init__(
        self,
        job: Job,
        limits: SiteLimits,
        folder: Path | None,
        source: Path | None = None,
    ) -> None:
        limits.check(job)
        self.job, self.limits = job, limits
        self.measures = limits.measures(job)
        self.spent, self.rows = Spent(), None
        if folder is not None:
            rows = own_rows.rows_of_data(job.data)
            if source is not None:
                rows = own_rows.rows_of_files(source)
            self.rows = own_rows.OwnRows(folder, rows)
            with self._all():
                pass  # what cannot be read is said before anything is asked

    def exchange(
        self, blocks: int, shares: int, federation: str, given: Sequence[str]
    ) -> None:
        """Count one more reply, or refuse to give it.

        It is of so many blocks, and seen with so many shares of noise: its own, or
        under masks those of the fewest that the site takes part with. `given` names
        what it answers, and all its numbers: the last one may be given again.
        """
        release = release_of(self.job, blocks, shares)
        about = sha256_of([" ".join(given).encode()]).hex()
        with self._all() as before:
            if before.given.get(federation) == about:
                return
            most = self.limits.max_exchanges
            if most is not None and before.exchanges >= most:
                raise RefusedError("limit", f"this site gives {most} replies, no more")
            self._check_epsilon(before.releases + Counter([release]))
            self.spent.exchanges += 1
            self.spent.releases[release] += 1
            self.spent.given = _newest(self.spent.given, federation, about)

    def measure(self, header: Header, body: Bytes) -> None:
        """Count one more measurement, or refuse it.

        There is one for every exchange of every start of the server. The same question
        may be asked again, if the answer was lost.
        """
        self._check_allowed()
        about = [header.attempt, header.exchange, _digest(header, body)]
        with self._all() as before:
            last = before.measured.get(header.federation)
            if about == last:
                return
            if last is not None and about[:2] <= last[:2]:
                raise RefusedError(
                    "measured", f"after exchange {header.exchange}, at another point"
                )
            self._count_measurement(before)
            self.spent.measured = _newest(self.spent.measured, header.federation, about)

    def conclude(self, header: Header, body: Bytes) -> None:
        """Count the one conclusion of a federation, or refuse another one."""
        self._check_allowed()
        about = _digest(header, body)
        with self._all() as before:
            last = before.concluded.get(header.federation)
            if about == last:
                return
            if last is not None:
                raise RefusedError("measured", "this federation was concluded before")
            self._count_measurement(before)
            known = self.spent.concluded
            self.spent.concluded = _newest(known, header.federation, about)

    def remark(self) -> str:
        """Say to the operator what was released before, under noise."""
        privacy, old = self.job.channel.privacy, []
        if privacy is None or not is_noisy(self.job):
            return ""
        with self._all() as before:
            if self.rows is not None:
                old = [one.name for one in self.rows.others() if own_rows.is_old(one)]
        if not before.releases.total():
            return ""
        found = epsilon_of(before.releases, privacy.delta)
        times = before.releases.total()
        text = (
            f"rows of this site were released {times} time{'s'[: times > 1]} before, "
            f"with an epsilon of {found:.4g} at delta {privacy.delta:g}"
        )
        if math.isinf(found):
            text += ": some of them without noise"
        if old:
            text += (
                f". {', '.join(old)}, of an earlier version, has not noted any noise, "
                "and counts as without. If it is about other rows, move it away"
            )
        return text

    @contextmanager
    def _all(self) -> Iterator[Spent]:
        """Give all that was released before, and write what is counted meanwhile.

        Nothing is written if it is refused. Other processes wait, so that each sees
        what the others released.
        """
        if self.rows is None:
            yield self.spent
            return
        with self.rows.locked():
            path = self.rows.path
            self.spent = Spent.read(path) if path.exists() else Spent()
            before = deepcopy(self.spent)
            others = map(Spent.read, self.rows.others())
            yield sum(others, start=before)
            if self.spent != before:
                self.spent.write(path)

    def _check_allowed(self) -> None:
        if not self.measures:
            raise RefusedError("measure", "this site does not measure for others")

    def _count_measurement(self, before: Spent) -> None:
        most = self.limits.max_exchanges
        if most is not None and before.measurements >= most:
            raise RefusedError("limit", f"this site measures {most} times, no more")
        self.spent.measurements += 1
        self.spent.releases[IN_THE_CLEAR] += 1

    def _check_epsilon(self, after: Counter[Release]) -> None:
        most, privacy = self.limits.max_epsilon, self.job.channel.privacy
        if most is None or privacy is None:
            return
        if epsilon_of(after, privacy.delta) > most:
            raise RefusedError(
                "privacy", "one more reply would exceed the epsilon of this site"
            )


def _digest(header: Header, body: Bytes) -> str:
    """Return a name for the point that was sent, with this client's own blocks."""
    return sha256_of([f"{header.accepted} ".encode(), body]).hex()


def name_of_reply(header: Header, names: list[str], masked: bool) -> str:
    """Return a name for all that a reply depends on, and its place in sums.

    `names` are those of what was sent. Under masks every sum is another release: the
    noise of the others in it may be new.
    """
    where = (header.stage, header.phase, header.index, header.accepted)
    about = [header.federation, header.algorithm, where, names]
    about.append(header.info if masked else None)
    return sha256_of([json.dumps(about).encode()]).hex()


def _newest(held: dict, federation: str, value: Any) -> dict:
    """Return the entries with a new last one; very old ones are forgotten."""
    others = [(name, one) for name, one in held.items() if name != federation]
    return dict([*others, (federation, value)][-_FEDERATIONS:])
