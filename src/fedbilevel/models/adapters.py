r"""Low-rank changes of a transformer's projections (LoRA): W h + scale B (A h).

B starts at 0, so that adapters change nothing at first, and A is random. Sites average
what they have trained. The mean of B_k A_k is not (mean B_k)(mean A_k) where both were
trained; with A frozen, and the same at all sites, it is. So B alone is trained unless
both are asked for.

Reference: Hu et al. 2021, arXiv 2106.09685; with A frozen Sun et al. 2024, arXiv
2403.12313.
"""

from collections.abc import Mapping
from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array


class Adapter(eqx.Module):
    """A (blocks, rank, inputs) and B (blocks, outputs, rank) of one projection.

    Either is None where it is held elsewhere: see `parted`.
    """

    a: Array | None
    b: Array | None
    scale: float = eqx.field(static=True)

    def __call__(self, states: Array) -> Array:
        """Return scale B (A h), in the type of the states."""
        assert self.a is not None and self.b is not None
        inner = jnp.einsum("btw,rw->btr", states, self.a.astype(states.dtype))
        made = jnp.einsum("btr,or->bto", inner, self.b.astype(states.dtype))
        return jnp.asarray(self.scale, states.dtype) * made


Adapters: TypeAlias = Mapping[str, Adapter]


def parted(adapters: Adapters, both: bool) -> tuple[dict, dict]:
    """Return what is trained, B or both of A and B, and what is frozen."""
    trained, frozen = {}, {}
    for name, one in adapters.items():
        trained[name] = Adapter(one.a if both else None, one.b, one.scale)
        frozen[name] = Adapter(None if both else one.a, None, one.scale)
    return trained, frozen


def joined(trained: Adapters, frozen: Adapters) -> dict[str, Adapter]:
    """Return whole adapters of both parts."""
    return {name: eqx.combine(one, frozen[name]) for name, one in trained.items()}
