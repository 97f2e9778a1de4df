"""Record what 143 runs compute, to see whether a change changes a number.

    python benchmarks/record.py record FILE.npz [--only TEXT]
    python benchmarks/record.py compare FILE.npz [--only TEXT]

`record` makes the runs and stores the final x and y of each, every column of the
measured rounds, and all counts (exchanges, floats, bytes, samples, oracle calls).
`compare` makes them again and prints the largest absolute and relative difference of
each. It ends with 1 if a number differs by more than 1e-12, or a count differs. The
runs are small ones in float64: every method by its name through the command line, and
the options of methods and wrappers through Python. `--only` selects the runs whose
names contain a text; `record` then leaves the others in the file as they are. Two more
parts start processes:

    --cli       float32 commands as a user types them, compared bit for bit
    --flower    one federation over Flower on this machine, about a minute

To record an older tree, run this file with PYTHONPATH set to that tree's `src`. A
folder beside FILE.npz caches compiled programs by their content, so that a comparison
compiles only programs that changed. Use the same machine and packages for both trees.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = dict(os.environ)  # of commands that are started
# Fewer optimizations: compiling is nearly all that these runs cost.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import fedbilevel as fb  # noqa: E402
from fedbilevel import algorithms  # noqa: E402

TOLERANCE = 1e-12  # of a number, relative to it where it is over 1
ROUNDS, CLIENTS, COHORT = 4, 4, 3
COMMAND = "cli"  # how the names of float32 commands begin
Run = Callable[[], Any]  # makes a run and returns its Result
Kept = dict[str, Any]  # arrays by name, and texts that must be the same


def main() -> int:
    """Make the runs; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--missing", action="store_true", help="runs not in the file")
    parser.add_argument("--cli", action="store_true", help="float32 commands instead")
    parser.add_argument("--flower", action="store_true", help="a federation instead")
    given = parser.parse_args()
    place = given.file.resolve().parent
    place.mkdir(parents=True, exist_ok=True)
    ENVIRONMENT["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"] = str(
        place / "compiled"
    )
    if given.cli or given.flower:
        every = flower_runs() if given.flower else commands()
    else:
        prepare()
        every = {**wrapped(), **corrected(), **optional(), **by_name()}
    known: Kept = {}
    if given.file.exists():
        with np.load(given.file) as held:
            known = {name: held[name] for name in held.files}
    there = {key.split("|")[0] for key in known} if given.missing else set()
    chosen = {n: run for n, run in every.items() if given.only in n and n not in there}
    if not chosen:
        sys.exit(f"no run is left with '{given.only}' in its name: {', '.join(every)}")
    failed = []
    for number, (name, make) in enumerate(chosen.items(), 1):
        began = time.process_time()
        try:
            made = {f"{name}|{key}": value for key, value in kept(make()).items()}
        except Exception as error:
            made = {f"{name}|error": f"{type(error).__name__}: {error}"}
        if given.action == "record":
            known = {k: v for k, v in known.items() if not k.startswith(f"{name}|")}
            known |= made
            np.savez_compressed(given.file, **known)
            told = str(made.get(f"{name}|error", "recorded"))
        else:
            told = compared(name, known, made)
        if told.startswith("differs"):
            failed.append(name)
        seconds = time.process_time() - began
        print(f"{number}/{len(chosen)} {name}: {told} ({seconds:.1f} s)", flush=True)
    if failed:
        print(f"{len(failed)} of {len(chosen)} differ: {'; '.join(failed)}")
    return 1 if failed else 0


