"""Validation rows of tuning: upper rows kept from its own trials, no test rows.

A fifth of every client's upper rows is held out. Trials run on the others, and are
judged by the upper loss on those held out. Where no client has five upper rows, nothing
can be held out, and the upper loss over all of them judges.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedbilevel.problem import ClientData, Data, PooledData, padded_count
from fedbilevel.runtime import Job, State
from fedbilevel.runtime.exchange import client_scalars

HELD_OUT = "held_out_loss"
_ONE_OF = 5  # upper rows is held out
_SPLIT = 0  # random seed of which


def held_out(data: Data, first: int = 0) -> tuple[Data, Data | None]:
    """Return the data without the rows held out, and those; None if there are none.

    `first` is the number of the first client: which rows are held out depends on the
    client alone, so that a site holds out those that a simulation does.
    """
    if isinstance(data, PooledData):
        kept, judged = held_out(data.parts)
        assert isinstance(kept, ClientData)
        return kept.pooled(), judged and judged.pooled()  # type: ignore[union-attr]
    sizes = np.asarray(data.upper_sizes)
    taken = sizes // _ONE_OF
    if not taken.any():
        return data, None
    width = jax.tree.leaves(data.upper)[0].shape[1]
    order = np.tile(np.arange(width), (len(sizes), 1))
    for client, size in enumerate(sizes):
        # A site may keep its rows sorted: by time, or by class.
        draw = np.random.default_rng([_SPLIT, first + client])
        order[client, :size] = draw.permutation(size)
    chosen = np.where(np.arange(width) < taken[:, None], order, order[:, :1])
    shift = np.minimum(np.arange(width) + taken[:, None], width - 1)
    rest = np.take_along_axis(order, shift, axis=1)
    return _with_upper(data, rest, sizes - taken), _with_upper(data, chosen, taken)


def _with_upper(data: ClientData, order: np.ndarray, sizes: np.ndarray) -> ClientData:
    """Return data with these of the upper rows; clients without any have no weight."""
    order = order[:, : padded_count(int(sizes.max()))]
    whose = np.arange(len(sizes))[:, None]
    return replace(
        data,
        upper=jax.tree.map(lambda leaf: leaf[whose, order], data.upper),
        upper_sizes=jnp.asarray(sizes, jnp.int32),
        weights=jnp.where(jnp.asarray(sizes) > 0, data.weights, 0),
    )


def held_out_losses(
    job: Job, judged: Data, states: State
) -> Float[np.ndarray, " runs"]:
    """Return the upper loss of every run of a sweep on the rows held out."""
    alone = replace(job, data=judged, metrics=None)
    return np.asarray(_losses(alone, jax.tree.map(jnp.asarray, states)), float)


@eqx.filter_jit
def _losses(job: Job, states: State):
    weights = job.data.weights / jnp.sum(job.data.weights)

    def of_run(state: State):
        def of_client(client):
            own = jax.tree.map(lambda leaf: leaf[client], state.clients.own)
            return client_scalars(job, client, state.server, own)["upper_loss"]

        # One at a time: all rows are read, and memory is what it costs.
        return weights @ jax.lax.map(of_client, jnp.arange(job.data.clients))

    return jax.lax.map(of_run, states)
