"""The program one writes first, as a yardstick: same algorithm, everything vmapped."""

import jax
import jax.numpy as jnp
import jax.random as jr

THETA, UPPER, LOWER, WEIGHT = 0.1, 0.1, 0.1, 0.1


def _cross_entropy(W, rows):
    features, label = rows
    logits = features @ W
    chosen = jnp.take_along_axis(logits, label[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def _upper(x, y, rows):
    return _cross_entropy(y, rows)


def _lower(x, y, rows):
    return _cross_entropy(y, rows) + 0.5 * jnp.sum(jnp.exp(x)[:, None] * y**2)


_slope = jax.grad(_lower, 1)


def plain_program(features, label, q: int, batch: int, local_steps: int, rounds: int):
    """Return a function that runs `rounds` rounds of LocalBSGVRM."""
    clients, size, width = features.shape
    classes = int(label.max()) + 1

    def sample(data, key):
        index = jr.randint(key, (batch,), 0, size)
        return jax.tree.map(lambda leaf: leaf[index], data)

    def hypergradient(data, x, y, key):
        for_upper, for_cross, for_factors = jr.split(key, 3)
        fx, fy = jax.grad(_upper, (0, 1))(x, y, sample(data, for_upper))

        def factor(carry, key):
            r, s = carry
            rows = sample(data, key)
            product = jax.jvp(lambda y: _slope(x, y, rows), (y,), (r,))[1]
            r = r - THETA * product
            return (r, s + r), None

        (_, s), _ = jax.lax.scan(factor, (fy, fy), jr.split(for_factors, q))
        rows = sample(data, for_cross)
        return fx - THETA * jax.vjp(lambda x: _slope(x, y, rows), x)[1](s)[0]

    def local(state, data, key):
        def step(carry, key):
            x, y, u, v, x_old, y_old = carry
            for_bundle, for_zeta = jr.split(key)

            def directions(x, y):
                rows = sample(data, for_zeta)
                return hypergradient(data, x, y, for_bundle), _slope(x, y, rows)

            points = jnp.stack([x, x_old]), jnp.stack([y, y_old])
            h, g = jax.vmap(directions)(*points)
            u = h[0] + (1 - WEIGHT) * (u - h[1])
            v = g[0] + (1 - WEIGHT) * (v - g[1])
            return (x - UPPER * u, y - LOWER * v, u, v, x, y), None

        x, y, u, v = state
        keys = jr.split(key, local_steps)
        end, _ = jax.lax.scan(step, (x, y, u, v, x, y), keys)
        return end[:4]

    @jax.jit
    def run(features, label):
        def one_round(state, key):
            keys = jr.split(key, clients)
            ends = jax.vmap(local, (None, 0, 0))(state, (features, label), keys)
            return jax.tree.map(lambda leaf: leaf.mean(0), ends), None

        x, y = jnp.full(width, -5.0), jnp.zeros((width, classes))
        start = (x, y, jnp.zeros_like(x), jnp.zeros_like(y))
        return jax.lax.scan(one_round, start, jr.split(jr.key(0), rounds))[0]

    return lambda: run(features, label)