def prepare() -> None:
    """Choose float64 on one device, before JAX computes anything."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 1)
    # Without lines of source a compiled program is found again after code moved.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    place = Path(os.environ["XDG_CACHE_HOME"]) / "fedbilevel" / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.devices()
    warnings.simplefilter("ignore")


# What is kept of a run ---------------------------------------------------------------


def kept(result: Any) -> Kept:
    """Return what has to stay the same."""
    point = {f"point|{name}": value for name, value in result.point.items()}
    columns = {f"column|{name}": value for name, value in result.columns.items()}
    counts = {**result.counts, "events": len(result.events)}
    counts.pop("wire", None)  # headers hold times, whose length varies
    return {**point, **columns, "counts": json.dumps(counts, sort_keys=True)}


def compared(name: str, known: Kept, made: Kept) -> str:
    """Say how a run differs from the recorded one."""
    before = {k: v for k, v in known.items() if k.startswith(f"{name}|")}
    if not before:
        return "differs: it was not recorded"
    if before.keys() != made.keys():
        names = sorted(key.split("|", 1)[1] for key in before.keys() ^ made.keys())
        errors = [v for k, v in made.items() if k.endswith("|error")]
        return f"differs: only in one of the two: {', '.join([*names, *errors])}"
    largest = relative = judged = 0.0
    for key, value in made.items():
        old, new = np.asarray(before[key]), np.asarray(value)
        if old.shape != new.shape or old.dtype.kind != new.dtype.kind:
            return f"differs: {key} was {old.dtype}{old.shape}"
        if new.dtype.kind != "f":
            if not np.array_equal(old, new):
                return f"differs: {key} was {old}, is {new}"
            continue
        if name.startswith(COMMAND) and old.tobytes() != new.tobytes():
            return f"differs: {key}, by {np.max(np.abs(old - new)):.2g}"
        if not np.array_equal(np.isfinite(old), np.isfinite(new)):
            return f"differs: {key} is finite in one of the two"
        fine = np.isfinite(old)
        gap, size = np.abs(new[fine] - old[fine]), np.abs(old[fine])
        over = np.divide(gap, size, out=np.zeros_like(gap), where=size > 0)
        largest = max(largest, float(np.max(gap, initial=0)))
        relative = max(relative, float(np.max(over, initial=0)))
        judged = max(judged, float(np.max(gap / np.maximum(1, size), initial=0)))
    word = "differs" if judged > TOLERANCE else "same"
    return f"{word}: absolute {largest:.1e}, relative {relative:.1e}"


# A problem of our own: quadratics with dx = 2 and dy = 3 -----------------------------


def upper(x, y, rows):
    """Return the mean over rows of 0.5 |y - b|^2 + 0.25 |x|^2 + c'x."""
    distance = 0.5 * jnp.mean(jnp.sum((y - rows["b"]) ** 2, axis=-1))
    return distance + 0.25 * jnp.sum(x**2) + jnp.mean(rows["c"], axis=0) @ x


def lower(x, y, rows):
    """Return the mean over rows of 0.5 y'Ay + x'Cy + a'y."""
    A, C, a = (jnp.mean(rows[name], axis=0) for name in ("A", "C", "a"))
    return 0.5 * y @ A @ y + x @ C @ y + a @ y


def client_data(clients: int = CLIENTS) -> Any:
    """Return clients of five rows each, whose quadratics differ."""
    draw, uppers, lowers = np.random.default_rng(0), [], []
    for _ in range(clients):
        basis, _ = np.linalg.qr(draw.standard_normal((3, 3)))
        noise = 0.05 * draw.standard_normal((5, 3, 3))
        A = basis @ np.diag([0.5, 1.0, 2.0]) @ basis.T
        A = A + noise + noise.swapaxes(1, 2)
        C = 0.5 * draw.standard_normal((2, 3)) + 0.03 * draw.standard_normal((5, 2, 3))
        a, b = (draw.standard_normal((1, 3)) for _ in range(2))
        spread = [0.3 * draw.standard_normal((5, 3)) for _ in range(2)]
        lowers.append({"A": A, "C": C, "a": a + spread[0]})
        c = 0.3 * draw.standard_normal((5, 2))
        uppers.append({"b": b + spread[1], "c": c})
    return fb.ClientData.from_clients(uppers, lowers)


def on_quadratics(
    algorithm: Callable[[], Any],
    cohort: int | None = None,
    rounds: int = ROUNDS,
    batch: int | None = 2,
    runtime: str = "SimulatorRuntime",
    pooled: bool = False,
) -> Run:
    """Return a run on the problem above."""

    def run():
        data = client_data().pooled() if pooled else client_data()
        return fb.run(
            fb.Problem(upper, lower),
            data,
            (jnp.asarray([1.0, 2.0]), jnp.asarray([-1.0, -2.0, -3.0])),
            algorithm(),
            rounds=rounds,
            seed=1,
            sampling=fb.Sampling(batch, cohort),
            runtime=getattr(fb, runtime),
        )

    return run


# Methods, with options as Python writes them -----------------------------------------


