r"""Adapters of large language models under weights of data sources, on one device.

    python benchmarks/language_models.py --out language_models.json
    python benchmarks/language_models.py --sizes tiny --out tiny.json     # on a CPU

A base of random numbers in bfloat16, adapters of rank 16, sequences of 512 tokens, and
Fed-F2SA as the task `reweighting` has it: a step evaluates, on three drawn batches, the
gradients gy(y_s), gy(y_l) and fy(y_l), and gx at both copies, for which a pass forward
is enough. So three passes forward and backward and two forward a step.

FLOPs are those that the mathematics needs. A product with a matrix of n entries takes
2n a token forward, and 2n backward, since the base is frozen and only what flows to
earlier blocks is needed. Attention takes 2 (length + 1) width forward in each block,
because a position sees those up to it, and twice as much backward. Adapters take
2 (inputs + outputs) rank forward and, A being frozen, 2 (inputs + 2 outputs) rank
backward. What is recomputed is not counted.

Every size has a process of its own, so that peaks of memory are its own. In it the
library runs with 4 clients and with 16, one at a time, then a program written plainly
in JAX with the same losses. Lines are printed as they are measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.models.adapters import joined, parted
from fedbilevel.models.transformer import (
    RECOMPUTED,
    Architecture,
    Passes,
    Transformer,
    draw_adapters,
    initialize,
    projection_shapes,
    token_losses,
)
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job, Sampling
from fedbilevel.runtime.driver import first_span
from fedbilevel.runtime.simulator import SimulatorRuntime
from fedbilevel.tasks.reweighting import _Frozen, _Lower, _upper

RANK, SCALE, PENALTY, NU = 16, 2.0, 0.001, 0.1
UPPER_STEP, LOWER_STEP = 0.5, 0.1
ADAPTED = ("query", "value", "up", "down")
SOURCES, STEPS, SECONDS, REPEATS = 4, 2, 1.0, 3


@dataclass(frozen=True)
class Size:
    """A transformer, its rows and how many of them a batch has."""

    made: Architecture
    length: int
    batch: int
    rows: int


def _size(vocabulary, width, blocks, heads, hidden, length, batch, rows) -> Size:
    made = Architecture(
        vocabulary, width, blocks, heads, heads, width // heads, hidden, length
    )
    return Size(made, length, batch, rows)


SIZES = {
    "tiny": _size(128, 32, 3, 4, 64, 16, 4, 6),
    "10M": _size(16000, 256, 8, 4, 704, 512, 32, 64),
    "100M": _size(32000, 768, 11, 12, 2048, 512, 32, 64),
    "1B": _size(32000, 2048, 18, 16, 5632, 512, 8, 16),
}


def main() -> None:
    """Measure the sizes that are asked for, each in a process of its own."""
    given = _arguments()
    if given.one:
        _measure_size(given.sizes, given)
        return
    found = []
    for name in given.sizes.split(","):
        found += _in_a_process(name, given)
        if given.out:
            Path(given.out).write_text(json.dumps(found, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Large models on a device.")
    parser.add_argument("--sizes", default="10M,100M,1B", help="of tiny,10M,100M,1B")
    parser.add_argument("--out", help="JSON file of all figures")
    parser.add_argument("--recomputed", default="nothing", choices=RECOMPUTED)
    parser.add_argument("--plain-attention", action="store_true", help="no kernel")
    parser.add_argument("--loop", action="store_true", help="blocks not unrolled")
    parser.add_argument("--rows-at-once", type=int, help="most rows held at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a size")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one size; what was measured until a failure counts."""
    command = [sys.executable, __file__, "--one", "--sizes", name]
    command += ["--recomputed", given.recomputed]
    command += ["--plain-attention"] * given.plain_attention
    command += ["--loop"] * given.loop
    if given.rows_at_once:
        command += ["--rows-at-once", str(given.rows_at_once)]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        late = threading.Timer(given.limit, process.kill)
        late.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                print(_told(found[-1]), flush=True)
        late.cancel()
    if process.returncode:
        found.append({"size": name, "failed": process.returncode})
        print(f"{name}: ended with {process.returncode}", flush=True)
    return found


def _told(one: dict[str, Any]) -> str:
    return (
        f"{one['size']:>5} {one['program']:>8} {one['clients']:3d} clients: "
        f"{one['tokens_a_second']:12,.0f} tokens/s, {one['share']:6.1%} of "
        f"{one['matrix_rate'] / 1e12:.1f} TFLOP/s, "
        f"planned {one['planned_mb']:,.0f} MB, peak {one['peak_mb']:,.0f} MB, "
        f"compiled in {one['compile_seconds']:.1f} s"
    )


