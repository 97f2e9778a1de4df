"""The server's state, which metrics may see beside the point."""

import inspect

import equinox as eqx
from jaxtyping import PyTree

from fedbilevel._types import AbstractBlocks, Metrics


class ServerSeen(eqx.Module):
    """The part of the server's state that metrics may see.

    `state` is what it carries, wrappers outermost, and `blocks` all that moves, x, y
    and, in a `Triple`, z, where the method has them as a point.
    """

    state: PyTree
    blocks: AbstractBlocks | None


def sees_server(metrics: Metrics) -> bool:
    """Say whether metrics ask for the server's state, by a parameter of that name."""
    return "server" in inspect.signature(metrics).parameters
