r"""BiAdam: moving averages on both levels, and steps scaled by their second moments.

At every iteration, from the old point, with weights alpha and beta (1 at t = 0):

    u <- (1 - alpha) u + alpha h(x, y; b),      v <- (1 - beta) v + beta gy(x, y; zeta)
    form=code:   a <- tau a + (1 - tau) u^2,    b <- tau b + (1 - tau) v^2
                 A = sqrt(a + small),           B = sqrt(b + small)
    form=paper:  a <- tau a + (1 - tau) u^2,    b <- tau b + (1 - tau) ||v||
                 A = sqrt(a) + small,           B = b + small
    x <- x - lr_x a_t u / A,   y <- y - lr_y a_t v / B

a has an entry for every coordinate, and so has b in the code. a_t is any schedule. The
paper's x <- x + eta_t (x_tmp - x) is such a step, with eta_t in a_t. `corrected=True`
takes STORM in place of the averages: that is VR-BiAdam
(`fedbilevel.algorithms.presets`). With tau = 1, start = 1 and small = 0 moments stay at
1, and the method is SMB (MRBO).

On K clients directions are averaged at every iteration, each client inverting its own
Hessian: right only for clients that are alike. 1 exchange an iteration, with dx + dy
floats each way. Moments stay on the server.

Reference: Huang, Li, Huang, arXiv 2106.11396.
Deviations: of the paper the abstract was read, and form=paper is from memory. form=code
is as in a program that is presumably by a co-author. There weights are constant, and
moments are those of the averaged directions. They start at 0 without a correction of
their bias, so the first steps are large.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel.algorithms import Number, Pair, ServerTurn
from fedbilevel.algorithms.one_machine import _path
from fedbilevel.schedules import (
    Schedule,
    choice,
    count,
    number,
    schedule,
    step,
    weight,
    word,
)

__all__ = ["BiAdam"]

CODE, PAPER = FORMS = ("code", "paper")


class BiAdam(_path.ByBundle):
    """Moving averages on both levels, with adaptive steps."""

    reference = "Huang, Li, Huang 2021, arXiv 2106.11396"
    provenance = "abstract and a co-author's program read, presumably"
    allows_private = False

    lr_x: Number = step("upper", "x moves by lr_x a u / A", over="a")
    lr_y: Number = step("lower", "y moves by lr_y a v / B", over="a")
    alpha: Number = weight("upper", "u forgets by alpha a step")
    beta: Number = weight("lower", "v forgets by beta a step")
    a: Schedule = schedule("common shape of the steps over t", default=1.0)
    tau: Number = number("what second moments keep in a step", default=0.99)
    small: Number = number("what is added to second moments", default=1e-6)
    start: Number = number("what second moments start at", default=0.0)
    form: str = word("how steps are scaled", FORMS, default=CODE, kw_only=True)
    corrected: bool = choice("correct directions by STORM", default=False, kw_only=True)
    local_steps: int = count(_path.ITERATIONS, default=1, kw_only=True)

    def init_server(self, x, y):
        """Start at (x, y); directions are formed at t = 0."""

        def filled(leaf: Array) -> Array:
            return jnp.full_like(leaf, self.start.astype(leaf.dtype))

        w = Pair(x, y)
        squares = jax.tree.map(filled, w)
        if self.form == PAPER:
            squares = Pair(squares.x, filled(_tree.norm(y)))
        previous = w if self.corrected else None
        return _path.Path(w, previous, _tree.zeros_like(w), squares)

    def phases(self):
        """Return the iterations of a round."""
        if not self.corrected:
            return super().phases()
        return self.repeated(
            _path.recursive("step", self.draw, self.adapted, self.kept)
        )

    def taken(self, server: _path.Path, D: Pair, turn: ServerTurn) -> _path.Path:
        """Average directions, and move along them."""
        kept = self.kept(turn.index)
        taken = jax.tree.map(lambda keep: 1 - keep, kept)
        D = jax.tree.map(_tree.scale, taken, D)
        held = jax.tree.map(_tree.scale, kept, server.direction)
        return self.adapted(server, _tree.add(held, D), turn)

    def adapted(self, server: _path.Path, d: Pair, turn: ServerTurn) -> _path.Path:
        """Form second moments, and move along the quotients."""
        squares = self.second_moments(server.squares, d)
        w = _path.stepped(server.point, self.step(turn.index), self.scaled(d, squares))
        return _path.Path(w, server.point if self.corrected else None, d, squares)

    def second_moments(self, squares: Pair, d: Pair) -> Pair:
        """Return a and b after directions d."""

        def renewed(held: Array, new: Array) -> Array:
            tau = self.tau.astype(held.dtype)
            return tau * held + (1 - tau) * new

        new = jax.tree.map(jnp.square, d)
        if self.form == PAPER:
            new = Pair(new.x, _tree.norm(d.y))
        return jax.tree.map(renewed, squares, new)

    def scaled(self, d: Pair, squares: Pair) -> Pair:
        """Return u / A and v / B."""

        def by_root(leaf: Array, moment: Array) -> Array:
            small = self.small.astype(leaf.dtype)
            if self.form == CODE:
                return leaf / jnp.sqrt(moment + small)
            return leaf / (jnp.sqrt(moment) + small)

        if self.form == CODE:
            return jax.tree.map(by_root, d, squares)
        B = squares.y + self.small.astype(squares.y.dtype)
        return Pair(jax.tree.map(by_root, d.x, squares.x), _tree.scale(1 / B, d.y))
