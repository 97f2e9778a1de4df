"""Ten factors of the series in one kernel, beside what XLA makes of them. For a GPU.

    python benchmarks/kernels.py [--quick]

The problem is that of `speed.py`: softmax regression 784 -> 10 with a strength for each
feature, batches of 32 rows, the Neumann series at the two points of STORM,

    r <- r - theta H r,   s <- s + r,   H r = A^T u / 32 + strength * r,
    u = p * (A r - <p, A r>),   p = softmax(A w),

where A are the rows of a factor's batch, the same for both points. XLA gathers A into
memory, and reads it from there for every product. The kernel (Pallas, by Triton) takes
a client a block and gathers A where it multiplies: once for A w and A r, and for A^T u
soon after, when the caches still hold it. It is written for this one loss, and so no
part of the package: it shows what memory allows. `--quick` compares the answers of a
small case by an interpreter, and runs anywhere.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

CLASSES, POINTS, THETA = 10, 2, 0.1
COLUMNS, HELD = CLASSES * POINTS, 32  # of both points, and with zeros beside them
PIECE = 64  # features at a time, and 784 = 12 * 64 + 16: Triton asks for powers of two
WARPS, STAGES = 2, 3
ALONG, ACROSS = (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))  # of products
TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
EXACT = jax.lax.DotAlgorithmPreset.F32_F32_F32


class Inputs(NamedTuple):
    """Rows of all clients, and where the series of their two points begin."""

    features: jax.Array  # clients x rows x features
    places: jax.Array  # clients x factors x batch
    strength: jax.Array  # clients x points x features
    weights: jax.Array  # clients x (points, classes) x features
    start: jax.Array  # the same shape


def over_pieces(body: Callable, features: int, carry: Any) -> Any:
    """Repeat carry <- body(columns, carry) over all features, piece by piece."""

    def piece(number: jax.Array | int, size: int, carry: Any) -> Any:
        return body(number * PIECE + jnp.arange(size)[None, :], carry)

    count, rest = divmod(features, PIECE)
    carry = jax.lax.fori_loop(0, count, lambda i, own: piece(i, PIECE, own), carry)
    return piece(count, rest, carry) if rest else carry


def curved(logits: jax.Array, tangent: jax.Array, batch: int) -> jax.Array:
    """Return u for columns that are the classes of the first point, then the other."""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    result = jnp.zeros_like(logits)
    for point in range(POINTS):
        own = (column >= point * CLASSES) & (column < (point + 1) * CLASSES)
        top = jnp.max(jnp.where(own, logits, -jnp.inf), 1, keepdims=True)
        power = jnp.where(own, jnp.exp(logits - top), 0.0)
        chance = power / jnp.sum(power, 1, keepdims=True)
        mean = jnp.sum(chance * tangent, 1, keepdims=True)
        result += chance * (tangent - mean)
    return result / batch


def load(ref: Any, columns: jax.Array, rows_each: int = 1) -> jax.Array:
    """Read rows of both points, each so many times, and zeros beside them."""
    row = jnp.arange(HELD)[:, None]
    return triton.load(ref.at[row // rows_each, columns], mask=row < COLUMNS, other=0.0)


def save(ref: Any, columns: jax.Array, value: jax.Array) -> None:
    """Write rows of both points."""
    row = jnp.arange(HELD)[:, None]
    triton.store(ref.at[row, columns], value, mask=row < COLUMNS)


def series_kernel(*refs: Any, factors: int, precision: Any, wait: Callable) -> None:
    """Run the series of one client; r and s are written, and read again."""
    features, places, strength, weights, start, r, s = refs
    batch, times = places.shape[-1], partial(jax.lax.dot_general, precision=precision)

    def rows(number: jax.Array, columns: jax.Array) -> jax.Array:
        return features[places[number, :][:, None], columns]

    def begin(columns: jax.Array, carry: None) -> None:
        save(r, columns, load(start, columns))
        save(s, columns, load(start, columns))

    def factor(number: jax.Array, carry: None) -> None:
        def forward(columns: jax.Array, sums: Any) -> Any:
            a, (logits, tangent) = rows(number, columns), sums
            logits += times(a, load(weights, columns), ALONG)
            return logits, tangent + times(a, load(r, columns), ALONG)

        none = jnp.zeros((batch, HELD), jnp.float32)
        sums = over_pieces(forward, features.shape[-1], (none, none))
        u = curved(sums[0], sums[1], batch)

        def backward(columns: jax.Array, carry: None) -> None:
            before = load(r, columns)
            curve = times(u, rows(number, columns), ACROSS)
            curve += load(strength, columns, rows_each=CLASSES) * before
            after = before - THETA * curve
            save(r, columns, after)
            save(s, columns, load(s, columns) + after)

        over_pieces(backward, features.shape[-1], None)
        wait()  # other threads read what these have written

    over_pieces(begin, features.shape[-1], None)
    wait()
    jax.lax.fori_loop(0, factors, factor, None)


def by_kernel(
    inputs: Inputs, precision: Any = TF32, interpret: bool = False
) -> jax.Array:
    """Return s of all clients, by the kernel."""
    clients, factors, _ = inputs.places.shape
    # One thread alone, as it is interpreted, has nobody to wait for.
    wait = (lambda: None) if interpret else triton.debug_barrier
    body = partial(series_kernel, factors=factors, precision=precision, wait=wait)

    def own(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), lambda client: (client, 0, 0))

    like = jax.ShapeDtypeStruct(inputs.start.shape, inputs.start.dtype)
    _, s = pl.pallas_call(
        body,
        grid=(clients,),
        in_specs=[own(array) for array in inputs],
        out_specs=[own(inputs.start)] * 2,
        out_shape=[like, like],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
    )(*inputs)
    return s


def by_xla(inputs: Inputs, unroll: int = 5) -> jax.Array:
    """Return the same as the package computes it: clients and points stacked."""
    *_, features = inputs.features.shape

    def loss(w: jax.Array, strength: jax.Array, rows: jax.Array) -> jax.Array:
        # The label's part of the cross-entropy is linear and has no curvature.
        entropy = jnp.mean(jax.nn.logsumexp(rows @ w.T, -1))
        return entropy + 0.5 * jnp.sum(strength * w**2)

    def series(w, strength, start, client, places):
        def factor(carry, place):
            r, s = carry
            slope = jax.grad(loss)
            rows = inputs.features[client, place]
            product = jax.jvp(lambda at: slope(at, strength, rows), (w,), (r,))[1]
            r = r - THETA * product
            return (r, s + r), None

        return jax.lax.scan(factor, (start, start), places, unroll=unroll)[0][1]

    def client(number, places, strength, weights, start):
        shape = (POINTS, CLASSES, features)
        both = weights.reshape(shape), strength, start.reshape(shape)
        ends = jax.vmap(series, (0, 0, 0, None, None))(*both, number, places)
        return ends.reshape(COLUMNS, features)

    numbers = jnp.arange(len(inputs.features))
    return jax.vmap(client)(numbers, *inputs[1:])


def random_inputs(clients: int, rows: int, features: int, q: int, batch: int) -> Inputs:
    """Return numbers of the sizes that they have in a run."""
    keys = jr.split(jr.key(0), 5)
    both = (clients, COLUMNS, features)
    strength = jr.uniform(keys[2], (clients, POINTS, features), minval=-9, maxval=0)
    return Inputs(
        jr.normal(keys[0], (clients, rows, features)),
        jr.randint(keys[1], (clients, q, batch), 0, rows),
        jnp.exp(strength),
        jr.normal(keys[3], both) / features**0.5,
        jr.normal(keys[4], both),
    )


def apart(result: jax.Array, answer: jax.Array, without: jax.Array) -> float:
    """Return the distance from an answer, over what curvature changes about it."""
    return float(jnp.linalg.norm(result - answer) / jnp.linalg.norm(answer - without))


def seconds(call: Callable[[], Any], times: int = 20) -> float:
    """Return the least mean time of a call, of five series of calls."""
    jax.block_until_ready(call())
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([call() for _ in range(times)][-1])
        spent.append((time.perf_counter() - began) / times)
    return min(spent)


def report(name: str, call: Callable[[], jax.Array], clients: int, answer: Any) -> None:
    """Print the microseconds of a client step, and how far the answers are apart."""
    error = apart(call(), *answer)
    spent = seconds(call) / clients * 1e6
    print(f"{name:44s} {spent:6.2f} us   {error:.0e} apart", flush=True)


def memory_rate() -> float:
    """Measure bytes per second of a copy, those read and those written."""
    numbers = jr.normal(jr.key(0), (1 << 28,))
    copy = jax.jit(lambda a: a + 1)
    return 2 * numbers.nbytes / seconds(lambda: copy(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small case, compared")
    quick = parser.parse_args().quick
    clients, features, q, batch = (3, 144, 3, 16) if quick else (1024, 784, 10, 32)
    inputs = random_inputs(clients, 40 if quick else 500, features, q, batch)
    plain = jax.jit(by_xla)
    with jax.default_matmul_precision("highest"):
        answer = jax.jit(by_xla)(inputs), (q + 1) * inputs.start
    if quick:
        result = by_kernel(inputs, EXACT, interpret=True)
        print(f"{apart(result, *answer):.0e} apart")
        return
    rate, one = memory_rate(), inputs.start[0].nbytes
    rows = q * batch * features * 4
    print(f"{jax.devices()[0].device_kind}; a copy runs at {rate / 1e12:.2f} TB/s")
    for name, count in (
        ("rows, w, r and s read or written once", rows + 4 * one),
        ("rows once, w, r and s in every factor", rows + 6 * q * one),
    ):
        print(f"{name:44s} {count / rate * 1e6:6.2f} us by memory")
    apart_by: Any = {"xla_gpu_dot_merger_threshold_mb": 0}
    unmerged = jax.jit(by_xla).lower(inputs).compile(compiler_options=apart_by)
    report("XLA, TF32", lambda: plain(inputs), clients, answer)
    report("XLA, TF32, products not merged", lambda: unmerged(inputs), clients, answer)
    for precision in (TF32, EXACT):
        call = jax.jit(partial(by_kernel, precision=precision))
        name = f"the kernel, {precision.name}"
        report(name, lambda call=call: call(inputs), clients, answer)


if __name__ == "__main__":
    main()
