"""The frozen transformer of a task, with the tokens that it knows."""

from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.datasets.tokens import Bytes, Subwords, Tokenizer
from fedbilevel.errors import InvalidInputError
from fedbilevel.models.checkpoints import read_checkpoint
from fedbilevel.models.transformer import Transformer
from fedbilevel.tasks._pretraining import pretrained

__all__ = ["Base", "base_of"]

_BUILT_IN, _TOKENIZER = "built-in", "tokenizer.json"
_LONGEST = 256  # rows of the built-in transformer, or what is asked for


class Base(NamedTuple):
    """A transformer, how texts become its tokens, its family, and its folder."""

    transformer: Transformer
    tokenizer: Tokenizer
    family: str
    folder: str


def base_of(
    model: str, tokenizer: str, length: int, sizes: tuple[int, int], kind: Any
) -> Base:
    """Return the transformer of a name or a folder, for rows of a length.

    `sizes` are the width and the blocks of the built-in one, `kind` the type of the
    numbers of a folder, or None for the usual one.
    """
    if length < 2:
        raise InvalidInputError(f"length={length}: a row has 2 tokens or more.")
    if model == _BUILT_IN:
        base = _built_in(tokenizer, length, *sizes)
    else:
        base = _from_folder(Path(model), tokenizer, kind)
    made = base.transformer.architecture
    if base.tokenizer.vocabulary > made.vocabulary:
        raise InvalidInputError(
            f"{tokenizer or Path(model) / _TOKENIZER} has {base.tokenizer.vocabulary} "
            f"tokens, but the vocabulary of model={model} has {made.vocabulary}: it is "
            "the tokenizer of another model."
        )
    if length > made.longest:
        raise InvalidInputError(
            f"length={length}: rows of model={model} have {made.longest} tokens at "
            "most."
        )
    return base


def _built_in(tokenizer: str, length: int, width: int, blocks: int) -> Base:
    if width < 8 or width % 8 or blocks < 1:
        raise InvalidInputError(
            f"width={width}, blocks={blocks}: give a multiple of 8, and at least one."
        )
    known = Subwords(Path(tokenizer)) if tokenizer else Bytes()
    made = pretrained(width, blocks, max(length, _LONGEST))
    return Base(made, known, "llama", "")


def _from_folder(folder: Path, tokenizer: str, kind: Any) -> Base:
    found = read_checkpoint(folder, kind)
    known = Subwords(Path(tokenizer) if tokenizer else folder / _TOKENIZER, found.end)
    return Base(found.transformer, known, found.family, str(folder))
