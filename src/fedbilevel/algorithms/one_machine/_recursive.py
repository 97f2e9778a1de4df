r"""Recursive (SPIDER, SARAH) directions, and when they are formed anew.

    d_t = mean of B samples of G(w_t; s)                 in some iterations
    d_t = d_{t-1} + G(w_t; s_t) - G(w_{t-1}; s_t)        in all others

A round begins with a large batch. What follows is a `Repeat` of differences: as many as
a period has left (SPIDER), or until a coin ends it (PAGE).
"""

from collections.abc import Callable
from typing import Any

from fedbilevel import _tree
from fedbilevel.algorithms.base import Phase
from fedbilevel.algorithms.one_machine._path import Draw, Path, differences, sampled


def recursive_start(point: Any) -> Path:
    """Return a path without directions; the first round forms them."""
    return Path(point, previous=point, direction=_tree.zeros_like(point))


def recursive_phases(
    draw: Draw, move: Callable[[Any, Any], Any], large_batch: int
) -> tuple[Phase, Phase]:
    """Return the iteration with a large batch, and one that corrects d."""

    def along(server: Path, d: Any) -> Path:
        return Path(move(server.point, d), previous=server.point, direction=d)

    def corrected(server: Path, change: Any) -> Path:
        return along(server, _tree.add(server.direction, change))

    return (
        sampled("large", draw, along, large_batch),
        differences("step", draw, corrected),
    )
