"""Formulas of docstrings as MathML, which browsers draw themselves.

Docstrings hold formulas as people type them: `y_{t+1} <- y_t - lr_y gy(x_t, y_t; b)`.
That is no LaTeX. KaTeX and MathJax would need this translation, too, and after it a
script and fonts on every page. MathML needs neither: a page opens from a disk and is
drawn without a program. Derivatives are drawn as papers print them.
"""

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["inline", "prose"]

_GREEK = dict(
    zip(
        "alpha beta gamma delta epsilon zeta eta theta ell lambda mu nu xi rho sigma "
        "tau phi Phi psi omega Delta lam gam th".split(),
        "αβγδεζηθℓλμνξρστφΦψωΔλγθ",
        strict=True,
    )
)
_SIGNS = {
    "<-": "←",
    "<=": "≤",
    ">=": "≥",
    "-": "−",
    "-=": "−=",
    "==": "=",
    "..": "…",
    "...": "…",
    "+-": "±",
    "||": "‖",
    "<": "&lt;",
    ">": "&gt;",
    "*": "∗",
    "'": "′",
}
# Signs that are drawn among words, too.
_ARROWS = {one: _SIGNS[one] for one in ("<-", "<=", ">=")}
# Derivatives: what stands before the loss, and the loss, which takes the indices.
_NABLA = "<msub><mo>∇</mo><mi>{}</mi></msub>"
_SECOND = "<msubsup><mo>∇</mo><mrow>{}</mrow><mn>2</mn></msubsup>"
_DERIVED = {
    **{level + of: (_NABLA.format(of), level) for level in "fg" for of in "xy"},
    "hvp": (_SECOND.format("<mi>y</mi><mi>y</mi>"), "g"),
    "jvp": (_SECOND.format("<mi>x</mi><mi>y</mi>"), "g"),
}
_OPERATORS = {"sum_": "∑", "prod_": "∏", "grad_": "∇", "grad ": "∇"}
_BAR = '<mover><mi>{}</mi><mo stretchy="false">¯</mo></mover>'
_SPECIAL = {
    "Hbar": _BAR.format("H"),
    "Abar": _BAR.format("A"),
    "bbar": _BAR.format("b"),
    "fybar": f"<msub>{_BAR.format('f')}<mi>y</mi></msub>",
    "Hz": "<mi>H</mi><mi>z</mi>",
    "dlam": "<mi>d</mi><mi>λ</mi>",
    "dF": "<mi>d</mi><mi>F</mi>",
    "dx": "<msub><mi>d</mi><mi>x</mi></msub>",
    "dy": "<msub><mi>d</mi><mi>y</mi></msub>",
}
# Values of more than one letter; in prose some of them are words.
_LONG, _LONG_IN_LISTINGS = {"lr", "pr"}, {"lr", "pr", "small", "step"}
_FUNCTIONS = {"max", "min", "exp", "log", "sqrt", "sigmoid", "softmax"}
_ARTICLES = {"a", "A", "I"}
_LINKING = {"and", "is", "are", "or", "by", "from", "follow", "else"}

