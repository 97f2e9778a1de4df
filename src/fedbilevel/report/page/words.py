"""What a page says of numbers and of a folder's results, in words."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedbilevel.report.comparison import Standing, default_target, ranking
from fedbilevel.report.tables import show
from fedbilevel.result import Result
from fedbilevel.saved import Saved


def title_of(saved: Saved) -> str:
    """Return what the page is about, in a line."""
    task = saved.every[0].task
    if not saved.compared:
        return f"{next(iter(saved.results))} on {task}"
    count = len(saved.results)
    return f"{count} algorithm{'s' * (count > 1)} compared on {task}"


def standings_of(saved: Saved) -> tuple[list[Standing], float | None]:
    """Return the ranking and the target that its costs are about."""
    if not saved.compared:
        return [], saved.target
    target = saved.target
    if target is None:
        target = default_target(saved.results, saved.headline)
    return ranking(saved.results, saved.headline, target), target


def lowest(values: np.ndarray) -> int | None:
    """Return where values are lowest, unless that is at their end or nowhere."""
    if not np.isfinite(values).any():
        return None
    best = int(np.nanargmin(values))
    return best if values[best] < values[-1] else None


def still(saved: Saved) -> list[str]:
    """Return who sent nothing; what was not counted is not nothing."""
    return [name for name, many in saved.results.items() if not _traffic(many)]


def _traffic(many: Sequence[Result]) -> float:
    return max(float(one.columns.get("bytes", np.ones(1))[-1]) for one in many)


def mean_and_spread(one: Standing) -> str:
    """Return a mean with the deviation over seeds, if there are several."""
    if one.seeds < 2:
        return amount(one.mean)
    return f"{amount(one.mean)} \u00b1 {one.spread:.2g}"


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence has them: a, b and c."""
    *rest, last = names
    return " and ".join(filter(None, [", ".join(rest), last]))


def amount(value: Any) -> str:
    """Write a number with four digits, whole numbers with their thousands."""
    if value is None or isinstance(value, str):
        return show(value)
    number = float(value)
    if not np.isfinite(number):
        return str(number)
    if number.is_integer() or abs(number) >= 10_000:
        return f"{number:,.0f}"
    return f"{number:.4g}"
