"""Steps of methods for one machine on benchmark_bilevel's quadratic, beside ours.

benchmark_bilevel is no package: what stands here is our own plain NumPy loop of the
work it describes, not its code. Its problem has d = 100 on both levels and 1024 samples
of each, and a sample's three second derivatives have rank one:

    g_i(x, y) = 0.5 (h_i'y)^2 + 0.5 (k_i'x)^2 + (c_i'x) (e_i'y) + a_i'y + b_i'x

and f_i likewise. It stores them as matrices of d x d, and multiplies by those of a
batch: the loop `of matrices`. Ours, and the loop `of vectors`, keep the vectors. A
batch of the loops is a slice, as there; ours draws its rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_clients import Simulation
from peer_timing import Row, apart, paired

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.one_machine.saba import SABA
from fedbilevel.algorithms.one_machine.soba import SOBA
from fedbilevel.algorithms.one_machine.vrbo import VRBO
from fedbilevel.algorithms.presets import MRBO, SUSTAIN
from fedbilevel.hypergradient import Neumann, RandomNeumann
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job, Sampling

SIZE, SAMPLES, BATCH = 100, 1024, 64
Q, THETA, STEP, WEIGHT = 10, 0.005, 0.01, 0.5
INNER, PERIOD, LARGE = 3, 3, 10  # of VRBO
STEPS = 900  # in a timed call of ours, a multiple of VRBO's period
CHECKED, TOLERANCE = 18, 1e-4  # relative, in float32


def loss(x: Any, y: Any, rows: Any) -> Any:
    """Return either level's loss: the mean over rows."""
    below, above = rows["h"] @ y, rows["k"] @ x
    cross = (rows["c"] @ x) * (rows["e"] @ y)
    squares = 0.5 * (below**2 + above**2)
    return jnp.mean(squares + cross + rows["a"] @ y + rows["b"] @ x)


def made_rows() -> list[dict[str, np.ndarray]]:
    """Return the vectors of all samples, of the upper and of the lower level."""
    draw = np.random.default_rng(2442)

    def level() -> dict[str, np.ndarray]:
        def normal() -> np.ndarray:
            return draw.standard_normal((SAMPLES, SIZE))

        def basis() -> np.ndarray:
            return np.linalg.qr(draw.standard_normal((SIZE, SIZE)))[0]

        roots = np.logspace(-0.5, 0, SIZE)  # of a spectrum from 0.1 to 1
        h, k = (normal() @ (turn * roots @ turn.T) for turn in (basis(), basis()))
        e, cross = normal(), np.full(SIZE, 0.1)
        c = e * cross @ basis().T
        rows = {
            "h": h,
            "k": k,
            "c": c,
            "e": e @ basis().T,
            "a": normal(),
            "b": normal(),
        }
        return {name: leaf.astype(np.float32) for name, leaf in rows.items()}

    return [level(), level()]


class Vectors:
    """Products with the second derivatives of a batch, from their vectors."""

    def __init__(self, rows: dict[str, np.ndarray]) -> None:
        self.rows = rows

    def _product(self, left: str, right: str, v: np.ndarray, part: slice) -> np.ndarray:
        left_rows = self.rows[left][part]
        return (self.rows[right][part] @ v) @ left_rows / len(left_rows)

    def of_y(self, v: np.ndarray, part: slice) -> np.ndarray:
        """Return (d2 / dy dy) v."""
        return self._product("h", "h", v, part)

    def of_x(self, v: np.ndarray, part: slice) -> np.ndarray:
        """Return (d2 / dx dx) v."""
        return self._product("k", "k", v, part)

    def cross(self, v: np.ndarray, part: slice) -> np.ndarray:
        """Return (d2 / dx dy) v."""
        return self._product("c", "e", v, part)

    def cross_back(self, v: np.ndarray, part: slice) -> np.ndarray:
        """Return (d2 / dy dx) v."""
        return self._product("e", "c", v, part)

    def slope_y(self, x: np.ndarray, y: np.ndarray, part: slice) -> np.ndarray:
        """Return the gradient in y."""
        linear = self.rows["a"][part].mean(axis=0)
        return self.of_y(y, part) + self.cross_back(x, part) + linear

    def slope_x(self, x: np.ndarray, y: np.ndarray, part: slice) -> np.ndarray:
        """Return the gradient in x."""
        linear = self.rows["b"][part].mean(axis=0)
        return self.of_x(x, part) + self.cross(y, part) + linear


