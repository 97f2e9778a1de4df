"""What one exchange costs, read from its traced program."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedbilevel.algorithms import Phase, Turn
from fedbilevel.channels import Channel, count_blocks
from fedbilevel.problem.stored import fetched
from fedbilevel.runtime.job import Job

_GRADIENTS = {
    "_upper_gradients": "upper_gradients",
    "_lower_gradient": "lower_gradient",
    "_lower_gradient_upper": "lower_gradient_upper",
    "_hessian_product": "hessian_product",
    "_cross_product": "cross_product",
    "_unrolled_gradient": "unrolled_gradient",
}
_DRAWS = {"_draw_upper": "upper_samples", "_draw_lower": "lower_samples"}
SAMPLES = tuple(_DRAWS.values())


class Exchange:
    """What one exchange costs a participant.

    `down` lists the leaves of the message: which leaf of the server's state each is, if
    any, its floats and bytes. `replaced` are the leaves of that state which change.
    `up` are the floats and bytes that travel back, `blocks` those of the reply.
    """

    def __init__(self, calls, down, up, replaced, blocks) -> None:
        self.calls, self.down, self.up, self.replaced = calls, down, up, replaced
        self.blocks = blocks

    def traffic(self, known: frozenset[int]) -> Counter[str]:
        """Count what travels; what a client already holds is not sent again."""
        sent = [(f, b) for source, f, b in self.down if source not in known]
        return Counter(
            exchanges=1,
            floats_down=sum(floats for floats, _ in sent),
            bytes_down=sum(size for _, size in sent),
            floats_up=self.up[0],
            bytes_up=self.up[1],
        )

    def known_after(self, known: frozenset[int]) -> frozenset[int]:
        """Return which leaves of the server's state clients hold after the exchange."""
        received = {source for source, _, _ in self.down if source is not None}
        return frozenset((known | received) - self.replaced)


def trace(
    job: Job, phase: Phase, server: PyTree, memory: PyTree, turn: Turn
) -> Exchange:
    """Trace one exchange, without computing anything."""
    calls: Counter[str] = Counter()

    def local(message: PyTree, memory: PyTree):
        return phase.local(message, memory, job.oracle(0), turn)

    traced, (_, reply) = jax.make_jaxpr(local, return_shape=True)(
        phase.down(server), memory
    )
    _walk_program(traced.jaxpr, 1, job, calls)
    public = job.public(server)
    message, shapes = jax.make_jaxpr(phase.down, return_shape=True)(public)
    inputs = message.jaxpr.invars
    down = [
        (inputs.index(leaf) if leaf in inputs else None, *_weigh(shape))
        for leaf, shape in zip(
            message.jaxpr.outvars, jax.tree.leaves(shapes), strict=True
        )
    ]
    reply = job.public(reply)
    after = jax.make_jaxpr(lambda s, r: job.public(phase.up(s, r)))(public, reply).jaxpr
    same = zip(after.invars, after.outvars, strict=False)
    replaced = {i for i, (old, new) in enumerate(same) if old is not new}
    up = _weigh_coded(job.channel, reply)
    return Exchange(calls, down, up, replaced, count_blocks(reply))


def _weigh_coded(channel: Channel, reply: PyTree) -> tuple[int, int]:
    floats, size = _weigh(channel.coded_shape(reply))
    width = channel.reduction.bytes_per_number
    return floats, size if width is None else width * floats


def _weigh(tree: PyTree) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return (
        sum(leaf.size for leaf in floats),
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )


def _walk_program(jaxpr: Any, times: int, job: Job, tally: Counter[str]) -> None:
    for equation in jaxpr.eqns:
        name = equation.params.get("name")
        sizes = [variable.aval.size for variable in equation.outvars]
        if name in _GRADIENTS:
            tally[_GRADIENTS[name]] += times * _points(name, sizes, job)
        elif name in _DRAWS:
            rows = job.data.upper if name == "_draw_upper" else job.data.lower
            one_row = jax.tree.leaves(jax.eval_shape(_first_row, rows))[0].size
            tally[_DRAWS[name]] += times * (sizes[0] // one_row)
        else:
            inner = times * equation.params.get("length", 1)
            for body in _bodies(equation.params):
                _walk_program(body, inner, job, tally)


def _first_row(rows: PyTree) -> PyTree:
    return fetched(jax.tree.map(lambda leaf: leaf[0, 0], rows))


def _points(name: str, sizes: list[int], job: Job) -> int:
    """Return at how many stacked points a call is evaluated."""
    like_x = [leaf.size for leaf in jax.tree.leaves(job.x)]
    like_y = [leaf.size for leaf in jax.tree.leaves(job.y)]
    expected = {
        "_upper_gradients": like_x + like_y,
        "_lower_gradient": like_y,
        "_hessian_product": like_y,
    }.get(name, like_x)
    # Outputs that do not depend on the point stay unstacked; the others tell.
    return max(size // one for size, one in zip(sizes, expected, strict=True))


def _bodies(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                found.append(item)
            elif hasattr(item, "jaxpr"):
                found.append(item.jaxpr)
    return found
