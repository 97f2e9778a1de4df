"""Releases of a site's rows, as they are counted and written down."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel._files import write_atomically
from fedbilevel.errors import CheckpointError
from fedbilevel.federation.own_rows import is_old
from fedbilevel.federation.refusals import read_json
from fedbilevel.runtime.privacy import IN_THE_CLEAR, Release


@dataclass
class Spent:
    """Releases of some rows: how often, and with which noise.

    `given`, `measured` and `concluded` name the last reply, and the last such question,
    of each federation.
    """

    exchanges: int = 0
    measurements: int = 0
    releases: Counter[Release] = field(default_factory=Counter)
    measured: dict[str, list] = field(default_factory=dict)
    concluded: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "Spent":
        """Read what was written, or raise: to begin anew would forget releases."""
        try:
            held = read_json(path.read_bytes())
            spent = Spent(_count(held["exchanges"]), _count(held["measurements"]))
            if is_old(path):
                # Their noise was not recorded, so it may have been none.
                spent.releases[IN_THE_CLEAR] = spent.exchanges + spent.measurements
            else:
                for one in held["releases"]:
                    times = _count(one.pop("times"))
                    spent.releases[_release(one)] += times
            spent.measured = {str(k): list(v) for k, v in held["measured"].items()}
            spent.concluded = {str(k): str(v) for k, v in held["concluded"].items()}
            given = held.get("given", {}) if is_old(path) else held["given"]
            spent.given = {str(k): str(v) for k, v in given.items()}
            return spent
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}), so that it is unknown what this site "
                "has released. Put back a copy, or move it away to begin anew."
            ) from error

    def write(self, path: Path) -> None:
        """Write it all, for its owner alone."""
        kinds = self.releases.items()
        releases = [{**one._asdict(), "times": times} for one, times in kinds]
        text = json.dumps({**vars(self), "releases": releases}) + "\n"
        write_atomically(path, text, mode=0o600)

    def __add__(self, other: "Spent") -> "Spent":
        """Return both together; of each federation the later question is the last."""
        measured = dict(self.measured)
        for name, about in other.measured.items():
            measured[name] = max(about, measured.get(name, about))
        return Spent(
            self.exchanges + other.exchanges,
            self.measurements + other.measurements,
            self.releases + other.releases,
            measured,
            {**self.concluded, **other.concluded},
            {**other.given, **self.given},
        )


def _release(held: dict[str, Any]) -> Release:
    """Read one kind of release, as it was written."""
    one = Release(**held)
    counts = (one.participants, one.blocks, one.shares)
    numbers = (one.noise, one.delta)
    plain = all(type(n) in (int, float) and n >= 0 for n in (*counts, *numbers))
    whole = all(type(n) is int for n in counts)
    if not (plain and whole and one.participants and math.isfinite(sum(numbers))):
        raise ValueError(f"a release of {held!r:.200}")
    return one


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a count of {value!r:.40}")
    return value
