r"""Recursive (SPIDER, SARAH) directions, and when they are formed anew.

    d_t = mean of B samples of G(w_t; s)                 in some iterations
    d_t = d_{t-1} + G(w_t; s_t) - G(w_{t-1}; s_t)        in all others

A round begins with a large batch. A `Repeat` of differences follows: as many as a
period has left (SPIDER), or until a coin ends it (PAGE).
"""

from collections.abc import Callable
from typing import Any

from fedbilevel import _tree
from fedbilevel.algorithms.base import Phase
from fedbilevel.algorithms.directions import with_z
from fedbilevel.algorithms.one_machine._path import (
    Draw,
    Path,
    WithZ,
    all_directions,
    differences,
    sampled,
    stepped,
)


def recursive_start(point: Any) -> Path:
    """Return a path without directions; the first round forms them."""
    return Path(point, previous=point, direction=_tree.zeros_like(point))


def recursive_phases(
    draw: Draw, along: Callable[[Path, Any], Path], large_batch: int
) -> tuple[Phase, Phase]:
    """Return the iteration with a large batch, and one that corrects d."""

    def corrected(server: Path, change: Any) -> Path:
        return along(server, _tree.add(server.direction, change))

    return (
        sampled("large", draw, along, large_batch),
        differences("step", draw, corrected),
    )


class RecursiveWithZ(WithZ):
    """Recursive directions of x, y and z, and steps along them."""

    def init_server(self, x, y):
        """Start at (x, y, 0); directions are formed at t = 0."""
        return recursive_start(with_z(x, y))

    def exchanges(self) -> tuple[Phase, Phase]:
        """Return the iteration with a large batch, and one that corrects d."""
        return recursive_phases(all_directions, self.along, self.large_batch)

    def along(self, server: Path, d: Any) -> Path:
        """Move x, y and z along d."""
        w = stepped(server.point, self.step(0), d)
        return Path(w, previous=server.point, direction=d)
