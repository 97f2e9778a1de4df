"""Texts as rows of tokens, padded to one length, with marks of what is learned.

Only responses are learned, and where they end; what was asked is given.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedbilevel.datasets._files import check_ordinary, check_size
from fedbilevel.datasets.texts import Example
from fedbilevel.errors import InvalidInputError, needed


@dataclass(frozen=True)
class Bytes:
    """Every byte of a text in UTF-8 is a token; two more begin and end rows.

    All tokens are below `vocabulary`. `end` is the token after a text, and of padding;
    `fingerprint` distinguishes the tokenizer from others.
    """

    vocabulary: int = 258
    begin: int = 256
    end: int = 257
    fingerprint: str = "bytes"

    def opened(self, text: str) -> list[int]:
        """Return the beginning and the bytes of a text."""
        return [self.begin, *self.continued(text)]

    def continued(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8", errors="replace"))


class Subwords:
    """The tokens of a file `tokenizer.json`, by the package tokenizers."""

    def __init__(self, path: Path, end: int | None = None) -> None:
        sentence = (
            f"{path} is read by the package tokenizers: install fedbilevel[text]."
        )
        library = needed("tokenizers", sentence).Tokenizer
        if not path.exists():
            raise InvalidInputError(f"there is no tokenizer {path}.")
        check_ordinary(path)
        check_size(path, path.stat().st_size, "a tokenizer")
        try:
            self._library: Any = library.from_file(str(path))
        except Exception as error:  # of the library's own kind
            why = " ".join(str(error).split())
            raise InvalidInputError(f"{path} is no tokenizer: {why:.200}.") from None
        self._library.no_truncation()
        self._library.no_padding()
        self.vocabulary: int = max(self._library.get_vocab().values(), default=-1) + 1
        self.end: int = self._found_end(path) if end is None else end
        content = path.read_bytes() + str(self.end).encode()
        self.fingerprint: str = hashlib.sha256(content).hexdigest()[:32]

    def _found_end(self, path: Path) -> int:
        for name in ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>"):
            found = self._library.token_to_id(name)
            if found is not None:
                return found
        raise InvalidInputError(
            f"{path} has no token that ends a text, such as <|endoftext|> or </s>."
        )

    def opened(self, text: str) -> list[int]:
        """Return the tokens of a text with those that the file puts before it."""
        return self._library.encode(text).ids

    def continued(self, text: str) -> list[int]:
        """Return the tokens of a text alone."""
        return self._library.encode(text, add_special_tokens=False).ids


Tokenizer: TypeAlias = Bytes | Subwords


class TokenRows(NamedTuple):
    """Rows of tokens, which of them are learned, and what did not fit.

    `counted` marks tokens that are predicted from those before them. `cut` rows ended
    later than their length, `left_out` have nothing to learn within it.
    """

    tokens: np.ndarray
    counted: np.ndarray
    cut: int
    left_out: int


def token_rows(
    examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> TokenRows:
    """Return examples as rows of one length."""
    rows, marks, cut = [], [], 0
    for prompt, response in examples:
        given = tokenizer.opened(prompt)
        learned = [*tokenizer.continued(response), tokenizer.end]
        row = [*given, *learned][:length]
        # Nothing comes before the first token, so that nothing could predict it.
        first = max(len(given), 1)
        if first >= len(row):
            continue
        cut += len(given) + len(learned) > length
        position = np.arange(length)
        marks.append((first <= position) & (position < len(row)))
        rows.append(row + [tokenizer.end] * (length - len(row)))
    shape = (len(rows), length)
    return TokenRows(
        np.asarray(rows, np.int32).reshape(shape),
        np.asarray(marks, bool).reshape(shape),
        cut,
        len(examples) - len(rows),
    )
