"""Formulas of docstrings, drawn with HTML alone: no program renders them in a page."""

import html
import re

__all__ = ["rendered"]

_SPELLED = (
    "alpha beta gamma delta epsilon zeta eta theta ell lambda mu nu xi rho sigma tau "
    "phi Phi omega"
)
_GREEK: dict[str, str] = dict(zip(_SPELLED.split(), "αβγδεζηθℓλμνξρστφΦω", strict=True))
_LETTER = re.compile(rf"(?<![A-Za-z_])({'|'.join(_GREEK)})(\d?)(?![A-Za-z0-9])")
# What has an index: a letter, or one of the names that formulas are made of.
_NAMES = "argmin|fx|fy|grad|gx|gxy|gy|gyy|hvp|jvp|max|mean|min|sum"
_BASE = rf"(?<![A-Za-z_])((?:[A-Za-z]|{'|'.join(_GREEK.values())})'?|{_NAMES})"
_BELOW = re.compile(_BASE + r"_(\{[^}]*\}|(?:in|group|[A-Za-z0-9])(?![A-Za-z0-9_]))")
_ABOVE = re.compile(r"\^(\{[^}]*\}|\([^()]*\)|-?[A-Za-z0-9]+|\*)")
_SIGNS = {"&lt;-": "←", "&lt;=": "≤", "&gt;=": "≥", "<=": "≤", ">=": "≥"}


def rendered(text: str) -> str:
    """Return a docstring with Greek letters, indices and powers as such.

    Indented paragraphs become blocks, unless they are commands. What is between
    backquotes is code, and stays.
    """
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    lines = text.strip("\n").split("\n")
    if not all(line.startswith("    ") for line in lines):
        parts = re.split(r"(`[^`]*`)", text)
        return "".join(one if one.startswith("`") else _drawn(one) for one in parts)
    if any(line.startswith("    fedbilevel ") for line in lines):
        return text
    shown = "\n".join(_drawn(html.escape(line[4:], quote=False)) for line in lines)
    return f'<pre class="formula">{shown}</pre>'


def _drawn(text: str) -> str:
    text = _LETTER.sub(lambda one: _GREEK[one[1]] + _low(one[2]), text)
    text = _BELOW.sub(lambda one: one[1] + _low(one[2]), text)
    text = _ABOVE.sub(lambda one: f"<sup>{one[1].strip('{}')}</sup>", text)
    for typed, sign in _SIGNS.items():
        text = text.replace(typed, sign)
    return text


def _low(text: str) -> str:
    return f"<sub>{text.strip('{}')}</sub>" if text else ""
