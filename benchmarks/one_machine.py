"""Methods of one machine on the quadratic of the public benchmark of bilevel methods.

    python benchmarks/one_machine.py FOLDER [SAMPLES]

100 variables on each level, 1024 rows each, rank-one Hessians of a row whose mean has
eigenvalues from 0.1 to 1, cross terms whose mean has singular values from 0.01 to 0.1,
batches of 64. Told is Phi(x) - min Phi, in closed form, against samples and seconds.
Every method is tuned over 12 points of its two steps, from two random seeds, and runs
from three others; all may draw as many samples. FOLDER gets the results and curves.png.
What is there is not run again.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import MRBO, SABA, SOBA, SRBA, SUSTAIN, VRBO, ClientData, Problem
from fedbilevel.hypergradient import Neumann, RandomNeumann
from fedbilevel.report import draw_curves
from fedbilevel.result import Result
from fedbilevel.runtime import Ledger, Sampling, configure
from fedbilevel.studies.comparison import Contender, compared
from fedbilevel.studies.setting import Setting

SIZE, ROWS, BATCH = 100, 1024, 64
LARGE = ROWS // BATCH  # batches of a full pass, of methods that make one now and then
THETA, TERMS = 0.4, 50  # leave (1 - 0.04)^50 = 13 % of the flattest direction out
STEPS_X = (0.01, 0.03, 0.1, 0.3)
STEPS_Y = (0.03, 0.1, 0.2)
LOOKS, SEEDS = 50, 3
METHODS = ("soba", "saba", "srba", "vrbo", "mrbo", "sustain")


def orthonormal(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return random orthonormal columns."""
    return np.linalg.qr(generator.normal(size=(rows, columns)))[0]


def rows_with_mean(
    generator: np.random.Generator, low: float, high: float, symmetric: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (u_i, v_i) whose mean of u_i v_i' has values from low to high."""
    root = np.sqrt(np.logspace(np.log10(low), np.log10(high), SIZE))
    common = np.sqrt(ROWS) * orthonormal(generator, ROWS, SIZE) * root
    left = orthonormal(generator, SIZE, SIZE)
    right = left if symmetric else orthonormal(generator, SIZE, SIZE)
    return common @ left.T, common @ right.T


def level(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the rows of a level."""
    a, _ = rows_with_mean(generator, 0.1, 1, True)
    c, _ = rows_with_mean(generator, 0.1, 1, True)
    u, v = rows_with_mean(generator, 0.01, 0.1, False)
    d, e = generator.normal(size=(2, ROWS, SIZE))
    return {"a": a, "c": c, "u": u, "v": v, "d": d, "e": e}


def loss(x: jax.Array, y: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    """Return (a'y)^2/2 + (c'x)^2/2 + (u'x)(v'y) + d'y + e'x, in the mean."""
    squares = ((rows["a"] @ y) ** 2 + (rows["c"] @ x) ** 2) / 2
    cross = (rows["u"] @ x) * (rows["v"] @ y)
    return jnp.mean(squares + cross + rows["d"] @ y + rows["e"] @ x)


def means(rows: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the Hessians in y and x, the cross matrix and the linear terms."""

    def product(left: str, right: str) -> np.ndarray:
        return rows[left].T @ rows[right] / ROWS

    linear = rows["d"].mean(0), rows["e"].mean(0)
    return product("a", "a"), product("c", "c"), product("u", "v"), *linear


def closed_form(upper: tuple, lower: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Return H and b of Phi(x) = x'Hx/2 + b'x + constant."""
    A, C, M, d, e = upper
    H, _, N, h, _ = lower
    # y*(x) = W x + w.
    W, w = -np.linalg.solve(H, N.T), -np.linalg.solve(H, h)
    hessian = C + W.T @ A @ W + M @ W + (M @ W).T
    return hessian, e + W.T @ (A @ w + d) + M @ w


def made() -> Setting:
    """Draw both levels until Phi is convex."""
    generator = np.random.default_rng(0)
    upper, lower = level(generator), level(generator)
    H, b = closed_form(means(upper), means(lower))
    while np.linalg.eigvalsh(H)[0] <= 0:
        upper, lower = level(generator), level(generator)
        H, b = closed_form(means(upper), means(lower))
    minimum = jnp.asarray(-np.linalg.solve(H, b), jnp.float32)
    hessian = jnp.asarray(H, jnp.float32)

    def metrics(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        apart = x - minimum
        return {"value_gap": apart @ (hessian @ apart) / 2}

    return Setting(
        Problem(loss, loss),
        ClientData.from_clients([upper], [lower]),
        (jnp.zeros(SIZE), jnp.zeros(SIZE)),
        metrics,
        headline="value_gap",
        sampling=Sampling(BATCH),
        tuned_by="value_gap",
    )


def candidates(name: str) -> list[Any]:
    """Return the 12 candidates of a method."""
    series, random = Neumann(TERMS, THETA), RandomNeumann(TERMS, THETA)
    storm = {"local_steps": 10}
    make = {
        "soba": lambda x, y: SOBA(x, y, y, local_steps=10),
        "saba": lambda x, y: SABA(x, y, y, parts=LARGE, local_steps=10),
        "srba": lambda x, y: SRBA(x, y, y, period=LARGE, large_batch=LARGE),
        "vrbo": lambda x, y: VRBO(
            series, x, y, inner_steps=3, period=LARGE, large_batch=LARGE
        ),
        "mrbo": lambda x, y: MRBO(series, 1.0, 0.1, 0.1, x, y, **storm),
        "sustain": lambda x, y: SUSTAIN(random, 1.0, 0.1, 0.1, x, y, **storm),
    }[name]
    return [make(x, y) for x in STEPS_X for y in STEPS_Y]


def measured(setting: Setting, name: str, samples: int, folder: Path) -> None:
    """Tune a method, run it with so many samples, and keep its results."""
    tried = candidates(name)
    ledger = Ledger(setting.job(tried[0]))
    first, second = ledger.cumulative(jax.random.key(0), 2)["samples"]
    rounds = max(int(samples // (second - first)), 1)
    found = compared(
        setting,
        {name: Contender(tried, True)},
        rounds,
        range(SEEDS),
        tuning={"rungs": 1, "count": 2},
        measure_every=max(rounds // LOOKS, 1),
        task="quadratic of the benchmark",
        config={},
    )
    for result in found.results[name]:
        result.save(folder / name / f"seed-{result.config['seed']}")


def main(folder: Path, samples: int = 2_000_000) -> None:
    """Compare the methods, each with as many samples."""
    configure()
    setting, results = made(), {}
    for name in METHODS:
        places = [folder / name / f"seed-{seed}" for seed in range(SEEDS)]
        if not all((place / "result.json").exists() for place in places):
            measured(setting, name, samples, folder)
        results[name] = many = [Result.load(place) for place in places]
        gap = np.mean([one.final["value_gap"] for one in many])
        spent = np.mean([one.seconds["run"] for one in many])
        drawn = many[0].columns["samples"][-1]
        print(f"{name}: {gap:.3g}, {spent:.2g} s, {drawn:,} samples", flush=True)
    (folder / "curves.png").write_bytes(draw_curves(results, "value_gap", 1e-3))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