def of(name: str, p: int = 2) -> Callable[..., Any]:
    """Return what makes a method of one loop, given its options."""
    series, decay = fb.Neumann(1, 0.3), fb.CubeRootDecay
    storm = {"eta": 0.2, "gamma": 0.4, "tau": 0.3, "c_nu": 4.0, "c_omega": 5.0}
    values: dict[str, tuple] = {
        "LocalBSGM": (series, 0.1, 3.0, 4.0, 0.5, 0.8),
        "LocalBSGVRM": (series, decay(0.3, 8.0), 5.0, 6.0, 0.5, 0.8),
        "FedBiO": (0.1, 0.2, 0.15),
        "FedBiOAcc": (),
        "FedBiOMomentum": (0.1, 0.2, 0.15, 0.5, decay(2.0, 8.0)),
        "SimFBO": (0.1, 0.2, 0.15, 0.08, 0.15, 0.1),
        "FedF2SA": (0.1, 0.2, 0.3),
    }
    named = {"a": decay(0.5, 8.0), "c_q": 6.0, **storm} if name == "FedBiOAcc" else {}
    kind = getattr(fb, name)
    return lambda **more: kind(*values[name], **named, local_steps=p, **more)


def corrected() -> dict[str, Run]:
    """Return every method of one loop with what corrects drift, on all and a cohort."""
    methods = "LocalBSGM LocalBSGVRM FedBiO FedBiOAcc FedBiOMomentum SimFBO FedF2SA"
    runs: dict[str, Run] = {}
    for name in methods.split():
        for drift, cohort in (("controls", COHORT), ("anchor", None)):
            make = of(name)
            runs[f"{name}, {drift}"] = on_quadratics(
                lambda make=make, drift=drift: make(drift=drift), cohort
            )
    return runs


def optional() -> dict[str, Run]:
    """Return methods with their other options."""
    cohort = {"cohort": COHORT}
    rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("LocalBSGM", {"warm_start": 3}, {}),
        ("LocalBSGVRM", {"warm_start": 2, "first_batch": 3}, {}),
        ("LocalBSGVRM", {"own_lower": True}, {}),
        ("LocalBSGVRM", {"own_lower": True, "absent": "forget"}, cohort),
        ("LocalBSGVRM", {"absent": "keep"}, cohort),
        ("LocalBSGVRM", {"absent": "correct"}, cohort),
        ("LocalBSGVRM", {"absent": "forget", "drift": "controls"}, cohort),
        ("FedBiOAcc", {"absent": "keep"}, cohort),
        ("FedBiOAcc", {"absent": "correct", "alternating": True}, cohort),
        ("FedBiOAcc", {"absent": "forget"}, cohort),
        ("FedBiOAcc", {"absent": "correct", "drift": "controls"}, cohort),
        ("FedBiOAcc", {"radius": 0.1}, {}),
        ("FedBiO", {"radius": 0.1}, {}),
        ("FedBiO", {"radius": 0.1, "alternating": True, "drift": "controls"}, cohort),
        ("FedBiO", {"distance": 1e-3}, {}),
        ("FedBiO", {"distance": 1e-3, "drift": "controls"}, cohort),
        ("FedBiO", {"alternating": True, "drift": "anchor"}, cohort),
        ("FedBiOMomentum", {"radius": 0.1, "drift": "controls"}, {}),
        ("SimFBO", {"radius": 0.1}, {}),
        ("SimFBO", {"distance": 1e-3}, {}),
        ("SimFBO", {"fewest_steps": 1}, {}),
        ("SimFBO", {"fewest_steps": 1, "normalized": True}, cohort),
        ("FedF2SA", {"alternating": True}, {}),
        ("FedF2SA", {"degree": 4, "drift": "anchor"}, cohort),
    ]
    runs: dict[str, Run] = {}
    for name, options, where in rows:
        words = ", ".join(f"{option}={value}" for option, value in options.items())
        size = 3 if "fewest_steps" in options else 2
        runs[f"{name}, {words}{', cohort' if where else ''}"] = on_quadratics(
            lambda name=name, options=options, size=size: of(name, size)(**options),
            **where,
        )
    reference: dict[str, Any] = {"runtime": "ReferenceRuntime", "rounds": 2}
    eta, series = fb.CubeRootDecay(0.5, 8.0), fb.Neumann(1, 0.3)
    scaled = (series, eta, 0.3, 0.8, 4.0, 5.0)
    runs |= {
        "AdaFBiO, own_lower": on_quadratics(
            lambda: fb.AdaFBiO(*scaled, local_steps=2, own_lower=True), COHORT
        ),
        "STEM, first_batch=3": on_quadratics(
            lambda: fb.STEM(0.2, 4.0, eta, first_batch=3, local_steps=2)
        ),
        "reference runtime, FedBiO, controls": on_quadratics(
            lambda: of("FedBiO")(drift="controls"), COHORT, **reference
        ),
        "reference runtime, LocalBSGVRM": on_quadratics(
            lambda: of("LocalBSGVRM")(first_batch=2), **reference
        ),
        "pooled rows, SOBA": on_quadratics(
            lambda: fb.SOBA(0.1, 0.2, 0.15, local_steps=2), pooled=True
        ),
    }
    return runs


