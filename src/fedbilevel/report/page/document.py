"""Pages: a run or a comparison in one file, and the list of the runs of a folder.

The markup and the sentences are in `templates`, which Jinja2 fills in: it escapes
whatever comes from files. Should that ever fail, the policy of a page lets no other
program run. Plotly's program is packed, or a page would have five megabytes.
"""

import base64
import gzip
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

import numpy as np

from fedbilevel.errors import needed
from fedbilevel.report.drawing import axes_of, cost_scale, mean_costs, value_scale
from fedbilevel.report.page import sections
from fedbilevel.report.page.pictures import pictures_of
from fedbilevel.report.page.sites import quality_pictures, who_holds_what
from fedbilevel.result import to_plain
from fedbilevel.saved import Saved
from fedbilevel.standings import FEWEST, sample_bound, t_quantile

MARK = "<!doctype html><!-- a report of fedbilevel -->"
_COSTS = {"round", "exchanges", "bytes", "samples"}
# Of all columns and seeds together: with ten characters each, two megabytes.
_MOST_NUMBERS = 200_000
_UNWRITABLE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def write_page(saved: Saved, command: str | None = None, *, refresh: int = 0) -> str:
    """Return the page of a run or a comparison.

    `command` is what repeats it. With `refresh` a browser asks again after so many
    seconds, while a run is not finished.
    """
    standings, target = sections.standings_of(saved)
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
        title=sections.title_of(saved),
        refresh=refresh,
        policy=_policy(digest, _digest(_asset("page.js").encode())),
        saved=saved,
        standings=standings,
        target=target,
        lowest=sections.lowest(saved.every[0].columns[saved.headline]),
        still=sections.still(saved),
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


def curves_of(saved: Saved, target: float | None) -> dict[str, Any]:
    """Return what the curves of a page are drawn from."""
    every = saved.every
    axes = axes_of(every)
    numbers = sum(column.size for one in every for column in one.columns.values())
    step = math.ceil(numbers / _MOST_NUMBERS)
    shared = [n for n in every[0].columns if all(n in one.columns for one in every)]
    metrics = sorted(set(shared) - _COSTS)
    return {
        "headline": saved.headline,
        "target": target,
        "bound": sample_bound(every),
        "step": step,
        "axes": {
            axis: cost_scale([mean_costs(m, axis)[-1] for m in saved.results.values()])
            for axis in axes
        },
        "metrics": {
            name: value_scale(name, np.concatenate([o.from_start[name] for o in every]))
            for name in metrics
        },
        # Times the deviation of seeds: half of an interval.
        "intervals": {
            name: t_quantile(len(many) - 1) / len(many) ** 0.5
            for name, many in saved.results.items()
            if len(many) >= FEWEST
        },
        "runs": [
            {
                "name": name,
                "seed": result.config.get("seed"),
                "seconds": float(result.seconds["run"]),
                "columns": {n: thinned(c, step) for n, c in result.from_start.items()},
            }
            for name, many in saved.results.items()
            for result in many
        ],
    }


def thinned(column: np.ndarray, step: int) -> list[Any]:
    """Return one of every `step` numbers, the last among them.

    They have as many digits as distinguish them in their precision. What JSON cannot
    write is text that JavaScript reads as a number.
    """
    some = column[::-1][::step][::-1]
    if some.dtype.kind != "f":
        return [int(value) for value in some]
    return [_UNWRITABLE.get(text) or float(text) for text in map(str, some)]


def write_listing(title: str, runs: Mapping[str, Saved | str], refresh: int) -> str:
    """Return the list of runs, each as it was read, or why it cannot be.

    A browser asks again after `refresh` seconds.
    """
    rows = [_line(name, saved) for name, saved in runs.items()]
    about = {"title": f"Runs in {title}", "refresh": refresh}
    return "<!doctype html>" + _filled("listing.html", lines=rows, **about)


def write_sentence(sentence: str) -> str:
    """Return a page that says why there is nothing to show."""
    return "<!doctype html>" + _filled("sentence.html", title=sentence, refresh=0)


def _line(name: str, saved: Saved | str) -> dict[str, str]:
    if isinstance(saved, str):
        return {"name": name, "problem": saved}
    try:
        return _about_run(name, saved)
    except Exception as error:  # what one folder holds must not hide the others
        problem = f"it is damaged: {type(error).__name__}: {error}."
        return {"name": name, "problem": problem}


def _about_run(name: str, saved: Saved) -> dict[str, str]:
    standings, _ = sections.standings_of(saved)
    last = saved.every[0].columns[saved.headline][-1]
    rounds = max(int(one.columns["round"][-1]) for one in saved.every)
    return {
        "name": name,
        "problem": "",
        "address": "/run/" + quote(name),
        "title": sections.title_of(saved),
        "state": "not finished" if saved.unfinished else "finished",
        "rounds": sections.amount(rounds),
        "metric": saved.headline,
        "value": sections.amount(standings[0].mean if standings else last),
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
    shown = (
        sections.amount,
        sections.listed,
        sections.mean_and_margin,
        sections.meaning,
    )
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
