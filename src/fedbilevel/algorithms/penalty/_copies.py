r"""A hypergradient from gradients alone: copies of y under different penalties.

With y_j = argmin_y j nu f(x, y) + g(x, y) the derivative of min_y (j nu f + g) in x is
j nu fx(x, y_j) + gx(x, y_j). As a function of s = j nu its slope at s = 0 is grad Phi,
so that differences between some j approximate grad Phi:

    h(x) = sum_j a_j (j fx(x, y_j) + gx(x, y_j) / nu),    bias O(nu^degree)

    degree 1:  j = 0, 1           a = -1, 1                     lam = 1/nu is a penalty
    degree 2:  j = 1, -1          a = 1/2, -1/2
    degree 3:  j = 0, 1, 2, -1    a = -1/2, 1, -1/6, -1/3
    degree 4:  j = 1, -1, 2, -2   a = 2/3, -2/3, -1/12, 1/12

Copy j follows the slope j nu fy + gy: scaled by nu, all copies take steps of one
length, and only h knows how large 1/nu is. One lower sample serves all copies, so that
the noise of a difference is as small as the difference, which 1/nu multiplies.

Everything is linear in the losses of clients: no inverse is averaged, and the mean over
clients that differ is right. Copies with j < 0 have a minimum only where g curves more
than -j nu f, which `check_balance` looks at before a run.
"""

from functools import reduce
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import AbstractBlocks, Lower, Pair, Upper
from fedbilevel.algorithms.base import Balance
from fedbilevel.algorithms.parts import Stepping
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import is_known

BEGINNINGS = OWN, SIDES, ONE = "own", "sides", "one"

NU = "weight of f in the lower level; 1/nu is the penalty"
_ROUNDING = 1e-3  # of a curvature, which differences of gradients leave


class Copies(AbstractBlocks):
    """A point with two or four copies of y, in the order of a scheme."""

    x: Any
    y: Any
    z: Any
    third: Any = None
    fourth: Any = None


