"""The page that lists the runs of a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fedbilevel.report.page.document import ICON, asset
from fedbilevel.report.page.grid import escaped
from fedbilevel.report.page.words import amount, standings_of, title_of
from fedbilevel.saved import Saved

__all__ = ["Listed", "write_listing", "write_sentence"]

_TEXTS, _NUMBERS = ("run", "what", "state"), ("rounds", "main metric", "value")
_COLUMNS = len(_TEXTS) + len(_NUMBERS)


@dataclass(frozen=True)
class Listed:
    """A line of the list: a run that can be read, or why it cannot."""

    name: str
    saved: Saved | None
    problem: str = ""


def write_listing(title: str, lines: Sequence[Listed], refresh: int) -> str:
    """Return the list; a browser asks again after `refresh` seconds."""
    head = "".join(f'<th scope="col" class="text">{one}</th>' for one in _TEXTS)
    head += "".join(f'<th scope="col">{one}</th>' for one in _NUMBERS)
    body = "".join(map(_line, lines))
    table = (
        '<div class="wide" role="region" tabindex="0" aria-label="Runs"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    if not lines:
        table = "<p>No run is here yet. Runs come here with --out.</p>"
    return _framed(f"Runs in {title}", table, refresh)


def write_sentence(sentence: str) -> str:
    """Return a page that says why there is nothing to show."""
    return _framed(sentence, '<p><a href="/">All runs</a></p>', 0)


def _framed(title: str, body: str, refresh: int) -> str:
    again = f'<meta http-equiv="refresh" content="{refresh:d}">' if refresh else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{ICON}{again}'
        f"<title>{escaped(title)}</title><style>{asset('page.css')}</style>"
        f"</head><body><header><p>fedbilevel</p><h1>{escaped(title)}</h1>"
        f'</header><main id="main">{body}</main></body></html>\n'
    )


def _line(one: Listed) -> str:
    address = escaped("/run/" + quote(one.name))
    if one.saved is None:
        return (
            f'<tr><th scope="row">{escaped(one.name)}</th>'
            f'<td class="text" colspan="{_COLUMNS - 1}">{escaped(one.problem)}'
            "</td></tr>"
        )
    saved = one.saved
    standings, _ = standings_of(saved)
    best = (
        standings[0].mean if standings else saved.every[0].columns[saved.headline][-1]
    )
    rounds = max(int(result.columns["round"][-1]) for result in saved.every)
    texts = (title_of(saved), "not finished" if saved.unfinished else "finished")
    numbers = (amount(rounds), saved.headline, amount(best))
    return (
        f'<tr><th scope="row"><a href="{address}">{escaped(one.name)}</a></th>'
        + "".join(f'<td class="text">{escaped(text)}</td>' for text in texts)
        + "".join(f"<td>{escaped(number)}</td>" for number in numbers)
        + "</tr>"
    )
