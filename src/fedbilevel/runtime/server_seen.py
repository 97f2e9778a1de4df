"""The server's state, which metrics may see beside the point."""

import inspect

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from fedbilevel._types import AbstractBlocks, Metrics
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.wrappers.base import Inside
from fedbilevel.algorithms.wrappers.measured_steps.steps import Steady


class ServerSeen(eqx.Module):
    """The part of the server's state that metrics may see.

    `state` is what it carries, wrappers outermost, and `blocks` all that moves, x, y
    and, in a `Triple`, z, where the method has them as a point. `curvature` is that of
    the lower level, L1, where the run measures it: with `auto` steps of y and z.
    """

    state: PyTree
    blocks: AbstractBlocks | None
    curvature: Float[Array, ""] | None

    @staticmethod
    def of(algorithm: AbstractAlgorithm, state: PyTree) -> "ServerSeen":
        """Return what is seen of a method's state."""
        return ServerSeen(state, algorithm.blocks(state), _measured_curvature(state))


def _measured_curvature(state: PyTree) -> Array | None:
    while isinstance(state, Inside):
        if isinstance(state, Steady):
            return state.curvature
        state = state.server
    return None


def sees_server(metrics: Metrics) -> bool:
    """Say whether metrics ask for the server's state, by a parameter of that name."""
    return "server" in inspect.signature(metrics).parameters
