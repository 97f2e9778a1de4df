"""JSON of preparations and sums: written plainly, read strictly and within bounds."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedbilevel.errors import InvalidInputError

_VERSION = 1
_LONGEST_FILE = 64 * 2**20  # characters
_LONGEST_TEXT = 1000
_MOST = 200_000  # columns, or values of one


def kinded(one: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return a dataclass as the entries that `Node.made` reads, by its kind's name."""
    (kind,) = (name for name, known in kinds.items() if known is type(one))
    return {"kind": kind, **vars(one)}


def write(kind: str, content: Mapping[str, Any]) -> str:
    """Return a text that says what it is and which version of that."""
    text = {"fedbilevel": kind, "version": _VERSION, **content}
    return json.dumps(text, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Node:
    """A JSON object whose entries are read by name and kind; `where` is for errors."""

    where: str
    content: Mapping[str, Any]

    @staticmethod
    def of(
        text: str | bytes, kind: str, names: Sequence[str], more: Sequence[str] = ()
    ) -> "Node":
        """Read a text of some kind, which has these entries, and may have `more`."""
        if len(text) > _LONGEST_FILE:
            raise InvalidInputError(f"the file of {kind} is too long to be one.")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"this is no file of {kind}: {error}.") from None
        if not isinstance(content, dict) or content.get("fedbilevel") != kind:
            raise InvalidInputError(
                f"this is no file of {kind}, as `fedbilevel prepare` writes them."
            )
        node = Node(kind, content)
        new = [name for name in more if name in content]
        node.only("fedbilevel", "version", *names, *new)
        if content["version"] != _VERSION:
            raise InvalidInputError(
                f"{kind}: version {content['version']!r:.20} is not known, only "
                f"{_VERSION}. Prepare the data again."
            )
        return node

    def only(self, *names: str) -> None:
        """Raise unless there are these entries and no others."""
        odd = sorted(set(self.content) ^ set(names))
        if odd:
            raise InvalidInputError(
                f"{self.where}: it has unexpected or missing entries: "
                f"{', '.join(odd)[:200]}."
            )

    def node(self, name: str) -> "Node":
        """Return an entry that is an object."""
        if not isinstance(self._get(name), dict):
            raise self._wrong(name, "an object")
        return Node(f"{self.where}, {name}", self._get(name))

    def items(self, name: str) -> list["Node"]:
        """Return an entry that is a list of objects."""
        listed = self._get(name)
        if not isinstance(listed, list) or not 0 <= len(listed) <= _MOST:
            raise self._wrong(name, "a list")
        for one in listed:
            if not isinstance(one, dict):
                raise self._wrong(name, "a list of objects")
        where = f"{self.where}, {name}"
        return [Node(f"{where} {n}", one) for n, one in enumerate(listed)]

    def text(self, name: str) -> str:
        """Return an entry that is a text."""
        value = self._get(name)
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_TEXT:
            raise self._wrong(name, f"a text of 1 to {_LONGEST_TEXT} characters")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return an entry that is a list of different texts, at least one."""
        listed = self._get(name)
        if not isinstance(listed, list) or not 0 < len(listed) <= _MOST:
            raise self._wrong(name, "a list of at least one text")
        for one in listed:
            if not isinstance(one, str) or not 0 < len(one) <= _LONGEST_TEXT:
                raise self._wrong(name, f"a list of texts of up to {_LONGEST_TEXT}")
        check_different(f"{self.where}, {name}", listed)
        return tuple(listed)

    def word(self, name: str, known: Sequence[str]) -> str:
        """Return an entry that is one of some words."""
        value = self._get(name)
        if value not in known:
            raise self._wrong(name, " or ".join(known))
        return value

    def flag(self, name: str) -> bool:
        """Return an entry that is true or false."""
        if not isinstance(self._get(name), bool):
            raise self._wrong(name, "true or false")
        return self._get(name)

    def made(self, kinds: Mapping[str, type], **given: Any) -> Any:
        """Return the dataclass that `kind` names, of the other entries and of `given`.

        Entries are read by the types of the fields; metadata have bounds of numbers.
        """
        kind = kinds[self.word("kind", tuple(kinds))]
        own = [one for one in fields(kind) if one.name not in given]
        self.only("kind", *(one.name for one in own))
        readers = {str: self.text, tuple[str, ...]: self.texts, bool: self.flag}
        for one in own:
            if one.type in readers:
                given[one.name] = readers[one.type](one.name)
            elif one.type == float | None and self.is_null(one.name):
                given[one.name] = None
            else:
                given[one.name] = self.number(one.name, **one.metadata)
        return kind(**given)

    def is_null(self, name: str) -> bool:
        """Say whether an entry is there and null."""
        return self._get(name) is None

    def number(
        self, name: str, *, above: float = -math.inf, least: float = -math.inf
    ) -> float:
        """Return an entry that is a finite number above a bound, or at least one."""
        value = self._get(name)
        right = isinstance(value, int | float) and not isinstance(value, bool)
        # A whole number may have any number of digits, and then is no float.
        if not right or not abs(value) < 1e300 or value <= above or value < least:
            raise self._wrong(name, "a finite number of its range")
        return float(value)

    def count(self, name: str) -> int:
        """Return an entry that is a whole number, at least 0."""
        value = self._get(name)
        if type(value) is not int or not 0 <= value < 2**53:
            raise self._wrong(name, "a count")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """Return an entry that is a list of whole numbers; none if it is not there."""
        listed = self.content.get(name, [])
        if not isinstance(listed, list) or len(listed) > _MOST:
            raise self._wrong(name, "a list of counts")
        nodes = (Node(self.where, {name: one}) for one in listed)
        return tuple(one.count(name) for one in nodes)

    def _get(self, name: str) -> Any:
        if name not in self.content:
            raise InvalidInputError(f"{self.where}: it has no '{name}'.")
        return self.content[name]

    def _wrong(self, name: str, expected: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.where}: '{name}' is {self.content[name]!r:.80}, but must be "
            f"{expected}."
        )


def check_different(what: str, names: Sequence[str]) -> None:
    """Raise if two names are the same."""
    for name in [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidInputError(f"{what}: '{name:.80}' is there twice.")
