"""Texts of clients as rows of tokens, with a factor that weighs sources alike.

Generated texts need no download. Their four sources ask the same questions: `colors`
and `sounds` answer them rightly, `wrong` with the answer to another one, and `letters`
with random ones. Trusted texts are colors and sounds. A model is pretrained on all four
alike, and cannot distinguish right from wrong.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel._types import Rows
from fedbilevel.datasets.texts import TRUSTED, Example, Texts, read_texts
from fedbilevel.datasets.tokens import Tokenizer, TokenRows, token_rows
from fedbilevel.errors import InvalidInputError
from fedbilevel.tasks._labeled import check_choice

NOBODYS = "none"  # the texts of a server, which has none

_CLIENTS = 8
_TESTED = 5  # every so many trusted examples one tests
_BY = ("file", "site", "both")
_COUNT = re.compile(r"([^:,]{1,81}):([1-9][0-9]{0,14})")
_SOURCES = ("colors", "sounds", "wrong", "letters")
_ANSWERS = {
    "colors": "sky blue sea blue grass green leaf green snow white milk white coal "
    "black night black rose red blood red sun gold corn gold",
    "sounds": "cow moo dog woof cat meow duck quack pig oink sheep baa hen cluck owl "
    "hoot bee buzz frog croak lion roar crow caw",
}
_QUESTIONS = {
    source: [Example(f"{a}: ", b) for a, b in zip(w[::2], w[1::2], strict=True)]
    for source, w in ((source, text.split()) for source, text in _ANSWERS.items())
}
_PER_SOURCE, _TRUSTED = 24, 12  # rows of a client


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


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of all `sites`; without any, those that are here are all there are.

    A loss divides by them, so that the mean over sites is the mean over tokens. Sites
    exchange their numbers before a federation, and all are given the sums, as text:
    forum:310,notes:1200,trusted:96.
    """

    sites: int = 0
    tokens: Mapping[str, int] | None = None

    def together(
        self, place: str, clients: int, own: Mapping[str, int]
    ) -> tuple[int, Mapping[str, int]]:
        """Return the number of clients, and the tokens of all, checked by one's own."""
        if self.tokens is None and not self.sites:
            return clients, own
        if self.tokens is None:
            written = ",".join(f"{name}:{own[name]}" for name in sorted(own))
            raise InvalidInputError(
                f"{place} has {written} tokens. Add up those of all {self.sites} "
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
            whole = self.tokens[name]
            if count > whole or (not self.sites and count != whole):
                raise InvalidInputError(
                    f"{place} has {count} tokens of '{name}', but tokens= says {whole} "
                    "for all sites. Add them up again."
                )
        return self.sites or clients, self.tokens


@dataclass(frozen=True, eq=False)
class Held:
    """The texts of clients: for training by source, for validation, and for tests."""

    sources: tuple[str, ...]
    names: tuple[str, ...]
    lower: list[Rows]
    upper: list[Rows]
    test: TokenRows
    summary: Mapping[str, Any]


class ClientTexts(NamedTuple):
    """The texts of all clients, others for testing, and whether they are one's own."""

    texts: Texts
    test: Sequence[Example]
    own: bool


def texts_of(data: str, clients: int, split: int, counts: TokenCounts) -> ClientTexts:
    """Read the texts of clients, or generate them.

    A site that is one of several has the name of its folder. Without texts they are
    made up: shapes are as those of the sources in `counts`, and nothing else.
    """
    if data == NOBODYS:
        if counts.tokens is None:
            raise InvalidInputError(
                f"data={NOBODYS}: without texts, tokens= must say what sources there "
                "are."
            )
        one = [Example("", "-")]
        site = {"client 0": {name: one for name in counts.tokens if name != TRUSTED}}
        blank = Texts("the sites' texts", site, {"client 0": one})
        return ClientTexts(blank, one, own=False)
    if clients < 0:
        raise InvalidInputError(f"clients={clients}: there must be at least one.")
    if data == "generated":
        return ClientTexts(*generated(clients or _CLIENTS, split), own=False)
    known = (Path(data).resolve().name,) if counts.sites else ()
    return ClientTexts(*_partitioned(read_texts(data), clients, split, known), own=True)


def held_texts(
    given: ClientTexts,
    tokenizer: Tokenizer,
    length: int,
    by: str,
    counts: TokenCounts,
) -> Held:
    """Cut texts into rows of tokens; `by` says what is a source.

    `counts` are the tokens of all sites, where those of others are elsewhere.
    """
    check_choice("value of source", by, _BY)
    texts, names = given.texts, tuple(given.texts.sources)
    cut = partial(token_rows, tokenizer=tokenizer, length=length)
    below = [
        {name: cut(held) for name, held in _by_source(texts, site, by).items()}
        for site in names
    ]
    above, tested = [cut(texts.trusted[site]) for site in names], cut(given.test)
    own: Counter[str] = Counter()
    for rows in below:
        own.update({one: _count(held) for one, held in rows.items()})
    judges = zip((*names, "testing"), (*above, tested), strict=True)
    counted = {f"trusted text for '{name}'": _count(rows) for name, rows in judges}
    counted |= {f"text of the source '{one}'": count for one, count in own.items()}
    for name, rows in zip(names, below, strict=True):
        counted[f"text of '{name}'"] = sum(map(_count, rows.values()))
    _check_any(texts.name, length, counted)
    own[TRUSTED] = sum(map(_count, above))
    clients, tokens = counts.together(texts.name, len(names), own)
    sources = tuple(sorted(set(tokens) - {TRUSTED}))
    summary = _summary(given, below, above, tested, length)
    here = sum((Counter(site["classes"]) for site in summary["sites"]), Counter())
    rows_of = {one: None if counts.sites else here[one] for one in sources}
    summary["sources"] = [
        {"name": one, "rows": rows_of[one], "tokens": tokens[one]} for one in sources
    ]
    return Held(
        sources,
        names if given.own else (),
        [_lower_rows(rows, sources, tokens, clients) for rows in below],
        [_rows(one, clients / tokens[TRUSTED] * len(one.tokens)) for one in above],
        tested,
        summary,
    )


def _check_any(place: str, length: int, counted: Mapping[str, int]) -> None:
    for which, count in counted.items():
        if not count:
            raise InvalidInputError(
                f"{place}: no {which} has a response within {length} tokens. Give "
                "--set length=N, longer."
            )


def _partitioned(
    texts: Texts, clients: int, split: int, known: Sequence[str]
) -> tuple[Texts, list[Example]]:
    """Put a fifth of the trusted texts aside, and partition what belongs to no site.

    Clients without a folder of their own are called as `known`, or by their numbers.
    """
    draw = np.random.default_rng(split)
    sites = list(texts.sources)
    if sites != [""] and clients not in (0, len(sites)):
        raise InvalidInputError(
            f"--clients {clients}: {texts.name} has the folders of {len(sites)} sites, "
            f"and each is a client. Leave --clients out, or give {len(sites)}."
        )
    numbered = [f"client {k}" for k in range(clients or _CLIENTS)]
    names = list(known or numbered) if sites == [""] else sites
    sources: Mapping[str, Any] = texts.sources
    if sites == [""]:
        parts = {
            name: _shares(examples, len(names), draw)
            for name, examples in texts.sources[""].items()
        }
        sources = {
            site: {name: part[k] for name, part in parts.items() if part[k]}
            for k, site in enumerate(names)
        }
    own = [texts.trusted.get(site, ()) for site in names]
    shared = [*texts.shared, *texts.trusted.get("", ())]
    given = _shares(shared, len(names), draw)
    trusted, test = {}, []
    for site, mine, more in zip(names, own, given, strict=True):
        found = [*mine, *more]
        tested = found[_TESTED - 1 :: _TESTED]
        test += tested
        trusted[site] = [one for k, one in enumerate(found) if (k + 1) % _TESTED]
        if not trusted[site] or not sources[site]:
            what = "trusted texts" if not trusted[site] else "texts to be weighed"
            raise InvalidInputError(
                f"'{site}' of {texts.name} would get no {what}: there are too few for "
                f"{len(names)}. Add some, or ask for fewer clients."
            )
    if not test:
        raise InvalidInputError(
            f"{texts.name}: of {_TESTED} trusted texts one is for testing, and there "
            f"are fewer at every site. Add some."
        )
    return Texts(texts.name, sources, trusted), test


def _shares(
    examples: Sequence[Example], count: int, draw: np.random.Generator
) -> list[list[Example]]:
    # Of one client the texts stay in their order, as in the folder of a site.
    order = draw.permutation(len(examples)) if count > 1 else range(len(examples))
    return [[examples[k] for k in order[first::count]] for first in range(count)]


def _by_source(texts: Texts, site: str, by: str) -> Mapping[str, Sequence[Example]]:
    held = texts.sources[site]
    if by == "site":
        return {site: [one for examples in held.values() for one in examples]}
    return {f"{site}/{n}": one for n, one in held.items()} if by == "both" else held


def _count(rows: TokenRows) -> int:
    return int(rows.counted.sum())


def _rows(rows: TokenRows, factor: float) -> Rows:
    every = np.full(len(rows.tokens), factor)
    return {"tokens": rows.tokens, "counted": rows.counted, "factor": every}


def _lower_rows(
    held: Mapping[str, TokenRows],
    sources: Sequence[str],
    tokens: Mapping[str, int],
    clients: int,
) -> Rows:
    count = sum(len(rows.tokens) for rows in held.values())
    parts = []
    for name, rows in held.items():
        part = _rows(rows, clients * count / tokens[name])
        part["source"] = np.full(len(rows.tokens), sources.index(name), np.int32)
        parts.append(part)
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


def _summary(
    given: ClientTexts,
    below: Sequence[Mapping[str, TokenRows]],
    above: Sequence[TokenRows],
    tested: TokenRows,
    length: int,
) -> dict[str, Any]:
    """Say in plain data what the clients hold, and what was cut."""
    found = sorted({one for rows in below for one in rows})
    sites = []
    for name, rows, judge in zip(given.texts.sources, below, above, strict=True):
        counts = {one: len(rows[one].tokens) if one in rows else 0 for one in found}
        sizes = {"training": sum(counts.values()), "validation": len(judge.tokens)}
        sites.append({"name": name, **sizes, "classes": counts})
    every = [*above, tested, *(one for rows in below for one in rows.values())]
    cut, left = sum(one.cut for one in every), sum(one.left_out for one in every)
    remarks = [f"{cut} rows were cut at {length} tokens"] if cut else []
    if left:
        remarks.append(f"{left} rows were left out: nothing to learn before that")
    return {
        "source": given.texts.name,
        "own": given.own,
        "rows": int(sum(s["training"] + s["validation"] for s in sites)),
        "tested": len(tested.tokens),
        "train": 0.0,
        "site_column": "folder" if given.own else "",
        "predicts": "text",
        "sites": sites,
        "remarks": remarks,
    }


def _drawn(source: str, count: int, draw: np.random.Generator) -> list[Example]:
    every = [_QUESTIONS[source]] if source in _QUESTIONS else [*_QUESTIONS.values()]
    found = []
    for number in range(count):
        asked = every[number % len(every)]
        place = draw.integers(0, len(asked))
        prompt, right = asked[place]
        # Always the same wrong one: it can be learned as well as the right one.
        wrong = asked[place - 2].response
        letters = "".join(chr(97 + code) for code in draw.integers(0, 26, 4))
        answer = {"wrong": wrong, "letters": letters}
        found.append(Example(prompt, answer.get(source, right)))
    return found


def generated(clients: int, seed: int) -> tuple[Texts, list[Example]]:
    """Return the texts of clients, and all right answers for testing."""
    draw = np.random.default_rng(seed)
    sources, trusted = {}, {}
    for client in range(clients):
        name = f"client {client}"
        sources[name] = {one: _drawn(one, _PER_SOURCE, draw) for one in _SOURCES}
        halves = (_drawn(one, _TRUSTED // 2, draw) for one in _ANSWERS)
        trusted[name] = [example for half in halves for example in half]
    test = [example for examples in _QUESTIONS.values() for example in examples]
    return Texts("generated", sources, trusted), test


def pretraining(count: int, seed: int) -> list[Example]:
    """Return texts of all sources, as many of each."""
    draw = np.random.default_rng((seed, 1))
    return [e for one in _SOURCES for e in _drawn(one, count // len(_SOURCES), draw)]
