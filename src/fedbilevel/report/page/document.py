"""Pages: a run or a comparison in one file, and the list of the runs of a folder.

The markup and the sentences are in `templates`, which Jinja2 fills in: it escapes
whatever comes from files. Should that ever fail, the policy of a page lets no other
program run. Plotly's program is packed, or a page would have five megabytes.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

from fedbilevel.errors import needed
from fedbilevel.report.page import sections, words
from fedbilevel.report.page.figures import curves_of
from fedbilevel.report.page.holdings import who_holds_what
from fedbilevel.report.page.pictures import pictures_of
from fedbilevel.report.page.quality import quality_pictures
from fedbilevel.result import to_plain
from fedbilevel.saved import Saved

MARK = "<!doctype html><!-- a report of fedbilevel -->"


@dataclass(frozen=True)
class Listed:
    """A line of the list: a run that can be read, or why it cannot."""

    name: str
    saved: Saved | None
    problem: str = ""


def write_page(saved: Saved, command: str | None = None, *, refresh: int = 0) -> str:
    """Return the page of a run or a comparison.

    `command` is what repeats it. With `refresh` a browser asks again after so many
    seconds, while a run is not finished.
    """
    standings, target = words.standings_of(saved)
    if standings:
        # The best is first everywhere, also where it is a color or a column.
        ordered = {one.algorithm: saved.results[one.algorithm] for one in standings}
        saved = replace(saved, results=ordered)
    finals = sections.final_grid(saved)
    grid = sections.ranking_grid(saved, standings, target) if standings else finals
    found = [*quality_pictures(saved), *pictures_of(saved, next(iter(saved.results)))]
    holdings = who_holds_what(saved)
    curves = curves_of(saved, target)
    data = {
        "curves": curves,
        "bars": [one.bars for one in (*found, holdings) if one.bars],
        "table": {
            "tabs": grid.as_csv("\t"),
            "csv": grid.as_csv(),
            "latex": grid.as_latex(),
        },
        "name": saved.name,
    }
    plotly, digest = _plotly()
    return MARK + _filled(
        "page.html",
        title=words.title_of(saved),
        refresh=refresh,
        policy=_policy(digest, _digest(_asset("page.js").encode())),
        saved=saved,
        standings=standings,
        target=target,
        lowest=words.lowest(saved.every[0].columns[saved.headline]),
        still=words.still(saved),
        curves=curves,
        grid=grid,
        # The first table of a comparison has one metric only.
        finals=finals if saved.compared else None,
        found=found,
        holdings=holdings,
        meanings=sections.meanings_grid(saved),
        costs=sections.cost_grid(saved),
        command=command,
        configuration=sections.configuration(saved),
        data=to_plain(data),
        plotly=plotly,
    )


def write_listing(title: str, lines: Sequence[Listed], refresh: int) -> str:
    """Return the list; a browser asks again after `refresh` seconds."""
    rows = [_line(one) for one in lines]
    about = {"title": f"Runs in {title}", "refresh": refresh}
    return "<!doctype html>" + _filled("listing.html", lines=rows, **about)


def write_sentence(sentence: str) -> str:
    """Return a page that says why there is nothing to show."""
    return "<!doctype html>" + _filled("sentence.html", title=sentence, refresh=0)


def _line(one: Listed) -> dict[str, str]:
    if one.saved is None:
        return {"name": one.name, "problem": one.problem}
    try:
        return _about_run(one.name, one.saved)
    except Exception as error:  # what one folder holds must not hide the others
        problem = f"it is damaged: {type(error).__name__}: {error}."
        return {"name": one.name, "problem": problem}


def _about_run(name: str, saved: Saved) -> dict[str, str]:
    standings, _ = words.standings_of(saved)
    last = saved.every[0].columns[saved.headline][-1]
    rounds = max(int(one.columns["round"][-1]) for one in saved.every)
    return {
        "name": name,
        "problem": "",
        "address": "/run/" + quote(name),
        "title": words.title_of(saved),
        "state": "not finished" if saved.unfinished else "finished",
        "rounds": words.amount(rounds),
        "metric": saved.headline,
        "value": words.amount(standings[0].mean if standings else last),
    }


def _filled(template: str, **values: Any) -> str:
    """Return a template with its values, below the line of the document type."""
    return f"\n{_templates().get_template(template).render(**values)}\n"


@cache
def _templates() -> Any:
    sentence = "pages are written by Jinja2: install fedbilevel[report]."
    library = needed("jinja2", sentence)
    loader, strict = library.FunctionLoader(_markup), library.StrictUndefined
    made = library.Environment(loader=loader, autoescape=True, undefined=strict)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.globals["asset"] = _asset
    shown = (words.amount, words.listed, words.mean_and_margin, words.meaning)
    made.filters.update({one.__name__: one for one in shown})
    return made


def _markup(name: str) -> str:
    """Return a template without line breaks beside tags; others become spaces."""
    text = re.sub(r"(>|[%#]})\s*\n\s*", r"\1", _asset(name).strip())
    text = re.sub(r"\s*\n\s*(<|{[%#])", r"\1", text)
    return re.sub(r"\s*\n\s*", " ", text)


@cache
def _asset(name: str) -> str:
    """Return a file of pages: a template, their style, or their program."""
    folder = resources.files("fedbilevel.report") / "templates"
    return (folder / name).read_text("utf-8")


def _policy(*digests: str) -> str:
    """Return which programs may run: Plotly and the page's own, by their digests."""
    programs = " ".join(f"'sha256-{one}'" for one in digests)
    return (
        f"default-src 'none'; script-src {programs}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


@cache
def _plotly() -> tuple[str, str]:
    """Return Plotly's program, packed as text, and its digest."""
    sentence = "reports are drawn by Plotly: install fedbilevel[report]."
    program = needed("plotly.offline", sentence).get_plotlyjs().encode()
    # Without a time in it, the same run gives the same page. The usual level takes
    # twice as long, .24 s of every run, for a tenth of the size.
    packed = gzip.compress(program, 3, mtime=0)
    return base64.b64encode(packed).decode(), _digest(program)


def _digest(program: bytes) -> str:
    return base64.b64encode(hashlib.sha256(program).digest()).decode()
