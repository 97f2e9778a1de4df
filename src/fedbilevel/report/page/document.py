"""Puts a page together: sections, numbers, style and program in one file.

Plotly's program is packed, or the page would have five megabytes. What comes from files
is escaped, and should that ever fail, the page's own policy lets no other program run.
"""

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from fedbilevel.errors import FedbilevelError
from fedbilevel.report.page.figures import as_script, curves_of
from fedbilevel.report.page.grid import Grid, escaped
from fedbilevel.report.page.holdings import who_holds_what
from fedbilevel.report.page.images import images_as_html
from fedbilevel.report.page.pictures import Picture, pictures_of
from fedbilevel.report.page.sections import (
    configuration,
    cost_grid,
    final_grid,
    ranking_grid,
)
from fedbilevel.report.page.words import standings_of, summary, title_of
from fedbilevel.saved import Saved

__all__ = ["ICON", "MARK", "asset", "write_page"]

MARK = "<!doctype html><!-- a report of fedbilevel -->"
# An empty picture, or browsers would ask for one.
ICON = '<link rel="icon" href="data:,">'


def write_page(saved: Saved, command: str | None = None, *, refresh: int = 0) -> str:
    """Return the page of a run or a comparison.

    `command` is what repeats it. With `refresh` a browser asks again after so many
    seconds, while a run is not finished.
    """
    standings, target = standings_of(saved)
    if standings:
        # The best is first everywhere, also where it is a color or a column.
        ordered = {one.algorithm: saved.results[one.algorithm] for one in standings}
        saved = replace(saved, results=ordered)
    best = standings[0].algorithm if standings else next(iter(saved.results))
    grid = ranking_grid(saved, standings, target) if standings else final_grid(saved)
    holds, pictures = who_holds_what(saved), pictures_of(saved, best)
    data = {
        "curves": curves_of(saved, target),
        "bars": [one.bars for one in (*pictures, holds) if one.bars],
        "table": {
            "tabs": grid.as_csv("\t"),
            "csv": grid.as_csv(),
            "latex": grid.as_latex(),
        },
        "name": saved.name,
    }
    parts = [
        _section("Summary", _paragraphs(summary(saved))),
        _section("Curves", _curves(data["curves"])),
        _section("Results", grid.as_html("results") + _buttons() + _finals(saved)),
        *(_section(one.heading, _picture(one)) for one in (*pictures, holds)),
        _section("Costs", cost_grid(saved).as_html()),
        _section("Repeat it", _repeat(command)),
        _section("Configuration", _folded("All settings", configuration(saved))),
    ]
    return _document(title_of(saved), "".join(parts), data, refresh)


def _document(title: str, body: str, data: Mapping[str, Any], refresh: int) -> str:
    plotly, program = _plotly(), asset("page.js")
    again = f'<meta http-equiv="refresh" content="{refresh:d}">' if refresh else ""
    return (
        f'{MARK}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{ICON}{again}'
        f"<title>{escaped(title)}</title><style>{asset('page.css')}</style></head>"
        f'<body><a class="skip" href="#main">Skip to the content</a>'
        f"<header><p>fedbilevel</p><h1>{escaped(title)}</h1></header>"
        f'<main id="main">{body}</main>'
        f'<script type="application/json" id="data">{as_script(data)}</script>'
        f'<script type="text/plain" id="plotly">{plotly[0]}</script>'
        f"<script>{program}</script></body></html>\n"
    )


def _policy() -> str:
    """Return which programs may run: the page's own and Plotly, by their digests."""
    digests = " ".join(f"'sha256-{one}'" for one in (_plotly()[1], _digest_of_page()))
    return (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


@cache
def _plotly() -> tuple[str, str]:
    """Return Plotly's program, packed as text, and its digest."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise FedbilevelError(
            "reports are drawn by Plotly: install fedbilevel[report]."
        ) from None
    program = get_plotlyjs().encode()
    # Without a time in it, the same run gives the same page.
    packed = gzip.compress(program, 6, mtime=0)
    return base64.b64encode(packed).decode(), _digest(program)


def _digest_of_page() -> str:
    return _digest(asset("page.js").encode())


def _digest(program: bytes) -> str:
    return base64.b64encode(hashlib.sha256(program).digest()).decode()


@cache
def asset(name: str) -> str:
    """Return a file that belongs to pages: their style, or their program."""
    return (resources.files("fedbilevel.report.page") / name).read_text("utf-8")


def _section(heading: str, content: str) -> str:
    identity = "about-" + "".join(c if c.isalnum() else "-" for c in heading.lower())
    return (
        f'<section aria-labelledby="{identity}"><h2 id="{identity}">'
        f"{escaped(heading)}</h2>{content}</section>"
    )


def _paragraphs(sentences: Sequence[str]) -> str:
    lead, *rest = map(escaped, sentences)
    return f'<p class="lead">{lead}</p>' + "".join(f"<p>{one}</p>" for one in rest)


def _curves(curves: Mapping[str, Any]) -> str:
    radios = "".join(
        f'<label><input type="radio" name="axis" value="{escaped(axis)}"'
        f"{' checked' if place == 0 else ''}> {escaped(axis)}</label>"
        for place, axis in enumerate(curves["axes"])
    )
    options = "".join(
        f'<option value="{escaped(name)}"'
        f"{' selected' if name == curves['headline'] else ''}>{escaped(name)}</option>"
        for name in curves["metrics"]
    )
    thin = ""
    if curves["step"] > 1:
        thin = (
            f"<p>Of {curves['step']} measurements in a row one is in this page; "
            "columns.npz has them all.</p>"
        )
    return (
        f'<form class="choices"><label>Show <select id="metric">{options}</select>'
        f"</label><fieldset><legend>against</legend>{radios}</fieldset></form>"
        '<div id="curves" class="plot" role="img" aria-label="Curves"></div>'
        '<p id="told" aria-live="polite">The curves need JavaScript and a browser of '
        "2023 or newer; all numbers are in the tables below.</p>" + thin
    )


def _buttons() -> str:
    kinds = {
        "copy": "Copy the table",
        "csv": "Table as CSV",
        "latex": "Table as LaTeX",
        "columns": "All measurements as CSV",
    }
    made = "".join(
        f'<button type="button" data-does="{kind}">{text}</button>'
        for kind, text in kinds.items()
    )
    return f'<p class="buttons">{made}<span id="done" role="status"></span></p>'


def _finals(saved: Saved) -> str:
    """Return all metrics of a comparison, whose first table has one of them only."""
    if not saved.compared:
        return ""
    return _folded("All metrics after the last round", [final_grid(saved)])


def _folded(title: str, grids: Sequence[Grid]) -> str:
    content = "".join(grid.as_html() for grid in grids)
    return f"<details><summary>{escaped(title)}</summary>{content}</details>"


def _picture(one: Picture) -> str:
    told = f"<p>{escaped(one.text)}</p>" + images_as_html(one.images)
    if one.bars is None:
        return told + "".join(grid.as_html() for grid in one.grids)
    name = escaped(one.heading)
    drawn = (
        f'<div id="{escaped(one.bars["id"])}" class="plot" role="img" '
        f'aria-label="{name}; the numbers are in the table below"></div>'
    )
    return told + drawn + _folded("The numbers", one.grids)


def _repeat(command: str | None) -> str:
    if command is None:
        return (
            "<p>This was not started from the command line; the configuration below "
            "is what to start it with.</p>"
        )
    return (
        f'<pre tabindex="0"><code id="command">{escaped(command)}</code></pre>'
        '<p class="buttons"><button type="button" data-does="command">Copy the command'
        "</button></p>"
    )
