"""What a site has told so far, on its disk, and what it refuses to tell beyond it.

Everything is written down before it leaves, so that no crash and no restart forgets it,
and is counted over all federations: a server that begins another one gains nothing.

What a server can still learn of a site that measures: one loss and one value of each
metric, at a point of its choice, for every exchange that it claims to have made. The
point cannot be checked, since only the server knows what it made of all replies. From
losses at d + 1 points near each other a gradient in d dimensions can be estimated. So
`max_exchanges`, which bounds replies and measurements alike, or `measure` none is what
protects against a server that lies; with masks or noise nothing is measured by default.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fedbilevel._files import write_atomically
from fedbilevel.errors import CheckpointError
from fedbilevel.federation.limits import SiteLimits
from fedbilevel.federation.wire import Bytes, Header, RefusedError, sha256_of
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.privacy import is_noisy, privacy_of_releases

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


class SiteLedger:
    """Counts what one site told, and keeps its limits.

    Without a `folder` it is forgotten with the process.
    """

    def __init__(
        self, job: Job, limits: SiteLimits, folder: Path | None, client: int
    ) -> None:
        limits.check(job)
        self.job, self.limits = job, limits
        self.measures = limits.measures(job)
        self.path = None if folder is None else folder / f"client{client}.ledger.json"
        self.exchanges = self.measurements = 0
        self.releases: Releases = Counter()
        self.measured: dict[str, list] = {}
        self.concluded: dict[str, str] = {}
        self._load()

    def exchange(self, blocks: int, shares: int) -> None:
        """Count one more reply, or refuse to give it.

        It is of so many blocks, to go into a sum with so many shares of noise: those of
        all who are asked, since a site cannot know who stays away, which the server
        counts; under masks the fewest that the site takes part with.
        """
        most = self.limits.max_exchanges
        if most is not None and self.exchanges >= most:
            raise RefusedError("limit", f"this site gives {most} replies, no more")
        if is_noisy(self.job):
            self._check_epsilon(blocks, shares)
            self.releases[blocks, shares] += 1
        self.exchanges += 1
        self._save()

    def measure(self, header: Header, body: Bytes) -> None:
        """Count one more measurement, or refuse it.

        There is one for every exchange of every start of the server. The same question
        may be asked again, if the answer was lost.
        """
        self._check_allowed()
        about = [header.attempt, header.exchange, _digest(header, body)]
        last = self.measured.get(header.federation)
        if about == last:
            return
        if last is not None and about[:2] <= last[:2]:
            raise RefusedError(
                "measured", f"after exchange {header.exchange}, at another point"
            )
        self._count_measurement()
        self.measured = _newest(self.measured, header.federation, about)
        self._save()

    def conclude(self, header: Header, body: Bytes) -> None:
        """Count the one conclusion of a federation, or refuse another one."""
        self._check_allowed()
        about = _digest(header, body)
        last = self.concluded.get(header.federation)
        if about == last:
            return
        if last is not None:
            raise RefusedError("measured", "this federation was concluded before")
        self._count_measurement()
        self.concluded = _newest(self.concluded, header.federation, about)
        self._save()

    def _check_allowed(self) -> None:
        if not self.measures:
            raise RefusedError("measure", "this site does not measure for others")

    def _count_measurement(self) -> None:
        most = self.limits.max_exchanges
        if most is not None and self.measurements >= most:
            raise RefusedError("limit", f"this site measures {most} times, no more")
        self.measurements += 1

    def _check_epsilon(self, blocks: int, shares: int) -> None:
        most = self.limits.max_epsilon
        if most is None:
            return
        after = self.releases + Counter({(blocks, shares): 1})
        spent = privacy_of_releases(self.job, after)["epsilon"]
        if spent > most:
            raise RefusedError(
                "privacy",
                f"one more reply would spend an epsilon of {spent:.4g}, this site "
                f"allows {most:g}",
            )

    def _save(self) -> None:
        if self.path is None:
            return
        held = {
            "exchanges": self.exchanges,
            "measurements": self.measurements,
            "releases": write_releases(self.releases),
            "measured": self.measured,
            "concluded": self.concluded,
        }
        text = json.dumps(held) + "\n"
        write_atomically(self.path, text)

    def _load(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            held = json.loads(self.path.read_text())
            self.exchanges = _count(held["exchanges"])
            self.measurements = _count(held["measurements"])
            self.releases = read_releases(held["releases"])
            self.measured = {str(k): list(v) for k, v in held["measured"].items()}
            self.concluded = {str(k): str(v) for k, v in held["concluded"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # To begin anew would forget what was released.
            raise CheckpointError(
                f"{self.path} is damaged ({error}), so that nobody knows what this "
                "site has told. Put back a copy, or move it away to begin at nothing."
            ) from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a count of {value!r:.40}")
    return value


def _digest(header: Header, body: Bytes) -> str:
    """Return a name for the point that was sent, with this client's own blocks."""
    return sha256_of([f"{header.accepted} ".encode(), body]).hex()


def _newest(held: dict, federation: str, value: Any) -> dict:
    """Return the entries with a new last one; very old ones are forgotten."""
    others = [(name, one) for name, one in held.items() if name != federation]
    return dict([*others, (federation, value)][-_FEDERATIONS:])
