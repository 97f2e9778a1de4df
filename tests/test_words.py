"""Texts of the package use the field's vocabulary, by CONTRIBUTING's "How texts sound".

Read are docstrings, comments and strings of Python, and whole pages. Code is left out:
names, formulas in backticks, placeholders, and strings of a single word.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
ROOTS = ("src", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
ROOTS += ("benchmarks/README.md",)
FORBIDDEN = {  # and what to write instead
    r"told|tells?|telling": "reported, shows",
    r"explo(?:des?|ded|ding)": "diverges",
    r"(?:goes|go|going|gone|went) on": "continues",
    r"(?:goes|go|going|gone|went) back": "rolls back, returns",
    r"on and on": "keeps moving",
    r"ways?": "the noun that is meant: method, distance, direction",
    r"houses?|rooms?": "package, module; memory, disk space",
    r"deals?|dealt|dealing": "partition",
    r"letters?": "parameters, symbols; characters",
    r"own (?:lower level|y)": "personal",
    r"rules?": "hypergradient estimator",
    r"nobody|whoever|whom?": "the noun that is meant: no client, the sender",
    r"as printed": "",
    r"(?-i:(?:^|(?<=[.:] ))(?:What|That)) (?-i:[a-z]+)": "a noun as the subject",
}
ALLOWED = {  # and why
    r"each way|(?<=floats each\n)way|both ways": "directions of traffic",
    r"and ways to take less|Three ways to adapt": "ways to do something",
    r"\(tasks, ways|ways=\S|fewer ways": "classes of an N-way task",
    r"stopping rule|the rule part|The rule is part": "the rule that ends a run",
    r"[Rr]obust rules?|(?:[Tt]hese|[Oo]ther) rules|a rule other": "aggregation rules",
    r"R a rule|a rule (?:can|that bears)|the rule R|by the rule": "aggregation rules",
    r"for momentum and rules": "aggregation rules",
    r"^own y\b.*|\| own y": "values of `answers`, which commands print and compare",
    r"(?:people|readers|operators|anyone|everyone)(?: with a problem)? who": "persons",
    r"client NOBODY": "the name of a constant",
    r"than letters and digits": "letters of the alphabet",
    r"over the survivors, who they are": "the survivors' identities",
}
WORDS = re.compile(rf"\b(?:{'|'.join(FORBIDDEN)})\b", re.IGNORECASE | re.MULTILINE)
FINE = re.compile("|".join(ALLOWED), re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}|```.*?```", re.DOTALL)
QUOTES = re.compile(r"^\w*(\"\"\"|'''|\"|')(.*)\1$", re.DOTALL)


# From Python 3.12 on, a string with values in it is several tokens.
QUOTED = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def texts(source: str, suffix: str) -> Iterator[tuple[int, str]]:
    """Yield texts with the number of their first line; comments in blocks."""
    if suffix not in (".py", ".pyi"):
        yield 1, source
        return
    block: list[str] = []
    begun = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if block and line > begun + len(block) - (token.type != tokenize.COMMENT):
            yield begun, "\n".join(block)
            block = []
        if token.type == tokenize.COMMENT:
            begun = begun if block else line
            block.append(token.string.lstrip("#: "))
        elif token.type in QUOTED and " " in token.string.strip():
            quoted = QUOTES.match(token.string)
            yield line, quoted[2] if quoted else token.string


def found(source: str, suffix: str) -> list[tuple[int, str]]:
    """Return line and words of every forbidden expression that is not allowed."""
    bad = []
    for begun, text in texts(source, suffix):
        plain = CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), text)
        fine = [one.span() for one in FINE.finditer(plain)]
        for word in WORDS.finditer(plain):
            if not any(a <= word.start() and word.end() <= b for a, b in fine):
                bad.append((begun + plain[: word.start()].count("\n"), word[0]))
    return bad


@pytest.mark.parametrize("root", ROOTS)
def test_texts_use_no_forbidden_word(root):
    place = HOME / root
    files = [place] if place.is_file() else sorted(place.rglob("*.*"))
    kinds = (".md",) if root == "docs" else (".py", ".pyi", ".md", ".html", ".js")
    bad = [
        f"{file.relative_to(HOME)}:{line}: '{word}'"
        for file in files
        if file.suffix in kinds
        for line, word in found(file.read_text(encoding="utf-8"), file.suffix)
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "source",
    (
        '"""It is told later."""',
        '"""Sums.\n\nWhat travels is small.\n"""',
        "# That is right.",
        "x = 1  # nobody asks",
        'raise ValueError(f"{name} explodes in round {round}")',
        '"""One.\n\nIt\ngoes on.\n"""',
        "# the one who replied",
    ),
)
def test_a_forbidden_word_is_found(source):
    assert found(source, ".py")


@pytest.mark.parametrize(
    "source",
    (
        "told = whoever(rule)",
        'x = {"nobody": "rule"}',
        '"""Returns `rule` and {letters}, which a stopping rule has."""',
        'f"{who} not {where}"',
        '"""Whatever else."""',
    ),
)
def test_code_and_allowed_words_are_not(source):
    assert not found(source, ".py")


def test_every_exception_is_used():
    """So that the list does not outlive the texts that it was for."""
    everything = "\n".join(
        text
        for root, kind in (("src", ".py"), ("docs", ".md"))
        for file in sorted((HOME / root).rglob(f"*{kind}"))
        for _, text in texts(file.read_text(encoding="utf-8"), kind)
    )
    for one in ALLOWED:
        assert re.search(one, everything, re.MULTILINE), one