class Matrices(Vectors):
    """The same from a matrix for each sample, as the benchmark stores them."""

    def __init__(self, rows: dict[str, np.ndarray]) -> None:
        super().__init__(rows)
        pairs = (("h", "h"), ("k", "k"), ("c", "e"))
        self.stored = {
            pair: rows[pair[0]][:, :, None] * rows[pair[1]][:, None, :]
            for pair in pairs
        }

    def _product(self, left: str, right: str, v: np.ndarray, part: slice) -> np.ndarray:
        if (left, right) in self.stored:
            return (self.stored[left, right][part] @ v).mean(axis=0)
        return (v @ self.stored[right, left][part]).mean(axis=0)


@dataclass
class Machine:
    """Both levels, where they are sliced next, and a point."""

    upper: Vectors
    lower: Vectors
    whole: bool  # every batch is all rows
    draw: np.random.Generator
    turn: int = 0

    def part(self) -> slice:
        """Return the next batch."""
        if self.whole:
            return slice(None)
        self.turn += 1
        start = self.turn * BATCH % SAMPLES
        return slice(start, start + BATCH)

    def bundle(self, length: int) -> tuple:
        """Return batches for xi, zeta_0, and each factor."""
        return self.part(), self.part(), [self.part() for _ in range(length)]

    def hypergradient(self, x, y, bundle: tuple, is_random: bool) -> np.ndarray:
        """Return the series' estimate: the sum of all terms, or Q times the last."""
        xi, zeta, factors = bundle
        r = s = self.upper.slope_y(x, y, xi)
        for part in factors:
            r = r - THETA * self.lower.of_y(r, part)
            s = s + r
        z = Q * r if is_random else s
        return self.upper.slope_x(x, y, xi) - THETA * self.lower.cross(z, zeta)


def _start() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(3)
    return tuple(draw.standard_normal((2, SIZE)).astype(np.float32))


def soba(machine: Machine) -> Iterator[list]:
    """Move x, y and z at once, from one batch of each level."""
    (x, y), low, up = _start(), machine.lower, machine.upper
    z = np.zeros_like(y)
    while True:
        zeta, xi = machine.part(), machine.part()
        d_y = low.slope_y(x, y, zeta)
        d_z = low.of_y(z, zeta) - up.slope_y(x, y, xi)
        d_x = up.slope_x(x, y, xi) - low.cross(z, zeta)
        x, y, z = x - STEP * d_x, y - STEP * d_y, z - STEP * d_z
        yield [x, y]


def storm(machine: Machine, is_random: bool = False) -> Iterator[list]:
    """MRBO; or SUSTAIN, whose series has a random length."""
    x, y = _start()
    before = u = v = None
    while True:
        length = int(machine.draw.integers(Q)) if is_random else Q
        bundle, zeta = machine.bundle(length), machine.part()

        def both(x, y, bundle=bundle, zeta=zeta):
            h = machine.hypergradient(x, y, bundle, is_random)
            return h, machine.lower.slope_y(x, y, zeta)

        h, gy = both(x, y)
        if before is not None:
            h_old, gy_old = both(*before)
            h, gy = h + (1 - WEIGHT) * (u - h_old), gy + (1 - WEIGHT) * (v - gy_old)
        before, u, v = (x, y), h, gy
        x, y = x - STEP * u, y - STEP * v
        yield [x, y]


def vrbo(machine: Machine) -> Iterator[list]:
    """Large batches at the start of a period, then differences; a step is one of y."""
    x, y = _start()

    def both(x, y, bundle, zeta):
        h = machine.hypergradient(x, y, bundle, is_random=False)
        return h, machine.lower.slope_y(x, y, zeta)

    while True:
        draws = [(machine.bundle(Q), machine.part()) for _ in range(LARGE)]
        found = [both(x, y, *d) for d in draws]
        u, v = (sum(one) / LARGE for one in zip(*found, strict=True))
        old = x, y
        for _ in range(PERIOD):
            x = x - STEP * u
            for _ in range(INNER):
                sample = machine.bundle(Q), machine.part()
                (h, gy), (h_old, gy_old) = both(x, y, *sample), both(*old, *sample)
                u, v, old = u + h - h_old, v + gy - gy_old, (x, y)
                y = y - STEP * v
                yield [x, y]


