"""Operations per second of a client step with networks below, beside matrix products.

    python benchmarks/networks.py [--quick]

LocalBSGVRM with five terms of the series; y is a multilayer perceptron, x one strength
for every layer, rows are random. Operations are those of the matrix products in the
traced program; the rate of large square products, of the same precision, is measured
in the same run. Meant for a GPU; `--quick` takes one small network, and runs anywhere.
"""

import argparse
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from speed import LOCAL_STEPS, matrix_rate, ours, peak_megabytes, step_operations

from fedbilevel import configure
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job, Sampling

# Widths, clients, rows of a batch.
SIZES = [
    ((784, 2048, 2048, 2048, 10), 16, 256),
    ((784, 2048, 2048, 2048, 10), 16, 1024),
    ((784, 1024, 256, 10), 64, 256),
    ((784, 1024, 256, 10), 64, 1024),
    ((784, 200, 10), 256, 256),
]
ROWS, TERMS = 1024, 5


def network(inside: jnp.dtype) -> Problem:
    """Return a cross-entropy, and below it a strength for every layer."""

    def loss(y: list[jax.Array], rows: dict[str, jax.Array]) -> jax.Array:
        hidden = rows["features"].astype(inside)
        for number, weights in enumerate(y):
            hidden = hidden @ weights.astype(inside).T
            if number < len(y) - 1:
                hidden = jax.nn.silu(hidden)
        logits = hidden.astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, rows["label"][:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    def lower(x: jax.Array, y: list[jax.Array], rows: dict) -> jax.Array:
        squares = jnp.stack([jnp.sum(weights**2) for weights in y])
        return loss(y, rows) + jnp.exp(x) @ squares

    return Problem(lambda x, y, rows: loss(y, rows), lower)


def job_of(widths: tuple[int, ...], clients: int, batch: int, inside) -> Job:
    """Return a job on random rows: time does not depend on what they hold."""
    draw = np.random.default_rng(0)
    shape = (clients, ROWS, widths[0])
    features = draw.standard_normal(shape, dtype=np.float32) / math.sqrt(widths[0])
    rows = {
        "features": jnp.asarray(features),
        "label": jnp.asarray(draw.integers(0, widths[-1], shape[:2]), jnp.int32),
    }
    sizes = jnp.full(clients, ROWS, jnp.int32)
    data = ClientData(rows, rows, sizes, sizes, jnp.ones(clients))
    algorithm = LocalBSGVRM.effective(
        Neumann(TERMS, 0.1),
        upper_step=0.01,
        lower_step=0.01,
        upper_weight=0.1,
        lower_weight=0.1,
        local_steps=LOCAL_STEPS,
    )
    layers = list(zip(widths, widths[1:], strict=False))
    y = [
        jr.normal(jr.key(number), (out, into)) / math.sqrt(into)
        for number, (into, out) in enumerate(layers)
    ]
    x = jnp.full(len(y), -8.0)
    return Job.of(algorithm, network(inside), data, x, y, sampling=Sampling(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small network")
    quick = parser.parse_args().quick
    configure()
    jax.config.update("jax_enable_compilation_cache", False)  # it is timed below
    sizes = [((64, 32, 10), 4, 16)] if quick else SIZES
    print(
        "precision  parameters   K batch | us a step  TFLOP/s  share | compile s | MB"
    )
    for inside in (jnp.bfloat16, jnp.float32):
        rate = matrix_rate(inside)
        for widths, clients, batch in sizes:
            job = job_of(widths, clients, batch, inside)
            spent, compiling = ours(job, 3)
            done = step_operations(job) / spent
            count = sum(a * b for a, b in zip(widths, widths[1:], strict=False))
            print(
                f"{jnp.dtype(inside).name:9s} {count:11,d} {clients:4d} {batch:4d} |"
                f" {spent * 1e6:9.1f} {done / 1e12:8.2f} {done / rate:6.0%} |"
                f" {compiling:9.1f} | {peak_megabytes():.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
