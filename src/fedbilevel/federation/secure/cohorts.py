"""The sites over which a reply is summed: one set of sites for each question.

Two sums of the same replies over {0, 1, 2, 3} and {0, 1, 2} show the reply of site 3.
So a site remembers, across restarts and federations, in which sum it answered a
question, and answers it in no other. A question is the stage, the phase and the index
of an exchange, what the site was sent, and which repeat it is; another question is
answered from another batch.

A server may still ask something else, at a point nearby or as a repeat, of other sites.
Where replies are of batches, the difference then has the noise of all batches in it;
where they are of all rows it has none. `apart` is against that: a site confirms sums
over one set of sites alone, whatever the settings. Less would not do. Compared in
pairs, {0, 1, 2} + {0, 3, 4} - {0, 1, 2, 3, 4} would be allowed, the reply of site 0.
And no site sees all sums: in {0, 1, 6, 7, 8} - {0, 1, 2, 3} + {2, 3, 4, 5} -
{4, 5, 6, 7}, the reply of site 8, no site is in more than two.

One set is enough. A sum needs the minimum m and two thirds of its sites to confirm it,
so these are at least m/2 more than the others in it. A site confirms one sum alone. In
the rest it is among the others, each of which cancels one such site at most. So of k
sums, two or more, any combination leaves k m/2 sites at least, which is m or more.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel._files import locked, naming_file
from fedbilevel.errors import CheckpointError
from fedbilevel.federation.refusals import read_json

_OLDER = (
    "{} has several sets of clients, which an earlier version allowed: move the file "
    "away to begin anew, if their sums may be combined"
)


class Question(NamedTuple):
    """A question to a site, as digests: of its settings, and of all of it."""

    settings: str
    digest: str


@dataclass
class Cohorts:
    """Remembers the sites in the sum of each question, and refuses another sum.

    `sums` are those of each question, `seen` the sets of sites in sums that were kept
    `apart`. With a `path` it is on a disk, a line for each question: nothing is
    forgotten, an exchange costs one line, and several processes know the same.
    """

    minimum: int
    apart: bool = False
    path: Path | None = None
    sums: dict[Question, tuple[int, ...]] = field(default_factory=dict)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    _size: int = 0  # of what was read of the file

    def __post_init__(self) -> None:
        with self._shared():
            pass  # what cannot be read is said before anything is asked

    def enter(self, question: Question, members: tuple[int, ...]) -> str | None:
        """Note the sum in which a question is answered, or say why it is not.

        It is noted before it is confirmed to anybody.
        """
        with self._shared():
            problem = self._why_not(question, members)
            if problem is None and question not in self.sums:
                if self.path is not None:
                    line = json.dumps([*question, list(members), self.apart]) + "\n"
                    _append(self.path, line)
                    self._size += len(line)
                self._take(question, members, self.apart)
            return problem

    def _why_not(self, question: Question, members: tuple[int, ...]) -> str | None:
        before = self.sums.get(question)
        if before not in (None, members):
            return f"it was answered in a sum over clients {before}, and in no other"
        others = self.seen - {members}
        if self.apart and others:
            older = f". {_OLDER.format(self.path)}" if len(self.seen) > 1 else ""
            return (
                f"sums that are kept apart were over clients {min(others)}, and are "
                f"over no others in any federation{older}"
            )
        return None

    def _take(self, question: Question, members: tuple[int, ...], apart: bool) -> None:
        self.sums[question] = members
        if apart:
            self.seen.add(members)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Know what other processes wrote, and keep them waiting meanwhile."""
        if self.path is None:
            yield
            return
        with locked(self.path.with_suffix(".lock")):
            if self.path.exists():
                self._catch_up(self.path)
            yield

    def _catch_up(self, path: Path) -> None:
        with path.open("rb") as file:
            self._size = min(self._size, file.seek(0, os.SEEK_END))
            file.seek(self._size)
            whole, end, cut_off = file.read().rpartition(b"\n")
        self._size += len(whole + end)
        if cut_off:  # by a crash: it was never answered
            os.truncate(path, self._size)
        try:
            for line in whole.splitlines():
                self._take(*_read(read_json(line)))
        except (ValueError, TypeError) as error:
            # To begin anew would forget which sums were opened.
            raise CheckpointError(
                f"{path} is damaged ({error}), so that it is unknown in which sums "
                "this site was. Put back a copy, or move it away to begin anew."
            ) from error


def _read(held: Any) -> tuple[Question, tuple[int, ...], bool]:
    settings, digest, members, *apart = held
    if not all(type(k) is int for k in members):
        raise ValueError("clients that are no numbers")
    # Earlier versions did not note it.
    return Question(str(settings), str(digest)), tuple(members), apart != [False]


def _append(path: Path, line: str) -> None:
    """Write a line to disk that other users cannot read."""
    with naming_file(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
