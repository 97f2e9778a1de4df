"""Draws the samples a run will use, so that NumPy can repeat it sample by sample."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.runtime import Job, keys


def draw_samples(job: Job, iterations: int, first_batch: int = 1):
    """Return samples[k][t] and the first batch's further bundles, as NumPy rows."""
    drawn = _draw_all(job, iterations, first_batch - 1)
    steps, others = jax.tree.map(np.asarray, drawn)
    clients = range(job.data.clients)
    samples = [[_one(steps, k, t) for t in range(iterations)] for k in clients]
    firsts = [[_one(others, k, i) for i in range(first_batch - 1)] for k in clients]
    return samples, firsts


@eqx.filter_jit
def _draw_all(job: Job, iterations: int, others: int):
    def of_client(client):
        oracle = job.oracle(client)
        turn = keys.client_turn(job.key, (keys.ROUNDS, 0), client, 0)

        def draw(key):
            for_bundle, for_zeta = jr.split(key)
            rule = job.algorithm.hypergradient  # pyright: ignore[reportAttributeAccessIssue]
            return rule.draw(oracle, for_bundle), oracle.draw_lower(for_zeta)

        later = jax.vmap(draw)(turn.spare_keys(others)) if others else ()
        return jax.vmap(draw)(turn.keys(iterations)), later

    return jax.vmap(of_client)(jnp.arange(job.data.clients))


def _one(drawn, client: int, t: int):
    bundle, zeta = jax.tree.map(lambda leaf: leaf[client, t], drawn)
    count = len(bundle.factors.rows["s"])
    factors = [
        {name: leaf[j] for name, leaf in bundle.factors.rows.items()}
        for j in range(count)
    ]
    return (bundle.upper.rows, bundle.cross.rows, factors), zeta.rows