_TOKEN = re.compile(
    r"""(?P<code>`[^`]*`)
    |(?P<space>\s+)
    |(?P<text>i\.e\.|e\.g\.|'s\b|--[\w-]+|[\w.]+/[\w./]+\.\w+
        |[A-Za-z_]\w*=[A-Za-z]\w*|(?!(?:tau|eta)-)[A-Za-z][A-Za-z0-9]+(?:-\w+)+
        |[A-Za-z](?:-[A-Za-z]{2,}\w*)+|[A-Za-z]{2,}(?:\.[A-Za-z]\w+)+
        |(?!(?:lr|argmin|argmax|max|min|mean|sum|prod|Proj)_)
         [A-Za-z]{2,}_[A-Za-z]{2}\w*|x_true)
    |(?P<dot>\.(?=[)\]]|\s-\s))
    |(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
    |(?P<name>[A-Za-z]+\d*)
    |(?P<angle><(?=[^\s<>=][^<>=]*,[^<>=]*>))
    |(?P<op>\.\.\.|\.\.|<-|<=|>=|==|\+-|[-+]=|\|\||[-+=<>/|])
    |(?P<open>[(\[{])|(?P<close>[)\]}])
    |(?P<mark>[,;:])
    |(?P<other>.)""",
    re.VERBOSE,
)
_SCRIPT = re.compile(
    r"_(?P<below>\{[^}]*\}|\+-|[+-](?!\w)|:?[A-Za-z]+\d*|-?\d+)"
    r"|\.(?P<part>[xyz]\b|\+-)|(?P<prime>'(?!s\b))|(?P<tilde>~)"
    r"|\^(?P<power>\{[^}]*\}|\([^()]*\)|-?[A-Za-z0-9]+'?|\*)"
    r"|(?P<star>\*(?=[(,.;:\s)]))|(?P<plus>\+(?=[ ;,]))"
)


class _Piece(NamedTuple):
    """A piece of a text, and how it is drawn where it is part of a formula.

    `kind` is atom, number, op, open, close, mark, space or text.
    """

    kind: str
    source: str
    drawn: str = ""


def prose(text: str) -> str:
    """Return a paragraph with its formulas drawn; the words and the code stay."""
    found = []
    for run in _runs(_pieces(text, listing=False), apart=True):
        before, inner, after = _trimmed(run)
        drawn = _formula(inner) if _has_atom(inner) else _source(inner)
        found += [_source(before), drawn, _source(after)]
    return "".join(found)


def inline(text: str) -> str:
    """Return a line of a listing as HTML: all is formula, but for words and code."""
    found = []
    for run in _runs(_pieces(text, listing=True), apart=False):
        before, inner, after = _spaces_cut(run)
        drawn = _formula(inner) if _has_atom(inner) else _worded(inner)
        found += [before, drawn, after]
    return "".join(found)


def _worded(run: list[_Piece]) -> str:
    source = html.escape(_source(run), quote=False)
    return re.sub("`([^`]*)`", r"<code>\1</code>", source)


def _pieces(text: str, *, listing: bool) -> list[_Piece]:
    """Cut a text into pieces; those between brackets that hold words are no formula."""
    found: list[_Piece] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None and match.lastgroup is not None
        kind, source, start = match.lastgroup, match.group(), place
        place = match.end()
        base: tuple[str, str] | None = None
        if kind == "name" and not _is_article(source, found, text[place:], listing):
            base, kind = _named(source, text, place, listing), "atom"
        elif kind == "close" or (source in ("||", ">") and _is_open(source, found)):
            base, kind = ("", _bracket("close", source)), "close"
        if base is not None:
            place, drawn = _scripted(base, text, place)
            found.append(_Piece(kind, text[start:place], drawn))
        elif kind in ("atom", "name", "code", "text", "other"):
            found.append(_Piece("text", source))
        else:
            found.append(_sign(kind, source, found))
    return _without_words(found)


def _named(name: str, text: str, place: int, listing: bool) -> tuple[str, str] | None:
    """Return what stands before a name and the name, drawn, or None for a word."""
    letters = name.rstrip("0123456789")
    number, follows = name[len(letters) :], text[place : place + 1]
    if name in _DERIVED:
        before, loss = _DERIVED[name]
        return before, f"<mi>{loss}</mi>"
    if name in ("dx", "dy") and text[: place - 2].endswith("/"):
        return "", f"<mi>d</mi><mi>{name[1]}</mi>"
    if name in _SPECIAL:
        return "", _SPECIAL[name]
    if name + follows in _OPERATORS and text[place : place + 2] not in (" o", " a"):
        return "", f"<mo>{_OPERATORS[name + follows]}</mo>"
    if letters in _GREEK:
        return "", _indexed(_GREEK[letters], number)
    if len(letters) == 1 and (not number or letters.islower() or letters == "L"):
        return "", _indexed(letters, number)
    known = _LONG_IN_LISTINGS if listing else _LONG
    called = name in _FUNCTIONS and follows == "("
    if name in known or called or follows in ("_", "^"):
        return "", f'<mi mathvariant="normal">{name}</mi>'
    return None


