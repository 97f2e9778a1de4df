"""Sites in pictures: how good the model is for each, and the rows that each has.

Rows and columns are those of the summary of the data that a run records, as far as it
is there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.evaluation.assessment import MEANINGS, title, with_interval
from fedbilevel.report.page.pictures import MOST_BARS, Picture, bars, is_number
from fedbilevel.report.page.sections import Grid, amount, short
from fedbilevel.report.tables import measured
from fedbilevel.saved import Saved

_KINDS = {"shared": "shared model", "alone": "site alone"}
_HEADING = "Rows by site"
_SIZES = ("training", "validation")
_DONE = {
    "label": "is predicted",
    "encoded": "a feature for each of its values",
    "left_out": "left out",
    "filled": "missing values filled in",
}


def quality_pictures(saved: Saved) -> list[Picture]:
    """Return the pictures of how good a model is, where the run measured it."""
    quality = saved.every[0].quality
    if saved.compared or not quality:
        return []
    made = [_quality_of_sites(quality), _models(quality), _calibration(quality)]
    return [one for one in made if one is not None]


def _quality_of_sites(quality: Mapping[str, Any]) -> Picture | None:
    """Return the shared model against each site alone, on the site's tested rows."""
    main = quality["metric"]
    sites = sorted(quality["sites"], key=lambda one: -one["held"])
    kinds = {k: n for k, n in _KINDS.items() if any(k in s["metrics"] for s in sites)}
    if not sites:
        return None
    found = {
        name: [one["metrics"].get(kind, {}).get(main) for one in sites]
        for kind, name in kinds.items()
    }
    rows = [
        (
            short(one["name"]),
            amount(one["held"]),
            amount(one["rows"]),
            *map(measured, each),
        )
        for one, *each in zip(sites, *found.values(), strict=True)
    ]
    notes = [f"{one['name']} alone is {one['note']}." for one in sites if one["note"]]
    cut = ""
    if len(sites) > MOST_BARS:
        cut = f" Of {len(sites)} sites the {MOST_BARS} largest are drawn."
    headings = ("site", "own rows", "tested rows", *kinds.values())
    return Picture(
        "Is every site better off?",
        f"The {title(main)} on the tested rows of each site: the shorter the bar, the "
        "better. A site alone fits a linear model to its own rows only. The thin lines "
        f"are 95 % intervals. Few tested rows make them long.{cut} {' '.join(notes)}",
        [Grid(f"{title(main)} of every site", headings, rows)],
        _judged_bars(
            "quality-sites",
            [
                f"{short(one['name'])} ({amount(one['rows'])} tested rows)"
                for one in sites
            ],
            found,
            title(main),
        ),
    )


def _models(quality: Mapping[str, Any]) -> Picture:
    """Return all models on all tested rows, with all metrics in the table."""
    main, models = quality["metric"], quality["models"]
    names = list(models[0]["metrics"])
    rows = [
        (short(one["name"]), *(measured(one["metrics"][name]) for name in names))
        for one in models
    ]
    headings = ("model", *(title(name) for name in names))
    meanings = [(title(name), MEANINGS.get(name, "")) for name in names]
    return Picture(
        "Against what else there is",
        f"The {title(main)} of every model on the same {amount(quality['rows'])} "
        "tested rows of all sites: the shorter the bar, the better. It is "
        f"{MEANINGS.get(main, title(main))}.",
        [
            Grid("All metrics, with 95 % intervals", headings, rows),
            Grid("Meaning of the metrics", ("metric", "meaning"), meanings),
        ],
        _judged_bars(
            "quality-models",
            [short(one["name"]) for one in models],
            {"all tested rows": [one["metrics"][main] for one in models]},
            title(main),
        ),
    )


def _judged_bars(
    identity: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[Sequence[float] | None]],
    axis: str,
) -> dict[str, Any]:
    """Return bars with their intervals; what is undefined has none."""
    held = {
        name: [one or (float("nan"),) * 3 for one in many[:MOST_BARS]]
        for name, many in series.items()
    }
    values = {name: [one[0] for one in many] for name, many in held.items()}
    made = bars(identity, labels[:MOST_BARS], values, f"{axis} (lower is better)")
    intervals = {name: [list(one[1:]) for one in many] for name, many in held.items()}
    return {**made, "intervals": intervals}


def _calibration(quality: Mapping[str, Any]) -> Picture | None:
    """Return how often what was predicted with some chance was the case."""
    curve = quality["calibration"]
    if not curve:
        return None
    whose = "its class" if curve["class"] is None else f"'{short(curve['class'])}'"
    bins = curve["bins"]
    rows = [
        (
            f"{one['predicted']:.1%}",
            with_interval(
                (100 * one["observed"], *(100 * end for end in one["interval"]))
            ),
            amount(one["rows"]),
        )
        for one in bins
    ]
    grid = Grid("Chances", ("predicted, mean", "observed, in percent", "rows"), rows)
    drawn = {"id": "calibration", "points": bins, "axis": f"chance of {whose}"}
    return Picture(
        "Can its probabilities be believed?",
        f"Tested rows in {len(bins)} parts, by the chance of {whose} that the model "
        "predicts. Where a point is on the dotted line, it was the case as often as "
        "predicted, above it more often, below it less often. The thin lines are 95 % "
        "intervals.",
        [grid],
        drawn,
    )


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
