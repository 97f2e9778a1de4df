"""Input from peers is read strictly, shown safely, and refused for a reason.

A refusal is sent in the clear, under masks too. So a site sends the name of
a reason and nothing else: what exactly was wrong, with its numbers, is shown at the
site, and the server shows the sentence that stands here. Which reason it is follows
from the packet, the settings and what was answered before, and never from rows. The
one exception is `not-finite` without masks and noise, where the reply would show it.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from fedbilevel._text import shown
from fedbilevel.errors import FedbilevelError

_DEEPEST = 12  # levels of lists and objects in one another
_DIGITS = 20  # of a whole number: all below 2^64 have no more

REASONS: Mapping[str, str] = {
    "algorithm": "the site built another algorithm",
    "announcement": "what was said about a masked sum cannot be read",
    "attempt": "the request is from a server that was replaced since",
    "client": "the request is from or for somebody else",
    "cohort": "the same question was answered in a sum over other sites, or earlier "
    "sums of all the site's rows were. Bring the missing sites back. `node --cohorts "
    "any` allows sums over others, whose differences may show one site",
    "damaged": "the checksum differs: the packet was cut off or changed, or one side "
    "signs packets and the other has no keys",
    "dtype": "a leaf has another type than is due",
    "federation": "the site has heard no hello of this federation",
    "garbage": "the packet cannot be read",
    "internal": "the site raised an error, which stands on its terminal",
    "jump": "a counter is beyond what can be reached",
    "key": "a masking key is not signed by its owner, as far as the site knows",
    "limit": "the site has given as much as its operator allows",
    "mask": "the site does not mask, confirm or reveal this; its terminal says why",
    "measure": "the site does not measure for others",
    "measured": "the site was asked at another point before",
    "not-finite": "there is NaN or infinity in what was sent, or computed from it",
    "oversized": "the packet is longer than what is due",
    "phase": "there is no such phase, or another one is due",
    "pieces": "the pieces of the packet do not fit together; install the same version "
    "of fedbilevel on both sides",
    "point": "a number in what was sent is larger than the site allows "
    "(`node --largest-point`)",
    "privacy": "one more reply would spend more epsilon than the site allows",
    "replayed": "the request was answered before",
    "settings": "the site runs with other settings",
    "shape": "a leaf has another shape than is due",
    "signature": "the packet is not signed with a key that the site knows",
    "steps": "the site takes no steps from a server, or not these",
    "truncated": "the packet is shorter than what is due",
    "unknown": "the packet refers to a leaf that the site does not hold",
    "version": "the site speaks another version of the protocol; install the same "
    "version of fedbilevel on both sides",
}


class RefusedError(FedbilevelError):
    """A packet that is not taken; `reason` is one word, `detail` what was wrong.

    Both may quote what a peer sent, so they are cut and escaped here, once for all.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = shown(reason, 40), shown(detail)
        super().__init__(f"{self.reason}: {self.detail}")

    def sent(self) -> dict[str, str]:
        """Return what a site sends of it: a name of the list, and nothing else."""
        known = self.reason in REASONS
        return {"reason": self.reason if known else "internal"}


def refusal_of(error: Exception) -> tuple[RefusedError, str]:
    """Return the refusal that an error in reading a packet is, and its text for here.

    What a check foresees is a `RefusedError` already. Anything else is an unforeseen
    packet, and its sender learns nothing more.
    """
    if isinstance(error, RefusedError):
        return error, str(error)
    refusal = RefusedError("internal", f"reading it raised {type(error).__name__}")
    return refusal, f"{refusal}, {shown(str(error))}"


class RefusedThereError(RefusedError):
    """A refusal that a site sent as `info`; its words are those of the list."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        reason = str(info.get("reason"))
        super().__init__(reason, REASONS.get(reason, "a reason that is not known here"))


def is_plain(text: Any, most: int) -> bool:
    """Say whether this is a text of at most `most` characters that shows as it is."""
    return isinstance(text, str) and shown(text, most) == text


def read_json(text: bytes) -> Any:
    """Return what a text in UTF-8 says, or raise ValueError.

    What JSON leaves open is refused: a name twice in an object, numbers that are not
    finite or too long for a computer's, halves of characters, endless nesting.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_number,
            parse_int=_whole,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _check(value, 0)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has a name twice")
    return made


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is beyond the range of numbers")
    return value


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a whole number has {len(text)} digits")
    return int(text)


def _check(value: Any, depth: int) -> None:
    """Raise for halves of characters, and for what lies too deep."""
    if isinstance(value, str):
        value.encode("utf-8")  # of a half a UnicodeEncodeError, which is a ValueError
    if not isinstance(value, dict | list):
        return
    if depth == _DEEPEST:
        raise ValueError("nested too deeply")
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    for one in inside:
        _check(one, depth + 1)