def _indexed(letter: str, number: str) -> str:
    one = f"<mi>{letter}</mi>"
    return f"<msub>{one}<mn>{number}</mn></msub>" if number else one


def _is_article(name: str, found: list[_Piece], after: str, listing: bool) -> bool:
    """Say whether a letter is an article: a word follows, and no sign precedes."""
    word = re.match(r"\s+([A-Za-z`-]+)", after)
    if name not in _ARTICLES or word is None or word[1] in _LINKING:
        return False
    last = next((one for one in reversed(found) if one.kind != "space"), None)
    if last is not None and last.kind in ("op", "number"):
        return False
    is_value = len(word[1]) == 1 or word[1] in {*_GREEK, *_DERIVED, *_LONG}
    return not (listing and is_value)


def _is_open(sign: str, found: list[_Piece]) -> bool:
    """Say whether a norm, or an angle, is open."""
    sign = "<" if sign == ">" else sign
    opened = sum(one.kind == "open" and one.source == sign for one in found)
    closing = ("||", "‖") if sign == "||" else (">", "⟩")
    return opened > sum(
        one.kind == "close" and one.source.startswith(closing) for one in found
    )


def _bracket(kind: str, source: str) -> str:
    shown = {"<": "⟨", ">": "⟩"}.get(source, _SIGNS.get(source, source))
    form = "prefix" if kind == "open" else "postfix"
    return f'<mo stretchy="false" form="{form}">{shown}</mo>'


def _sign(kind: str, source: str, found: list[_Piece]) -> _Piece:
    """Return a sign, a number, a bracket or a space."""
    shown = _SIGNS.get(source, source)
    if kind == "space":
        return _Piece(kind, source)
    if kind == "number":
        return _Piece(kind, source, f"<mn>{source}</mn>")
    if kind == "dot":  # a sample of its own, without a name
        return _Piece("atom", source, "<mi>·</mi>")
    if kind in ("open", "angle") or source == "||":
        return _Piece("open", source, _bracket("open", source))
    last = next((one.kind for one in reversed(found) if one.kind != "space"), "op")
    if source in ("-", "+-") and last in ("op", "open", "mark", "text"):
        return _Piece(kind, source, f'<mo form="prefix">{shown}</mo>')
    return _Piece(kind, source, f"<mo>{shown}</mo>")


def _scripted(base: tuple[str, str], text: str, place: int) -> tuple[int, str]:
    """Add the indices and powers that follow in the text; return where they end."""
    (before, drawn), low, high = base, "", ""
    while (match := _SCRIPT.match(text, place)) is not None:
        kind, source = match.lastgroup or "", match.group()
        if kind == "plus" and not low:
            break
        if kind in ("below", "part"):
            low += ("<mo>,</mo>" if low else "") + _inside(match[kind])
        elif kind == "tilde":
            drawn = f'<mover>{drawn}<mo stretchy="false">~</mo></mover>'
        elif kind == "power":
            high += _inside(match["power"])
        else:
            high += f"<mo>{_SIGNS.get(source, source)}</mo>"
        place = match.end()
    name = "m" + ("sub" if low else "") + ("sup" if high else "")
    if name != "m":
        scripts = "".join(f"<mrow>{one}</mrow>" for one in (low, high) if one)
        drawn = f"<{name}>{drawn}{scripts}</{name}>"
    return place, before + drawn


def _inside(index: str) -> str:
    """Draw an index or a power."""
    index = index[1:-1] if index[0] in "{(" else index
    if re.fullmatch("[A-Za-z]{2,}", index) and index not in _GREEK:
        return f"<mtext>{index}</mtext>"
    if index in ("*", "+-", "+", "-"):
        return f"<mo>{_SIGNS.get(index, index)}</mo>"
    pieces = _pieces(index, listing=True)
    return "".join(one.drawn or f"<mtext>{one.source}</mtext>" for one in pieces)


