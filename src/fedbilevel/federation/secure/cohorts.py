"""The sites over which a reply is summed: one set of sites for each question.

Two sums of the same replies over {0, 1, 2, 3} and {0, 1, 2} show the reply of site 3.
So a site remembers, across restarts and federations, in which sum it answered a
question, and answers it in no other. A question is the stage, the phase and the index
of an exchange, what the site was sent, and which repeat it is; another repeat draws
another batch.

A server may still ask something else, at a point nearby or as a repeat, of other sites.
Where replies are of batches, the difference then has the noise of all batches in it;
where they are of all rows it has none. `apart` is against that: sums with the same
settings are then over the same sites, or over sites that differ by the minimum or more,
so that a difference is itself a sum of so many.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel._files import naming_file
from fedbilevel.errors import CheckpointError

_COHORTS = 1024  # different ones, where they are kept apart


class Question(NamedTuple):
    """A question to a site, as digests: of its settings, and of all of it."""

    settings: str
    digest: str


@dataclass
class Cohorts:
    """Remembers the sites in the sum of each question, and refuses another sum.

    `sums` are those of each question, `seen` all sets of sites under some settings.
    With a `path` it is on a disk, a line for each question: nothing is forgotten, and
    an exchange costs one line.
    """

    minimum: int
    apart: bool = False
    path: Path | None = None
    sums: dict[Question, tuple[int, ...]] = field(default_factory=dict)
    seen: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        whole, end, cut_off = self.path.read_bytes().rpartition(b"\n")
        if cut_off:  # by a crash: it was never answered
            os.truncate(self.path, len(whole + end))
        try:
            for line in whole.splitlines():
                self._take(*_read(json.loads(line)))
        except (ValueError, TypeError) as error:
            # To begin anew would forget which sums were opened.
            raise CheckpointError(
                f"{self.path} is damaged ({error}), so that it is unknown in which "
                "sums this site was. Put back a copy, or move it away to begin anew."
            ) from error

    def why_not(self, question: Question, members: tuple[int, ...]) -> str | None:
        """Say why a question is not answered in the sum over some sites, if so."""
        before = self.sums.get(question)
        if before not in (None, members):
            return f"it was answered in a sum over clients {before}, and in no other"
        if not self.apart:
            return None
        seen = self.seen.get(question.settings, set())
        if members in seen:
            return None
        if len(seen) >= _COHORTS:
            return f"it is the sum over set number {_COHORTS + 1} of sites"
        for other in seen:
            gone, come = set(other) - set(members), set(members) - set(other)
            if any(0 < len(some) < self.minimum for some in (gone, come)):
                return f"an earlier sum was over clients {other}, which differ by few"
        return None

    def note(self, question: Question, members: tuple[int, ...]) -> None:
        """Remember a sum, before it is confirmed to anybody."""
        if question in self.sums:
            return
        if self.path is not None:
            _append(self.path, json.dumps([*question, list(members)]) + "\n")
        self._take(question, members)

    def _take(self, question: Question, members: tuple[int, ...]) -> None:
        self.sums[question] = members
        self.seen.setdefault(question.settings, set()).add(members)


def _read(held: Any) -> tuple[Question, tuple[int, ...]]:
    settings, digest, members = held
    if not all(type(k) is int for k in members):
        raise ValueError("clients that are no numbers")
    return Question(str(settings), str(digest)), tuple(members)


def _append(path: Path, line: str) -> None:
    """Write a line to disk that other users cannot read."""
    with naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