class Scheme(NamedTuple):
    """A difference: where the copies are, how h weighs them, and what y is at s = 0."""

    degree: int
    offsets: tuple[int, ...]
    weights: tuple[float, ...]
    at_zero: tuple[float, ...]

    @property
    def subtracted(self) -> int:
        """The largest multiple of nu f that is taken from g, p/2 for an even degree."""
        return max(0, *(-j for j in self.offsets))

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks of the copies."""
        return ("y", "z", "third", "fourth")[: len(self.offsets)]

    def copies(self, x: Any, y: Any) -> Copies:
        """Return one thing for x and another one for each copy."""
        return Copies(x, *(y for _ in self.offsets))

    def of(self, w: Copies) -> tuple[Lower, ...]:
        """Return the copies of y."""
        return (w.y, w.z, w.third, w.fourth)[: len(self.offsets)]

    def point(self, w: Copies) -> Pair:
        """Return x, and y without a penalty: y_0, or a combination of the copies."""
        every = zip(self.at_zero, self.of(w), strict=True)
        parts = [_tree.scale(weight, copy) for weight, copy in every if weight]
        return Pair(w.x, reduce(_tree.add, parts))

    def begun(self, w: Copies, begin: str) -> Copies:
        """Return w with the copies where a loop on them begins."""
        every = dict(zip(self.offsets, self.of(w), strict=True))
        if begin == ONE:
            return self.copies(w.x, every[1])

        def side(positive: bool) -> Lower:
            near = [y for j, y in every.items() if (j > 0) == positive]
            return _tree.scale(1 / len(near), reduce(_tree.add, near))

        return Copies(w.x, *(side(j > 0) for j in self.offsets))

    def slopes(self, oracle: Oracle, nu: Array, xi: Batch, zeta: Batch) -> Copies:
        """Return the maps w -> j nu fy(x, y_j; xi) + gy(x, y_j; zeta), none for x."""

        def slope(place: int, j: int) -> Any:
            def at(w: Copies) -> Lower:
                y = self.of(w)[place]
                gy = oracle.lower_gradient(w.x, y, zeta)
                if j == 0:
                    return gy
                _, fy = oracle.upper_gradients(w.x, y, xi)
                return _tree.add_scaled(gy, j * nu, fy)

            return at

        return Copies(None, *(slope(*one) for one in enumerate(self.offsets)))

    def slope_of_x(self, oracle: Oracle, nu: Array, xi: Batch, zeta: Batch) -> Copies:
        """Return the map w -> h, one sample for all copies; none for the copies."""

        def h(w: Copies) -> Upper:
            above: Any = _tree.zeros_like(w.x)
            below = above
            for j, a, y in zip(self.offsets, self.weights, self.of(w), strict=True):
                gx, _ = oracle.lower_gradients(w.x, y, zeta)
                below = _tree.add_scaled(below, a, gx)
                if j != 0:
                    fx, _ = oracle.upper_gradients(w.x, y, xi)
                    above = _tree.add_scaled(above, a * j, fx)
            return _tree.add_scaled(above, 1 / nu, below)

        return Copies(h, *(None for _ in self.offsets))


_SCHEMES = (
    Scheme(1, (0, 1), (-1, 1), (1, 0)),
    Scheme(2, (1, -1), (1 / 2, -1 / 2), (1 / 2, 1 / 2)),
    Scheme(3, (0, 1, 2, -1), (-1 / 2, 1, -1 / 6, -1 / 3), (1, 0, 0, 0)),
    Scheme(
        4,
        (1, -1, 2, -2),
        (2 / 3, -2 / 3, -1 / 12, 1 / 12),
        (2 / 3, 2 / 3, -1 / 6, -1 / 6),
    ),
)


class Copied(Stepping):
    """A method with two copies of y, or more, in the place of y."""

    scheme: ClassVar[Scheme] = _SCHEMES[0]  # of degree 1

    def variables(self, x: Upper, y: Lower) -> Copies:
        """Start with all copies at y."""
        return self.scheme.copies(x, y)

    def of_blocks(self, found: dict[str, Any]) -> Copies:
        """Return what was found for x, and for each copy what was found for y."""
        return self.scheme.copies(found["x"], found["y"])

    def point(self, server: Any) -> Pair:
        """Return x and y_0, or what follows for it from the copies."""
        return self.scheme.point(server.point)


class OfDegree(Copied):
    """A method whose copies of y make a difference of a `degree`."""

    def __check_init__(self) -> None:
        if self.degree not in range(1, len(_SCHEMES) + 1):
            raise InvalidInputError(
                f"`{type(self).__name__}(degree=...)` is one of 1, 2, 3, 4, got "
                f"{self.degree}."
            )

    @property
    def scheme(self) -> Scheme:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The scheme of the degree."""
        return _SCHEMES[self.degree - 1]

    def nu_at(self, t: Any) -> Array:
        """Return nu in iteration t."""
        return self.nu

    def watched(self, server: Any) -> tuple[Pair, ...]:
        """Return all copies: what is reported may stand still between two of them."""
        return tuple(Pair(None, one) for one in self.scheme.of(server.point))

    def check_balance(self, curvatures: Balance) -> None:
        """Raise if a copy with j < 0 has no minimum: f curves too much against g.

        Where g alone falls away by more than f would take, as that of a network may at
        its start, it is no valley to begin with, and nothing about nu follows from it.
        """
        nu, times = self.nu_at(0), self.scheme.subtracted
        if times == 0 or not is_known(nu):
            return
        factor = times * float(nu)
        above, below = curvatures(factor)
        is_valley = below >= -factor * above
        if below > (1 - _ROUNDING) * factor * above or not is_valley:
            return
        smaller = f"nu below {below / (times * above):.2g}, or " if below > 0 else ""
        raise InvalidInputError(
            f"`{self.title}(nu={float(nu):.4g}, degree={self.degree})` needs a "
            f"minimum of g - {factor:.4g} f in y, but at the start f curves by L_f = "
            f"{above:.4g} where g curves by {below:.4g} only. Use {smaller}degree 1 "
            "(fed-f2sa or f2sa), which takes nothing from g."
        )
