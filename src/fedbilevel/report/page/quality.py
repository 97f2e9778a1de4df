"""How good the model is, in pictures: site by site, against others, and its chances."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedbilevel.evaluation.words import MEANINGS, title, with_interval
from fedbilevel.report.page.figures import bars
from fedbilevel.report.page.pictures import MOST_BARS, Picture
from fedbilevel.report.page.sections import Grid
from fedbilevel.report.page.words import amount, short
from fedbilevel.report.tables import measured
from fedbilevel.saved import Saved

_KINDS = {"shared": "shared model", "alone": "site alone"}


def quality_pictures(saved: Saved) -> list[Picture]:
    """Return the pictures of how good a model is, where the run measured it."""
    quality = saved.every[0].quality
    if saved.compared or not quality:
        return []
    made = [_sites(quality), _models(quality), _calibration(quality)]
    return [one for one in made if one is not None]


def _sites(quality: Mapping[str, Any]) -> Picture | None:
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
        _bars(
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
        _bars(
            "quality-models",
            [short(one["name"]) for one in models],
            {"all tested rows": [one["metrics"][main] for one in models]},
            title(main),
        ),
    )


def _bars(
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