# Wrappers ----------------------------------------------------------------------------


def measured(drift: str | None = None, lower: float = 0.25) -> Any:
    """Return FedBiO whose steps are in units that a run measures."""
    shares = (fb.OfDistance(1.0), fb.OfCurvature(lower), fb.OfCurvature(0.25))
    return fb.FedBiO(*shares, local_steps=2, drift=drift)


def founding(p: int = 2) -> Any:
    """Return LocalBSGM whose steps and series are in units that a run measures."""
    return fb.LocalBSGM(
        fb.Neumann(2, fb.OfCurvature(0.5)),
        1.0,
        0.3,
        0.4,
        fb.OfDistance(1.0),
        fb.OfCurvature(0.25),
        local_steps=p,
    )


def wrapped() -> dict[str, Run]:
    """Return methods inside of wrappers."""

    def bio() -> Any:
        return fb.FedBiO(0.1, 0.2, 0.15, local_steps=1)

    def local(inside: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        return lambda: fb.LocalOptimizer(inside(), optimizer, local_steps=3)

    def server(inside: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        return lambda: fb.ServerOptimizer(inside(), optimizer)

    def steady(inside: Callable[[], Any], guarded: bool) -> Callable[[], Any]:
        return lambda: fb.SteadySteps(inside(), safeguard=guarded)

    heavy, adam = optax.sgd(0.7, momentum=0.5), optax.adam(0.05)
    blocks = fb.Pair(optax.adam(0.02), None)
    controls = {"drift": "controls"}

    def too_long() -> Any:
        return fb.FedBiO(0.1, 5.0, 0.15, local_steps=2)

    return {
        "LocalOptimizer, momentum, FedBiO": on_quadratics(local(bio, heavy)),
        "LocalOptimizer, adam, LocalBSGM": on_quadratics(
            local(of("LocalBSGM", 1), adam), COHORT
        ),
        "LocalOptimizer, adam of x, LocalBSGVRM": on_quadratics(
            local(of("LocalBSGVRM", 1), blocks)
        ),
        "ServerOptimizer, momentum, FedBiO, controls": on_quadratics(
            server(lambda: of("FedBiO")(**controls), heavy), COHORT
        ),
        "ServerOptimizer, adam, LocalBSGM": on_quadratics(
            server(of("LocalBSGM"), adam)
        ),
        "ServerOptimizer, LocalOptimizer, FedBiO": on_quadratics(
            server(local(bio, heavy), heavy)
        ),
        "SteadySteps, FedBiO": on_quadratics(steady(measured, True), rounds=12),
        "SteadySteps, no safeguard, FedBiO": on_quadratics(steady(measured, False)),
        "SteadySteps, FedBiO, controls": on_quadratics(
            steady(lambda: measured("controls"), True), COHORT, rounds=12
        ),
        "SteadySteps, LocalBSGM": on_quadratics(steady(founding, True), COHORT),
        "SteadySteps, no safeguard, LocalBSGM": on_quadratics(steady(founding, False)),
        "SteadySteps, momentum of y and z, FedBiO": on_quadratics(
            steady(lambda: measured(lower=0.01), True), rounds=200, batch=None
        ),
        "SteadySteps, diverges and rolls back": on_quadratics(
            steady(too_long, True), rounds=30
        ),
        "SteadySteps, ServerOptimizer, FedBiO": on_quadratics(
            steady(server(measured, heavy), True)
        ),
    }


# The command line --------------------------------------------------------------------


def command(*words: str) -> Run:
    """Return a run of the command line inside of this process."""

    def run():
        from fedbilevel.cli.app import app

        with tempfile.TemporaryDirectory() as folder:
            place = str(Path(folder) / "run")
            said = ["run", *words, "--precision", "float64", "--json", "--out", place]
            with contextlib.redirect_stdout(io.StringIO()):
                app(said, standalone_mode=False)
            return fb.Result.load(place, with_model=False)

    return run


def own_task(clients: int = CLIENTS) -> fb.Task:
    """Return the problem above as a task of the command line."""
    steps = {"upper_step": "0.1", "lower_step": "0.2", "auxiliary_step": "0.15"}
    weights = {"upper_weight": "0.3", "lower_weight": "0.4"}
    sizes = {"rounds": ROUNDS, "local_steps": 2, "batch": 2, "q": 2, "theta": "0.3"}
    auto = {"auto": "upper_step lower_step auxiliary_step theta"}
    chosen = {**sizes, **steps, **weights, **auto}
    start = (jnp.asarray([1.0, 2.0]), jnp.asarray([-1.0, -2.0, -3.0]))
    return fb.Task(
        fb.Problem(upper, lower), client_data(clients), *start, recommended=chosen
    )


def by_name() -> dict[str, Run]:
    """Return every method by its name, and some with more options."""

    def named(algorithm: str, *words: str) -> Run:
        return command(f"{__file__}:own_task", "--algorithm", algorithm, *words)

    few, plain = ("--participants", str(COHORT)), "--no-safeguard"
    clip = ("--clip", "quantile:0.7")
    must = {"pbgd-free": ("--set", "flat=yes")}
    runs = {
        f"name {one}": named(one, *few, plain, *must.get(one, ()))
        for one in algorithms.names()
    }
    for one in "local-bsgm local-bsgvrm fedbio-controls fednest soba".split():
        runs[f"guarded {one}"] = named(one, *few)
    for one in "local-bsgvrm fednest simfbo".split():
        runs[f"clip quantile {one}"] = named(one, *few, plain, *clip)
    runs |= {
        "clip quantile fedbio-controls": named("fedbio-controls", plain, *clip),
        "clip quantile fedbio, guarded": named("fedbio", *few, *clip),
        "two-client fedbio, drift=controls": command(
            *"two-client --algorithm fedbio --set drift=controls --rounds 8".split()
        ),
        "quadratic local-bsgvrm": command(
            *"quadratic --algorithm local-bsgvrm --clients 3 --rounds 4".split(),
            *"--local-steps 2 --set spread=0.5 --no-safeguard".split(),
        ),
        "regularization local-bsgvrm": command(
            *"regularization --algorithm local-bsgvrm --clients 3 --rounds 4".split(),
            *"--local-steps 3 --batch 8 --no-safeguard --set rows=300".split(),
        ),
    }
    return runs


def started(*words: str) -> Run:
    """Return a command in a process of its own, as a user starts it."""

    def run():
        with tempfile.TemporaryDirectory() as folder:
            place = str(Path(folder) / "run")
            said = [sys.executable, "-m", "fedbilevel.cli", *words, "--out", place]
            subprocess.run(said, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
            return fb.Result.load(place, with_model=False)

    return run


def commands() -> dict[str, Run]:
    """Return float32 commands; what they compute is compared bit for bit."""
    lines = [
        "two-client",
        "regularization",
        "cleaning",
        "two-client --algorithm fedbio --set drift=controls",
        "regularization --algorithm fedbio-controls",
        "regularization --algorithm local-bsgvrm --set warm_start=5 --clip quantile",
        "regularization --algorithm local-bsgm --set drift=anchor --no-safeguard",
    ]
    return {
        f"{COMMAND} {line}": started(
            "run", *line.split(), "--rounds", "5", "--seed", "3"
        )
        for line in lines
    }


def flower_runs() -> dict[str, Run]:
    """Return a federation of real processes."""
    line = (
        "federate quadratic --algorithm local-bsgvrm --clients 2 --rounds 3 "
        "--local-steps 2 --precision float64 --no-safeguard --set spread=0.5"
    )
    return {"flower local-bsgvrm": started(*line.split())}


if __name__ == "__main__":
    sys.exit(main())
