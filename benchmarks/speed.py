"""Microseconds per client step, compile seconds and memory, against the floor.

The problem is softmax regression 784 -> 10 with per-feature strengths above,
LocalBSGVRM, float32. The floor is the arithmetic of one client step, counted in the
traced program (matrix products, two operations per multiply-add), over the rate of a
large matrix product measured in the same run. The plain program beside ours is what one
writes first: everything vmapped, weights as (features, classes), on one device.

Run with `make bench`, on a CPU or unchanged on a GPU; `--quick` takes the first row.
"""

import argparse
import math
import resource
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from plain_program import plain_program

from fedbilevel import configure
from fedbilevel.algorithms import every_phase
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, Stopping, keys
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.exchange import Link, server_turn, start_kept
from fedbilevel.runtime.job import start_server
from fedbilevel.runtime.stopping import Rule, Track
from fedbilevel.tasks import regularization

FEATURES, CLASSES, ROWS, LOCAL_STEPS = 784, 10, 500, 10
CPU = [(16, 5, 32), (4, 5, 32), (64, 5, 32), (16, 0, 32), (16, 20, 32), (16, 5, 128)]
GPU = [(1024, 10, 32), (64, 10, 32), (4096, 10, 32), (1024, 0, 32), (1024, 10, 128)]


def make_job(clients: int, q: int, batch: int) -> Job:
    """Return a job on random rows: time does not depend on what they hold."""
    draw = np.random.default_rng(0)
    shape = (clients, ROWS, FEATURES)
    features = draw.standard_normal(shape, dtype=np.float32) / math.sqrt(FEATURES)
    rows = {
        "features": jnp.asarray(features),
        "label": jnp.asarray(draw.integers(0, CLASSES, shape[:2]), jnp.int32),
    }
    sizes = jnp.full(clients, ROWS, jnp.int32)
    data = ClientData(rows, rows, sizes, sizes, jnp.ones(clients))
    algorithm = LocalBSGVRM.effective(
        Neumann(q, 0.1),
        upper_step=0.1,
        lower_step=0.1,
        upper_weight=0.1,
        lower_weight=0.1,
        local_steps=LOCAL_STEPS,
    )
    start = (jnp.full(FEATURES, -5.0), jnp.zeros((CLASSES, FEATURES)))
    problem, sampling = regularization.make().problem, Sampling(batch)
    return Job.of(algorithm, problem, data, *start, sampling=sampling)


def step_operations(job: Job) -> float:
    """Count the multiply-adds of one client step in the traced program, twice each."""
    (phase,) = every_phase(job.algorithm.phases())
    where, everybody = (keys.ROUNDS, 0), jnp.arange(job.clients, dtype=jnp.int32)
    link = Link.of(job, phase, where)
    turn = server_turn(job, where, 1, everybody, everybody >= 0)
    mine = keys.client_turn(job.key, where, 0, 1)

    def local(server, kept):
        return link.work(link.sent(server, turn), kept, mine, 0)

    traced = jax.make_jaxpr(local)(start_server(job), start_kept(job))
    return _operations(traced.jaxpr) / LOCAL_STEPS


def _operations(jaxpr) -> float:
    # Only what the outputs need: an unused primal product is not arithmetic to be done.
    needed = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    total = 0.0
    for equation in reversed(jaxpr.eqns):
        if not needed.intersection(equation.outvars):
            continue
        needed |= {v for v in equation.invars if not hasattr(v, "val")}
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            lengths = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * equation.outvars[0].aval.size * math.prod(lengths)
        times = equation.params.get("length", 1)
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    total += times * _operations(inner)
    return total


def matrix_rate(precision=jnp.float32) -> float:
    """Measure operations per second of a large matrix product on one device."""
    side = 2048 if jax.default_backend() == "cpu" else 8192
    square = jr.normal(jr.key(0), (side, side), precision)
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(square))
    return 2 * side**3 / min(_timed(lambda: product(square)) for _ in range(5))


def _timed(call) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def _span(start: int, stop: int) -> Span:
    """Return rounds that end before all others: nothing is measured with them."""
    last = np.asarray([10**6], np.int32)
    rule, track = Rule.of(Stopping(), last[0]), Track.start()
    return Span(start, stop, 10**6, 10**6, last, rule, track, ends=False)


def ours(job: Job, rounds: int) -> tuple[float, float]:
    """Return seconds per client step, and to compile."""
    runtime = SimulatorRuntime(job)
    state, _ = runtime.start()
    state = runtime.advance(state, _span(0, 1)).state
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        state = runtime.advance(state, _span(1, 1 + rounds)).state
        spent.append(time.perf_counter() - began)
    steps = rounds * LOCAL_STEPS * job.data.clients
    return min(spent) / steps, runtime.compile_seconds


def plain(job: Job, rounds: int) -> float:
    """Return seconds per client step of the plain program."""
    rows = job.data.lower
    q, batch = job.algorithm.hypergradient.q, job.lower_batch or 1  # pyright: ignore[reportAttributeAccessIssue]
    call = plain_program(rows["features"], rows["label"], q, batch, LOCAL_STEPS, rounds)
    jax.block_until_ready(call())
    steps = rounds * LOCAL_STEPS * job.data.clients
    return min(_timed(call) for _ in range(3)) / steps


def peak_megabytes() -> float:
    """Return the most memory used so far: the device's, or the process's on a CPU."""
    statistics = jax.devices()[0].memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return statistics["peak_bytes_in_use"] / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first row only")
    quick = parser.parse_args().quick
    configure()
    jax.config.update("jax_enable_compilation_cache", False)  # it is timed below
    on_cpu = jax.default_backend() == "cpu"
    device = jax.devices()[0].device_kind
    rate = matrix_rate()
    print(f"{device}, {jax.device_count()} devices; {rate / 1e9:.0f} GFLOP/s")
    print("   K   Q batch |  ours us  plain us  ratio | floor us  gap | compile s | MB")
    sizes = CPU if on_cpu else GPU
    for clients, q, batch in sizes[:1] if quick else sizes:
        job = make_job(clients, q, batch)
        rounds = max(1, (1500 if on_cpu else 60_000) // (clients * max(q, 1)))
        mine, compiling = ours(job, rounds)
        other = plain(job, rounds)
        floor = step_operations(job) / rate
        print(
            f"{clients:4d} {q:3d} {batch:5d} | {mine * 1e6:8.1f}  {other * 1e6:8.1f}"
            f"  {other / mine:5.2f} | {floor * 1e6:8.2f} {mine / floor:4.1f} |"
            f" {compiling:9.1f} | {peak_megabytes():.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
