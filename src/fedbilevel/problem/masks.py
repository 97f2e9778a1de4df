"""Random masks for noisy losses, such as dropout, from as few bits as they need."""

import math

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool

from fedbilevel._types import Key
from fedbilevel.errors import InvalidInputError

_MOST = 8  # bits for one entry


def coin_mask(
    key: Key, shape: tuple[int, ...], keep: float = 0.5
) -> Bool[Array, "..."]:
    """Return independent flags that are True with the chance `keep`.

    Use it in `Problem(lower_noise=...)` for dropout. `jax.random.bernoulli` hashes 32
    bits for each flag; this takes one bit where `keep` is 1/2, two for quarters, and so
    on down to 1/256.
    """
    bits = next((n for n in range(_MOST + 1) if float(keep * 2**n).is_integer()), None)
    if bits is None or not 0 <= keep <= 1:
        raise InvalidInputError(
            f"keep={keep}: give a chance from 0 to 1 in steps of 1/{2**_MOST}, such as "
            f"{min(max(round(keep * 2**_MOST), 0), 2**_MOST) / 2**_MOST:g}, or use "
            "`jax.random.bernoulli`."
        )
    count = math.prod(shape)
    words = jr.bits(key, (max(bits, 1), -(-count // 32)), jnp.uint32)
    planes = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & jnp.uint32(1)
    drawn = planes[0]
    for plane in planes[1:]:
        drawn = 2 * drawn + plane
    flags = drawn < jnp.uint32(round(keep * 2 ** max(bits, 1)))
    return flags.reshape(-1)[:count].reshape(shape)
