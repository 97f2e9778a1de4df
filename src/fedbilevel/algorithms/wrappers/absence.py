r"""What STORM remembers where some clients take part, and others do not.

The server sends a direction d that others have formed. A client that took part in the
last turn corrects it from its own last point v, before averaging:

    d_1 = G(w; s) + (1 - a) (d - G(v; s))

One that missed it has no such point on the averaged path. It may

    keep:     take v = w: the correction vanishes, and d remains but for a of it
    correct:  take for v where the last participants evaluated d in the mean, which
              follows from what is received: v = w + step d, each block as it was when
              the direction was formed (exact for the mean of their local steps)
    forget:   take v = w and forget as much of d as in the steps it missed: after m of
              them 1 - (1 - a)^(1 + m) takes the place of a at the first step

Where all take part the three are one. Nothing more is sent or kept.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel.algorithms.parts import Part, move, only
from fedbilevel.schedules import word

KEEP, CORRECT, FORGET = ABSENT = ("keep", "correct", "forget")


class Absent(Part):
    """The use of a received direction by a client that missed rounds."""

    absent: str = word(
        "what one that missed rounds does with the memory it receives",
        ABSENT,
        default=KEEP,
    )

    def begun(self, begin, shared, own):
        """Return the first iteration, and how many steps were missed."""
        if self.absent != FORGET or begin.memory.index is None:
            return None
        p, turn = begin.method.local_steps, begin.turn
        last = jnp.maximum(begin.memory.index, -1)
        missed = p * (jnp.asarray(turn.index, jnp.int32) - 1 - last)
        return turn.steps(p)[0], missed

    def previous(self, begin, seen, fallback):
        """Return where the last participants stood in the mean, if asked to."""
        if self.absent != CORRECT:
            return seen, fallback
        method, message = begin.method, begin.message
        t = begin.turn.steps(method.local_steps)[0]
        w = method.moving(message.point)
        steps = method.moving(method.step(jnp.maximum(t - 1, 0)))
        stood = move(w, jax.tree.map(jnp.negative, steps), message.direction)
        points = []
        for group in method.order():
            points.append(stood)
            # Those that follow were evaluated after this group had moved.
            stood = combine(only(w, group), stood)
        return seen, _tree.select(t > 0, tuple(points), fallback)

    def weights(self, state, weights, t):
        """Return the weights, at the first step of a turn those of all missed steps."""
        if state is None:
            return weights
        first, missed = state
        late = (t == first) & (missed > 0)

        def one(a: Array) -> Array:
            kept = (1 - a) ** (1 + missed).astype(a.dtype)
            return jnp.where(late, 1 - kept, a)

        return jax.tree.map(one, weights)