def _measure_size(name: str, given: argparse.Namespace) -> None:
    size = SIZES[name]
    passes = Passes(given.recomputed, not given.plain_attention, not given.loop)
    base = _base(size.made, passes)
    rate = _matrix_rate(size.made.width if name == "tiny" else 8192)
    told = {
        "size": name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(base)),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "matrix_rate": rate,
        "length": size.length,
        "batch": size.batch,
        **asdict(passes),
        "rows_at_once": given.rows_at_once,
    }
    for program, clients in (("library", 4), ("library", 16), ("plain", 4)):
        made = _library if program == "library" else _plain
        run, compiled, planned = made(size, base, clients, given.rows_at_once)
        seconds, rounds = _timed(run)
        steps = rounds * clients * STEPS
        tokens = 5 * steps * size.batch * size.length
        flops = steps * size.batch * size.length * _flops_a_token(size)
        figures = {
            "program": program,
            "clients": clients,
            "tokens_a_second": tokens / seconds,
            "step_milliseconds": 1e3 * seconds / steps,
            "share": flops / seconds / rate,
            "planned_mb": planned / 1e6,
            "peak_mb": _peak() / 1e6,
            "compile_seconds": compiled,
        }
        print(json.dumps({**told, **figures}), flush=True)
        del run


def _base(made: Architecture, passes: Passes) -> Transformer:
    @jax.jit
    def drawn(key: Any) -> Transformer:
        base = initialize(made, key)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base)

    return replace(drawn(jr.key(0)), passes=passes)


def _rows(size: Size, clients: int) -> tuple[list[Any], list[Any]]:
    """Return random rows, of which all tokens count."""
    draw = np.random.default_rng(0)

    def some() -> dict[str, np.ndarray]:
        # One token more than a sequence: the last is only predicted.
        shape = (size.rows, size.length + 1)
        return {
            "tokens": draw.integers(0, size.made.vocabulary, shape, np.int32),
            "counted": np.ones(shape, bool),
            "factor": np.full(size.rows, 1 / size.length),
            "source": draw.integers(0, SOURCES, size.rows, np.int32),
        }

    lower = [some() for _ in range(clients)]
    upper = [some() for _ in range(clients)]
    for one in upper:
        del one["source"]
    return upper, lower


def _levels(size: Size, base: Transformer) -> tuple[Any, Any]:
    """Return the trained part of adapters, and all that is frozen."""
    adapters = draw_adapters(base.architecture, ADAPTED, RANK, SCALE, jr.key(1))
    y, rest = parted(adapters, both=False)
    rest = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), rest)
    return y, _Frozen(base, rest, "llama", "", "")


def _library(size: Size, base: Transformer, clients: int, rows_at_once: int | None):
    """Return rounds by the library, seconds of compiling, and bytes that XLA plans."""
    y, frozen = _levels(size, base)
    held = rows_at_once or size.batch
    problem = Problem(
        _upper,
        _Lower(PENALTY),
        frozen=frozen,
        rows_at_once=held,
    )
    algorithm = FedF2SA(UPPER_STEP, LOWER_STEP, NU, local_steps=STEPS)
    data = ClientData.from_clients(*_rows(size, clients))
    started = time.perf_counter()
    sampling = Sampling(size.batch)
    job = Job.of(algorithm, problem, data, jnp.zeros(SOURCES), y, sampling=sampling)
    runtime = SimulatorRuntime(job, clients_at_once=1)
    state, _ = runtime.start()
    checked = time.perf_counter() - started
    first, done = first_span(runtime, 10**6, 10**6), 0

    def run(rounds: int) -> None:
        nonlocal state, done
        span = replace(first, start=done, stop=done + rounds)
        state, done = runtime.advance(state, span).state, done + rounds
        jax.block_until_ready(state)

    before = runtime.compile_seconds
    run(1)
    compiled = runtime.compile_seconds - before
    print(f"{clients} clients: checked in {checked:.1f} s", file=sys.stderr)
    return run, compiled, runtime.memory(first).total


def _plain(size: Size, base: Transformer, clients: int, rows_at_once: int | None):
    """Return the same rounds as one writes them first, with nothing of ours but y."""
    del rows_at_once
    y, frozen = _levels(size, base)
    upper, lower = (
        jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *level)
        for level in _rows(size, clients)
    )
    x = jnp.zeros(SOURCES)
    count = jnp.asarray(1, jnp.int32)
    arguments = (frozen, upper, lower, x, y, y, count, jr.key(0))
    started = time.perf_counter()
    lowered = jax.jit(_plain_rounds(size.batch), donate_argnums=(3, 4, 5)).lower(
        *arguments
    )
    program = lowered.compile()
    compiled = time.perf_counter() - started
    point = jax.tree.map(jnp.copy, (x, y, y))

    def run(rounds: int) -> None:
        nonlocal point
        asked = jnp.asarray(rounds, jnp.int32)
        point = program(frozen, upper, lower, *point, asked, jr.key(0))
        jax.block_until_ready(point)

    run(1)
    return run, compiled, _planned(program)


