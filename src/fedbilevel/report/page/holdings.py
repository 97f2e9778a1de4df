"""Rows by site: rows and classes of every site, and the preparation of columns.

Reads the summary of the data that a run records, as far as it is there.
"""

from collections.abc import Mapping
from typing import Any

from fedbilevel.report.page.figures import bars
from fedbilevel.report.page.pictures import Picture, is_number
from fedbilevel.report.page.sections import Grid
from fedbilevel.report.page.words import amount, short
from fedbilevel.saved import Saved

_HEADING = "Rows by site"
_SIZES = ("training", "validation")
_DONE = {
    "label": "is predicted",
    "encoded": "a feature for each of its values",
    "left_out": "left out",
    "filled": "missing values filled in",
}


def who_holds_what(saved: Saved) -> Picture:
    """Return the rows and classes of every site, as far as the run recorded them."""
    config = saved.every[0].config
    given = config.get("data")
    about = given if isinstance(given, dict) else {}
    sites = _sites(about.get("sites"))
    if sites:
        return _holdings(sites, about)
    clients = config.get("clients")
    text = "The run recorded nothing about the rows of its sites."
    if is_number(clients):
        text = f"{clients} sites. The run did not record how many rows each one has."
    return Picture(_HEADING, f"{text}{_remarks(about)}")


def _holdings(
    sites: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]
) -> Picture:
    every = list(sites.values())
    classes = list(dict.fromkeys(name for one in every for name in one["classes"]))
    sizes = [name for name in _SIZES if all(is_number(one[name]) for one in every)]
    rows = [
        (
            short(site),
            amount(one["rows"]),
            *(amount(one[name]) for name in sizes),
            *(amount(one["classes"].get(name, 0)) for name in classes),
        )
        for site, one in sites.items()
    ]
    series = {n: [one["classes"].get(n, 0) for one in every] for n in classes}
    if not classes:
        series = {"rows": [one["rows"] for one in every]}
    headings = ("site", "rows", *sizes, *classes)
    grids = [Grid("Rows of every site", headings, rows)]
    done = _done(about)
    if done:
        grids.append(Grid("Columns", ("column", "what was done"), done))
    labels = [short(site) for site in sites]
    drawn = bars("holdings", labels, series, "rows", stacked_up=True)
    return Picture(_HEADING, _text(every, about), grids, drawn)


def _text(sites: list[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    text = f"{len(sites)} sites hold {amount(sum(s['rows'] for s in sites))} rows"
    if isinstance(about.get("source"), str):
        text += f" of {short(about['source'])}"
    text += "."
    if is_number(about.get("tested")):
        text += f" {amount(about['tested'])} more rows are held out for tests."
    if is_number(about.get("dropped_rows")) and about["dropped_rows"]:
        text += f" {amount(about['dropped_rows'])} rows were dropped."
    return f"{text}{_remarks(about)}"


def _remarks(about: Mapping[str, Any]) -> str:
    """Return what else was recorded, a sentence each."""
    given = about.get("remarks")
    listed = given if isinstance(given, list) else ()
    texts = [str(one).rstrip(".") for one in listed]
    return "".join(f" {one[:1].upper()}{one[1:]}." for one in texts)


def _done(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was done to columns that are not plain numbers."""
    rows = []
    for kind, words in _DONE.items():
        held = about.get(kind)
        if isinstance(held, str):
            rows.append((short(held), words))
        for name, more in held.items() if isinstance(held, dict) else ():
            detail = ", ".join(map(str, more)) if isinstance(more, list) else str(more)
            rows.append((short(str(name)), f"{words}: {short(detail)}"))
    return rows


def _sites(given: Any) -> dict[str, dict[str, Any]]:
    """Return rows and classes by name of the site, if they are there."""
    listed = given if isinstance(given, list) else []
    return {
        str(one.get("name", f"site {place}")): _site(one)
        for place, one in enumerate(listed)
        if isinstance(one, dict)
    }


def _site(one: Mapping[str, Any]) -> dict[str, Any]:
    held = one.get("classes")
    classes = held.items() if isinstance(held, dict) else ()
    counts = {str(name): count for name, count in classes if is_number(count)}
    sizes = {name: one.get(name) for name in _SIZES}
    known = [size for size in sizes.values() if is_number(size)]
    rows = one.get("rows")
    rows = rows if is_number(rows) else sum(known or counts.values())
    return {"classes": counts, **sizes, "rows": rows}
