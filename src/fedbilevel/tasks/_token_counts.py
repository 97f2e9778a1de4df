"""How many tokens of every source all sites have, where each sees its own texts alone.

A loss divides by them, so that the mean over sites is the mean over tokens. Sites tell
their numbers to each other before a federation, and all are given the sums, as text:

    forum:310,notes:1200,trusted:96
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedbilevel.datasets.texts import TRUSTED
from fedbilevel.errors import InvalidInputError

__all__ = ["TokenCounts", "read_counts", "written"]

_COUNT = re.compile(r"([^:,]{1,81}):([1-9][0-9]{0,14})")


def read_counts(text: str) -> dict[str, int]:
    """Read the sums of all sites."""
    found = [_COUNT.fullmatch(part.strip()) for part in text.split(",")]
    pairs = [(one[1], int(one[2])) for one in found if one is not None]
    counts = dict(pairs)
    if len(counts) != len(found) or TRUSTED not in counts or len(counts) < 2:
        raise InvalidInputError(
            f"tokens='{text:.80}': give every source once with its tokens at all "
            f"sites, and those of {TRUSTED}, as in notes:1200,{TRUSTED}:96."
        )
    return counts


def written(counts: Mapping[str, int]) -> str:
    """Return counts as `read_counts` reads them."""
    return ",".join(f"{name}:{counts[name]}" for name in sorted(counts))


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of all `sites`; without any, those that are here are all there are."""

    sites: int = 0
    tokens: Mapping[str, int] | None = None

    def together(
        self, place: str, clients: int, own: Mapping[str, int]
    ) -> tuple[int, Mapping[str, int]]:
        """Return the number of clients, and the tokens of all, checked by one's own."""
        if self.tokens is None and not self.sites:
            return clients, own
        if self.tokens is None:
            raise InvalidInputError(
                f"{place} has {written(own)} tokens. Add up those of all {self.sites} "
                "sites, and give the sums to the server and to every node, as --set "
                f"tokens={':N,'.join(sorted(own))}:N."
            )
        for name, count in own.items():
            if name not in self.tokens:
                raise InvalidInputError(
                    f"{place} has {count} tokens of '{name}', a source that tokens= "
                    f"does not name: it names {', '.join(sorted(self.tokens))}. Rename "
                    "the file as the other sites call it, or add the source, on the "
                    "server and at all sites."
                )
            told = self.tokens[name]
            if count > told or (not self.sites and count != told):
                raise InvalidInputError(
                    f"{place} has {count} tokens of '{name}', but tokens= says {told} "
                    "for all sites. Add them up again."
                )
        return self.sites or clients, self.tokens