def _plain_rounds(batch: int) -> Callable:
    """Return rounds of Fed-F2SA: a scan over clients, and in it one over steps."""

    def losses(y: Any, rows: Any, frozen: Any) -> Any:
        whole = joined(y, frozen.adapters)
        return jnp.sum(token_losses(frozen.base, whole, rows["tokens"]), axis=-1)

    def f(y: Any, rows: Any, frozen: Any) -> Any:
        return jnp.mean(rows["factor"] * losses(y, rows, frozen))

    def g(x: Any, y: Any, rows: Any, frozen: Any) -> Any:
        weight = jax.nn.softmax(x)[rows["source"]] * rows["factor"]
        square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))
        return jnp.mean(weight * losses(y, rows, frozen)) + 0.5 * PENALTY * square

    def sample(rows: Any, key: Any) -> Any:
        count = rows["factor"].shape[0]
        chosen = jr.randint(key, (batch,), 0, count)
        return jax.tree.map(lambda leaf: leaf[chosen], rows)

    def moved(w: Any, step: float, d: Any) -> Any:
        return jax.tree.map(lambda a, b: a - step * b, w, d)

    def local(point: Any, upper: Any, lower: Any, key: Any, frozen: Any) -> Any:
        def step(point: Any, key: Any) -> Any:
            x, plain, tilted = point
            first, second, third = jr.split(key, 3)
            xi, zeta = sample(upper, first), sample(lower, second)
            other = sample(lower, third)
            slope = jax.grad(g, 1)(x, plain, zeta, frozen)
            with_f = jax.tree.map(
                lambda a, b: a + NU * b,
                jax.grad(g, 1)(x, tilted, zeta, frozen),
                jax.grad(f)(tilted, xi, frozen),
            )
            gx = jax.grad(g)(x, tilted, other, frozen)
            gx = (gx - jax.grad(g)(x, plain, other, frozen)) / NU
            x = x - UPPER_STEP * gx
            plain = moved(plain, LOWER_STEP, slope)
            return (x, plain, moved(tilted, LOWER_STEP, with_f)), None

        return jax.lax.scan(step, point, jr.split(key, STEPS))[0]

    def rounds(frozen, upper, lower, x, plain, tilted, count, key):
        clients = upper["factor"].shape[0]

        def one_round(number: Any, point: Any) -> Any:
            keys = jr.split(jr.fold_in(key, number), clients)

            def client(total: Any, held: Any) -> Any:
                above, below, mine = held
                end = local(point, above, below, mine, frozen)
                return jax.tree.map(lambda a, b: a + b / clients, total, end), None

            zeros = jax.tree.map(jnp.zeros_like, point)
            return jax.lax.scan(client, zeros, (upper, lower, keys))[0]

        return jax.lax.fori_loop(0, count, one_round, (x, plain, tilted))

    return rounds


def _timed(run: Callable[[int], None]) -> tuple[float, int]:
    """Return the median seconds of a call of some rounds, about a second of them."""
    started = time.perf_counter()
    run(1)
    rounds = max(1, round(SECONDS / (time.perf_counter() - started)))
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run(rounds)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), rounds


def _flops_a_token(size: Size) -> float:
    made = size.made
    shapes = projection_shapes(made)
    matrices = made.blocks * sum(a * b for a, b in shapes.values())
    matrices += made.vocabulary * made.width
    seen = 2 * (size.length + 1) * made.heads * made.head_width * made.blocks
    low = made.blocks * RANK
    adapters = sum(2 * low * sum(shapes[name]) for name in ADAPTED)
    back = sum(2 * low * (shapes[name][1] + 2 * shapes[name][0]) for name in ADAPTED)
    forward = 2 * matrices + seen + adapters
    backward = 2 * matrices + 2 * seen + back
    return 5 * forward + 3 * backward


def _matrix_rate(width: int) -> float:
    """Return the FLOPs a second of a large product of bfloat16 matrices, the best."""
    left = jr.normal(jr.key(0), (width, width), jnp.bfloat16)
    times = 10

    @jax.jit
    def products(a: Any, b: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, c: a @ c * (1 / width), b)

    jax.block_until_ready(products(left, left))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(products(left, left))
        seconds.append(time.perf_counter() - started)
    return times * 2 * width**3 / min(seconds)


def _planned(program: Any) -> float:
    """Return the bytes that a compiled program takes, as XLA tells."""
    told = program.memory_analysis()
    if told is None:
        return float("nan")
    sizes = told.argument_size_in_bytes + told.output_size_in_bytes
    return sizes + told.temp_size_in_bytes - told.alias_size_in_bytes


def _peak() -> float:
    told = jax.local_devices()[0].memory_stats()
    return told["peak_bytes_in_use"] if told else float("nan")


if __name__ == "__main__":
    main()
