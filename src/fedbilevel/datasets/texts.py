"""Texts from JSON lines: a folder for every site, a file for every source.

    FOLDER/SITE/SOURCE.jsonl     FOLDER/SITE/trusted.jsonl

or, without names of sites, FOLDER/SOURCE.jsonl. A file of one name is one source at all
sites. `trusted.jsonl` says what good text is; one beside the folders of the sites is
for all of them. A line is an object with "prompt" and "response", or with "text".
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.datasets._files import check_ordinary, check_size
from fedbilevel.errors import InvalidInputError

TRUSTED = "trusted"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,39}")
_ENDING = ".jsonl"
_MOST = 1000  # files of a folder, and sites


class Example(NamedTuple):
    """A text that begins with what was asked, which may be nothing."""

    prompt: str
    response: str


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of every site: examples by source, and trusted ones.

    A site without a name, "", stands for rows that are still to be partitioned; so does
    `shared`, trusted examples for all sites.
    """

    name: str
    sources: Mapping[str, Mapping[str, Sequence[Example]]]
    trusted: Mapping[str, Sequence[Example]]
    shared: Sequence[Example] = ()


def read_texts(folder: Path | str) -> Texts:
    """Read a folder of JSON lines, and say what is wrong with it."""
    place = Path(folder)
    if not place.is_dir():
        raise InvalidInputError(
            f"{place} is no folder. Give one with a folder for every site, and in "
            f"those a file SOURCE{_ENDING} for every source and {TRUSTED}{_ENDING}."
        )
    own = _files(place)
    inner = sorted(p for p in place.iterdir() if p.is_dir() and p.name[0] != ".")
    if len(inner) > _MOST:
        raise InvalidInputError(f"{place} holds more than {_MOST} folders of sites.")
    sites = {_name(one): _files(one) for one in inner}
    sites = {name: files for name, files in sites.items() if files}
    if TRUSTED in sites:
        raise InvalidInputError(
            f"{place / TRUSTED}: this name is reserved for texts that judge others. "
            "Rename the folder of this site."
        )
    beside = own.pop(TRUSTED, [])
    if not sites:
        sites = {"": own}
    elif own:
        raise InvalidInputError(
            f"{place} holds folders of sites and beside them {min(own)}{_ENDING}: put "
            f"it into the folder of its site. Only {TRUSTED}{_ENDING} may be for all."
        )
    trusted = {site: files.pop(TRUSTED, []) for site, files in sites.items()}
    for site, files in sites.items():
        where = place / site
        if not files:
            raise InvalidInputError(
                f"{where} holds no SOURCE{_ENDING} with texts to be weighed."
            )
        if not trusted[site] and not beside:
            raise InvalidInputError(
                f"{where} holds no {TRUSTED}{_ENDING}, by which texts are judged. Put "
                f"one there, or one for all sites into {place}."
            )
    return Texts(str(place), sites, trusted, beside)


def _files(folder: Path) -> dict[str, list[Example]]:
    paths = sorted(p for p in folder.iterdir() if p.suffix == _ENDING)
    if len(paths) > _MOST:
        raise InvalidInputError(f"{folder} holds more than {_MOST} files of texts.")
    return {_name(path): _lines(path) for path in paths}


def _name(path: Path) -> str:
    name = path.name.removesuffix(_ENDING)
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{path.parent} holds {name!r:.60}: the name of a site or a source has up "
            "to 40 characters: A-Z, a-z, 0-9, spaces, dots, - and _. Rename it."
        )
    return name


def _lines(path: Path) -> list[Example]:
    check_ordinary(path)
    check_size(path, path.stat().st_size, "its text")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is no text in UTF-8: {error}.") from None
    lines = enumerate(text.split("\n"), start=1)
    found = [_example(path, number, line) for number, line in lines if line.strip()]
    if not found:
        raise InvalidInputError(f"{path} is empty. Give it a line, or remove it.")
    return found


def _example(path: Path, number: int, line: str) -> Example:
    where = f"{path}, line {number}"
    try:
        held: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", "it is nested too deeply")
        raise InvalidInputError(f"{where} is no JSON: {why}.") from None
    if not isinstance(held, dict):
        raise InvalidInputError(f"{where} is no JSON object.")
    names = ("text",) if "text" in held else ("prompt", "response")
    for name in names:
        if name not in held:
            raise InvalidInputError(
                f'{where} has no "{name}". A line has "prompt" and "response", or '
                '"text".'
            )
        if not isinstance(held[name], str):
            raise InvalidInputError(f'{where}: "{name}" is no text.')
    if not held[names[-1]]:
        raise InvalidInputError(f'{where}: "{names[-1]}" is empty.')
    if len(names) == 1:
        return Example("", held["text"])
    return Example(held["prompt"], held["response"])
