r"""Parts of methods of one level: local steps on y at the given x, which stays.

    y_k = y;  p times:  y_k <- y_k - lr gy_k(x, y_k; zeta)

A client sends y_k back, and never x.
"""

from typing import Any

from fedbilevel._types import Key, Lower, Number, Pair
from fedbilevel.algorithms._base import Turn
from fedbilevel.algorithms._local import Iterate, local_steps, move
from fedbilevel.channels import PLAIN, Channel, Quantize
from fedbilevel.problem import Oracle

__all__ = ["descended", "quantized", "without_x"]


def descended(
    message: Iterate, lr: Number, oracle: Oracle, turn: Turn, count: int
) -> Iterate:
    """Return what `count` local steps on y lead to, as it is sent back."""
    x = message.point.x

    def iterate(y: Lower, time: tuple[Any, Key]) -> Lower:
        _, key = time
        return move(y, lr, oracle.lower_gradient(x, y, oracle.draw_lower(key)))

    y = local_steps(iterate, message.point.y, turn, count)
    return Iterate(Pair(None, y))


def without_x(sent: Any) -> Iterate:
    """Return what both sides know of a reply: the y that was sent."""
    return Iterate(Pair(None, sent.point.y))


def quantized(bits: int) -> Channel:
    """Return the channel of a method that rounds its replies, or does not with 0."""
    return Channel((Quantize(bits),)) if bits else PLAIN