def saba(machine: Machine) -> Iterator[list]:
    """SOBA with SAGA's tables over the batches."""
    (x, y), low, up = _start(), machine.lower, machine.upper
    z, parts = np.zeros_like(y), 1 if machine.whole else SAMPLES // BATCH
    tables = np.zeros((5, parts, SIZE), np.float32)
    means = np.zeros((5, SIZE), np.float32)
    while True:
        places = machine.draw.integers(parts, size=2)
        zeta, xi = (
            slice(None) if machine.whole else slice(i * BATCH, (i + 1) * BATCH)
            for i in places
        )
        found = [
            low.slope_y(x, y, zeta),
            low.of_y(z, zeta),
            low.cross(z, zeta),
            up.slope_y(x, y, xi),
            up.slope_x(x, y, xi),
        ]
        s = []
        for number, one in enumerate(found):
            place = places[0] if number < 3 else places[1]
            change = one - tables[number, place]
            s.append(change + means[number])
            tables[number, place] = one
            means[number] += change / parts
        x, y, z = x - STEP * (s[4] - s[2]), y - STEP * s[0], z - STEP * (s[1] - s[3])
        yield [x, y]


def methods() -> dict[str, tuple[Callable, Callable[[int, bool], AbstractAlgorithm]]]:
    """Return each method's loop, and ours with so many steps a round."""
    series, rates = Neumann(Q, THETA), (STEP, STEP, STEP)
    storm_values = {"c1": WEIGHT, "c2": WEIGHT, "gamma": STEP, "lam": STEP}
    letters = {"c_f": WEIGHT, "c_g": WEIGHT, "c_a": STEP, "c_b": STEP}
    parts = SAMPLES // BATCH
    return {
        "SOBA": (soba, lambda n, whole: SOBA(*rates, local_steps=n)),
        "MRBO": (
            storm,
            lambda n, whole: MRBO(series, eta=1.0, local_steps=n, **storm_values),
        ),
        "SUSTAIN": (
            lambda machine: storm(machine, is_random=True),
            lambda n, whole: SUSTAIN(
                RandomNeumann(Q, THETA), a=1.0, local_steps=n, **letters
            ),
        ),
        "VRBO": (
            vrbo,
            lambda n, whole: VRBO(series, STEP, STEP, INNER, PERIOD, LARGE),
        ),
        "SABA": (
            saba,
            lambda n, whole: SABA(*rates, 1 if whole else parts, local_steps=n),
        ),
    }


def make_job(algorithm: AbstractAlgorithm, rows: list, batch: int | None) -> Job:
    """Return our job: one client with all rows."""
    upper, lower = (jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], r) for r in rows)
    sizes = jnp.full(1, SAMPLES, jnp.int32)
    data = ClientData(upper, lower, sizes, sizes, jnp.ones(1))
    x, y = map(jnp.asarray, _start())
    return Job.of(algorithm, Problem(loss, loss), data, x, y, sampling=Sampling(batch))


def _rounds(name: str, steps: int) -> int:
    return steps // (INNER * PERIOD) if name == "VRBO" else 1


def _apart(name: str, levels: tuple[Vectors, Vectors], rows: list) -> float:
    """Raise unless some steps on all rows end where ours do."""
    loop, ours = methods()[name]
    simulation = Simulation(make_job(ours(CHECKED, True), rows, None))
    simulation.advance(_rounds(name, CHECKED))
    steps = loop(Machine(*levels, True, np.random.default_rng(0)))
    theirs = [next(steps) for _ in range(CHECKED)]
    distance = apart(simulation.point(), theirs[-1])
    if not distance < TOLERANCE:
        raise AssertionError(f"{name}: the points are {distance} apart")
    return distance


def measured() -> Iterator[Row]:
    """Yield every line of the table, each checked where lengths are not random."""
    rows = made_rows()
    storages: dict[str, tuple[Vectors, Vectors]] = {
        "matrices": (Matrices(rows[0]), Matrices(rows[1])),
        "vectors": (Vectors(rows[0]), Vectors(rows[1])),
    }
    for name, (loop, ours) in methods().items():
        simulation = Simulation(make_job(ours(STEPS, False), rows, BATCH))
        rounds = _rounds(name, STEPS)
        for kind, levels in storages.items():
            distance = None if name == "SUSTAIN" else _apart(name, levels, rows)
            steps = loop(Machine(*levels, False, np.random.default_rng(0)))
            seconds = paired(
                lambda one=simulation, many=rounds: one.advance(many),
                lambda one=steps: [next(one) for _ in range(PERIOD * INNER)],
                STEPS,
                PERIOD * INNER,
            )
            yield Row(
                f"{name}, a step at d = {SIZE}, batch {BATCH}",
                f"NumPy loop of {kind}",
                *seconds,
                distance,
                "benchmark_bilevel's work, our loop",
            )
