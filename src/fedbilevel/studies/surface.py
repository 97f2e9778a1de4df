"""A smooth surface through what trials came to, and where it may be lower still.

A trial is noisy: two seeds of one point may be twice apart. So the value of a point is
read off a surface through all of them (a Gaussian process in the unit cube), and the
next points are those from which the most is to be expected.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

Places = Float[np.ndarray, "points size"]
_REACHES = (0.25, 0.5, 1.0)  # how far values are alike, as shares of a range
_NOISES = (0.05, 0.2, 0.6)  # of a value, by how much all of them differ
_MOST_REACHES = 3  # dimensions that have one of their own
_KNOWN = 0.75  # of the values; the others are as bad as the worst of these


def heights_of(values: Float[np.ndarray, " points"]) -> np.ndarray:
    """Return values on a scale on which they are smooth, some of them infinite.

    Those are logarithms where all are above 0, and the worst quarter are as bad as the
    best of it: how bad a bad point is says nothing of where the good ones are.
    """
    heights = np.asarray(values, float)
    finite = heights[np.isfinite(heights)]
    if not len(finite):
        return np.zeros(len(heights))
    if finite.min() > 0:
        heights, finite = np.log(heights), np.log(finite)
    bad = np.sort(heights)[min(int(_KNOWN * len(heights)), len(heights) - 1)]
    return np.minimum(heights, min(bad, finite.max()))


class Surface:
    """The likeliest of some smooth surfaces through heights; places are in a unit cube.

    It need not meet them: they are noisy.
    """

    def __init__(self, places: Places, heights: Float[np.ndarray, " points"]) -> None:
        self.places, self.middle = places, float(np.mean(heights))
        self.unit = float(np.std(heights)) or 1.0
        scaled, likeliest = (heights - self.middle) / self.unit, -math.inf
        for reaches, noise in itertools.product(_reaches(places.shape[1]), _NOISES):
            alike = _alike(places, places, reaches) + noise**2 * np.eye(len(scaled))
            root = np.linalg.cholesky(alike)
            weights = np.linalg.solve(root.T, np.linalg.solve(root, scaled))
            likelihood = -0.5 * scaled @ weights - np.sum(np.log(np.diag(root)))
            if likelihood > likeliest:
                likeliest = likelihood
                self.reaches, self.root, self.weights = reaches, root, weights

    def at(self, places: Places) -> tuple[np.ndarray, np.ndarray]:
        """Return the heights at places, and how far they may be off."""
        alike = _alike(places, self.places, self.reaches)
        known = np.sum(np.linalg.solve(self.root, alike.T) ** 2, axis=0)
        off = np.sqrt(np.maximum(1 - known, 1e-12))
        return self.middle + self.unit * (alike @ self.weights), self.unit * off


def promising(
    places: Places,
    heights: Float[np.ndarray, " points"],
    among: Places,
    count: int,
) -> list[int]:
    """Return which of some places to try next, the most promising first.

    That is where the expected gain over the lowest is largest. Once chosen, a place
    counts as tried, with the height that the surface has there.
    """
    chosen: list[int] = []
    for _ in range(count):
        surface = Surface(places, heights)
        expected, off = surface.at(among)
        below = (surface.at(places)[0].min() - expected) / off
        gain = off * (below * _normal(below) + _bell(below))
        gain[chosen] = -1
        best = int(np.argmax(gain))
        chosen.append(best)
        places = np.vstack([places, among[best]])
        heights = np.append(heights, expected[best])
    return chosen


def _reaches(size: int) -> Iterator[np.ndarray]:
    """Return the reaches to choose from; many dimensions share one."""
    if size > _MOST_REACHES:
        return (np.full(size, reach) for reach in _REACHES)
    return map(np.asarray, itertools.product(_REACHES, repeat=size))


def _alike(one: Places, other: Places, reaches: np.ndarray) -> np.ndarray:
    """Return how alike values are at two places each: Matern's function, 5/2.

    Smooth enough to be followed, rough enough for the edge where runs diverge.
    """
    apart = math.sqrt(5) * np.linalg.norm(
        (one[:, None] - other[None]) / reaches, axis=-1
    )
    return (1 + apart + apart**2 / 3) * np.exp(-apart)


def _normal(value: np.ndarray) -> np.ndarray:
    """Return the share of a normal distribution below a value."""
    return 0.5 * (1 + np.asarray([math.erf(one / math.sqrt(2)) for one in value]))


def _bell(value: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * value**2) / math.sqrt(2 * math.pi)
