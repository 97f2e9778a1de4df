"""What a server has asked for under noise, on its disk: all of it counts in epsilon.

An exchange that is made again, after a restart or for want of replies, is one release
more: sites draw other noise. So every one is written down before it is asked for.
"""

import json
from collections import Counter
from pathlib import Path

from fedbilevel._files import write_atomically
from fedbilevel.errors import CheckpointError
from fedbilevel.federation.ledger import read_releases, write_releases
from fedbilevel.federation.server.requests import Answers


class ServerReleases:
    """Counts asked exchanges by the blocks of a reply, and by how many replied."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.counts = path, Counter()
        if path is None or not path.exists():
            return
        try:
            self.counts = read_releases(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}), so that epsilon is not known. Put back "
                "a copy, or choose a new folder."
            ) from error

    def ask(self, blocks: int, asked: int) -> None:
        """Count an exchange that is about to be asked for, as if all would reply."""
        self.counts[blocks, asked] += 1
        self._save()

    def settle(self, blocks: int, asked: int, answers: Answers) -> None:
        """Correct the last one by what came: those who stay away bring no noise.

        Replies that came count, even if they made no mean.
        """
        if answers.came is not None and not answers.came:
            return  # what nobody saw was computed all the same
        self.counts[blocks, asked] -= 1
        if answers.came is not None:
            self.counts[blocks, len(answers.taken) or answers.came] += 1
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            text = json.dumps(write_releases(self.counts)) + "\n"
            write_atomically(self.path, text)