def _matches(pieces: list[_Piece]) -> dict[int, int]:
    """Return where each bracket that is opened is closed."""
    stack: list[int] = []
    found = {}
    for place, piece in enumerate(pieces):
        if piece.kind == "open":
            stack.append(place)
        elif piece.kind == "close" and stack:
            found[stack.pop()] = place
    return found


def _without_words(pieces: list[_Piece]) -> list[_Piece]:
    """Make brackets words that have no partner, or words between them."""
    pairs = _matches(pieces)
    kept = set()
    for start, end in pairs.items():
        between = pieces[start + 1 : end]
        if not any(one.kind == "text" or one.source == ":" for one in between):
            kept |= {start, end}
    return [
        piece if piece.kind not in ("open", "close") or place in kept else _alone(piece)
        for place, piece in enumerate(pieces)
    ]


def _alone(bracket: _Piece) -> _Piece:
    """Return a bracket among words; with a power it stays drawn."""
    if len(bracket.source) > 2 or bracket.source == "||":
        return _Piece("atom", bracket.source, bracket.drawn)
    return _Piece("text", bracket.source)


def _runs(pieces: list[_Piece], *, apart: bool) -> Iterator[list[_Piece]]:
    """Return runs without words; `apart` ends one at commas outside of brackets."""
    run: list[_Piece] = []
    depth = 0
    for piece in pieces:
        depth += (piece.kind == "open") - (piece.kind == "close")
        if piece.kind == "text" or (apart and piece.kind == "mark" and depth <= 0):
            yield run
            yield [piece]
            run, depth = [], 0
        else:
            run.append(piece)
    yield run


def _trimmed(run: list[_Piece]) -> tuple[list[_Piece], list[_Piece], list[_Piece]]:
    """Return what is around a formula, and itself: it begins and ends with a value."""
    start, end = 0, len(run)
    while start < end and (
        run[start].kind in ("space", "mark")
        or (run[start].kind == "op" and "prefix" not in run[start].drawn)
    ):
        start += 1
    while start < end and run[end - 1].kind in ("space", "mark", "op"):
        end -= 1
    return run[:start], run[start:end], run[end:]


def _spaces_cut(run: list[_Piece]) -> tuple[str, list[_Piece], str]:
    inner = list(run)
    before = inner.pop(0).source if inner and inner[0].kind == "space" else ""
    after = inner.pop().source if inner and inner[-1].kind == "space" else ""
    return before, inner, after


def _has_atom(run: list[_Piece]) -> bool:
    return any(one.kind == "atom" for one in run)


def _source(run: list[_Piece]) -> str:
    return "".join(_ARROWS.get(one.source, one.source) for one in run)


def _formula(run: list[_Piece]) -> str:
    """Draw a run of pieces. No `math` begins a line, where Markdown reads a block."""
    return f'<span class="math"><math>{_row(run)}</math></span>'


def _row(run: list[_Piece]) -> str:
    """Draw pieces side by side, roots over what is between their brackets."""
    drawn, place, pairs = [], 0, _matches(run)
    while place < len(run):
        piece = run[place]
        end = pairs.get(place + 1, 0)
        if piece.source == "sqrt" and end:
            drawn.append(f"<msqrt>{_row(run[place + 2 : end])}</msqrt>")
            place = end
        elif piece.kind != "space":
            drawn.append(piece.drawn)
        elif 0 < place < len(run) - 1 and _touch(run[place - 1], run[place + 1]):
            drawn.append('<mspace width="0.2em"></mspace>')
        place += 1
    return "".join(drawn)


def _touch(left: _Piece, right: _Piece) -> bool:
    """Say whether two values stand side by side, as a product of them does."""
    values = ("atom", "number")
    return left.kind in (*values, "close") and right.kind in (*values, "open")
