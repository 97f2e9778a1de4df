# pyright: reportMissingImports=false
"""FedNest and FedBiO as loops over clients in PyTorch, beside our simulator.

The loops are written from the listings in `fedbilevel.algorithms.nested.fednest` and
`fedbilevel.algorithms.local.fedbio`: gradients by `torch.autograd`, products by
differentiating twice, one client after the other, one thread. They count what they
evaluate and draw; the counts must be those of our run. With all rows in place of drawn
ones both must come to the same point.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_timing import Row, apart, paired

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, Stopping
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.counts import count
from fedbilevel.runtime.stopping import Rule, Track

CLIENTS, ROWS, BATCH, FACTORS, LOCAL_STEPS = 16, 200, 32, 5, 5
FEATURES, WIDTH, CLASSES = 784, 200, 10
STEP, BOUND = 0.01, 100.0  # of every move; 1/ell of the series
ROUNDS_AT_ONCE = 10
CHECKED_ROUNDS, TOLERANCE = 2, 1e-4  # relative, in float32
Leaves = list[np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model: its losses for JAX and for PyTorch, and where it starts."""

    name: str
    jax_losses: tuple[Callable, Callable]
    torch_losses: tuple[Callable, Callable]
    x: Leaves
    y: Leaves


def _losses(nn: Any, exp: Callable, has_network: bool) -> tuple[Callable, Callable]:
    """Write both losses with the functions of either library."""

    def fit(x: Any, y: Any, rows: Any) -> Any:
        features = rows["features"]
        if has_network:
            features = nn.relu(features @ x[0].T + x[1])
        scores = features @ y[0].T + (y[1] if has_network else 0.0)
        return -(rows["target"] * nn.log_softmax(scores, -1)).sum(-1).mean()

    def lower(x: Any, y: Any, rows: Any) -> Any:
        if has_network:
            penalty = 0.05 * sum((leaf**2).sum() for leaf in y)
        else:
            penalty = 0.5 * (exp(x[0]) * y[0] ** 2).sum()
        return fit(x, y, rows) + penalty

    return fit, lower


def tasks() -> list[Task]:
    """Return softmax regression with strengths above, and a network's two parts."""
    import torch

    draw = np.random.default_rng(0)
    hidden = [0.03 * draw.standard_normal((WIDTH, FEATURES)), np.zeros(WIDTH)]
    head = [0.1 * draw.standard_normal((CLASSES, WIDTH)), np.zeros(CLASSES)]
    softmax = [np.full(FEATURES, -5.0)], [np.zeros((CLASSES, FEATURES))]
    shapes = {"softmax 784-10": softmax, "network 784-200-10": (hidden, head)}
    return [
        Task(
            name,
            _losses(jax.nn, jnp.exp, "network" in name),
            _losses(torch.nn.functional, torch.exp, "network" in name),
            *([leaf.astype(np.float32) for leaf in level] for level in levels),
        )
        for name, levels in shapes.items()
    ]


def made_rows() -> dict[str, np.ndarray]:
    """Return random rows of both levels, for every client."""
    draw = np.random.default_rng(1)
    shape = (2, CLIENTS, ROWS)
    labels = draw.integers(0, CLASSES, shape)
    return {
        "features": draw.standard_normal((*shape, FEATURES), np.float32),
        "target": np.eye(CLASSES, dtype=np.float32)[labels],
    }


class Loop:
    """The oracles of all clients in PyTorch, and a count of what they were asked."""

    def __init__(self, task: Task, rows: dict[str, np.ndarray], batch: int | None):
        import torch

        self.torch = torch
        self.upper, self.lower = task.torch_losses
        self.rows = {name: torch.tensor(leaf) for name, leaf in rows.items()}
        self.batch = batch
        self.x = [torch.tensor(leaf) for leaf in task.x]
        self.y = [torch.tensor(leaf) for leaf in task.y]
        self.z = [torch.zeros_like(leaf) for leaf in self.y]
        self.calls: Counter[str] = Counter()
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, level: str, client: int) -> dict:
        """Draw rows of the upper (0) or lower (1) level of a client."""
        mine = {
            n: r[("upper", "lower").index(level), client] for n, r in self.rows.items()
        }
        if self.batch is None:
            return mine
        self.calls[f"{level}_samples"] += self.batch
        size = (self.batch,)
        places = self.torch.randint(ROWS, size, generator=self.generator)
        return {name: leaf[places] for name, leaf in mine.items()}

    def _gradient(self, loss: Any, at: list, **more: Any) -> list:
        found = self.torch.autograd.grad(loss, at, allow_unused=True, **more)
        zero = self.torch.zeros_like
        return [zero(w) if g is None else g for w, g in zip(at, found, strict=True)]

    def upper_gradient(self, x: list, y: list, rows: dict, of: str) -> list:
        """Return fx or fy, whichever is needed."""
        self.calls["upper_gradients"] += 1
        leaves = _tracked(x if of == "x" else y)
        at = (leaves, y) if of == "x" else (x, leaves)
        loss = self.upper(*at, rows)
        if not loss.requires_grad:
            return [self.torch.zeros_like(leaf) for leaf in leaves]
        return self._gradient(loss, leaves)

    def lower_gradient(self, x: list, y: list, rows: dict) -> list:
        """Return gy."""
        self.calls["lower_gradient"] += 1
        leaves = _tracked(y)
        return self._gradient(self.lower(x, leaves, rows), leaves)

    def hessian_product(self, x: list, y: list, v: list, rows: dict) -> list:
        """Return (d2 g / dy dy) v."""
        self.calls["hessian_product"] += 1
        leaves = _tracked(y)
        slope = self._gradient(self.lower(x, leaves, rows), leaves, create_graph=True)
        return self._gradient(slope, leaves, grad_outputs=v)

    def cross_product(self, x: list, y: list, v: list, rows: dict) -> list:
        """Return (d2 g / dx dy) v."""
        self.calls["cross_product"] += 1
        above, below = _tracked(x), _tracked(y)
        slope = self._gradient(self.lower(above, below, rows), below, create_graph=True)
        return self._gradient(slope, above, grad_outputs=v)


def _tracked(leaves: list) -> list:
    return [leaf.detach().requires_grad_() for leaf in leaves]


def _moved(w: list, step: float, d: list) -> list:
    return [leaf - step * one for leaf, one in zip(w, d, strict=True)]


def _mean(found: list[list]) -> list:
    return [sum(leaves) / len(leaves) for leaves in zip(*found, strict=True)]


def _difference(now: list, then: list) -> list:
    return [a - b for a, b in zip(now, then, strict=True)]


def fednest_round(loop: Loop) -> None:
    """Run FedInn once, FedIHGP with the whole series, and FedOut."""
    everyone, part = range(CLIENTS), STEP / LOCAL_STEPS
    x, y = loop.x, loop.y
    q = _mean([loop.lower_gradient(x, y, loop.draw("lower", k)) for k in everyone])
    ends = []
    for k in everyone:
        own = y
        for _ in range(LOCAL_STEPS):
            rows = loop.draw("lower", k)
            now, then = (loop.lower_gradient(x, at, rows) for at in (own, y))
            own = _moved(own, part, _moved(_difference(now, then), -1.0, q))
        ends.append(own)
    y = loop.y = _mean(ends)
    fy = [loop.upper_gradient(x, y, loop.draw("upper", k), "y") for k in everyone]
    p = total = [leaf / BOUND for leaf in _mean(fy)]
    for _ in range(FACTORS):
        products = [
            loop.hessian_product(x, y, p, loop.draw("lower", k)) for k in everyone
        ]
        p = _moved(p, 1 / BOUND, _mean(products))
        total = _moved(total, -1.0, p)
    found = []
    for k in everyone:
        direct = loop.upper_gradient(x, y, loop.draw("upper", k), "x")
        indirect = loop.cross_product(x, y, total, loop.draw("lower", k))
        found.append(_difference(direct, indirect))
    h, ends = _mean(found), []
    for k in everyone:
        own = x
        for _ in range(LOCAL_STEPS):
            rows = loop.draw("upper", k)
            now, then = (loop.upper_gradient(at, y, rows, "x") for at in (own, x))
            own = _moved(own, part, _moved(_difference(now, then), -1.0, h))
        ends.append(own)
    loop.x = _mean(ends)


def fedbio_round(loop: Loop) -> None:
    """Run local steps on x, y and z from one point, then average all three."""
    ends = []
    for k in range(CLIENTS):
        x, y, z = loop.x, loop.y, loop.z
        for _ in range(LOCAL_STEPS):
            omega = loop.lower_gradient(x, y, loop.draw("lower", k))
            product = loop.hessian_product(x, y, z, loop.draw("lower", k))
            fy = loop.upper_gradient(x, y, loop.draw("upper", k), "y")
            fx = loop.upper_gradient(x, y, loop.draw("upper", k), "x")
            nu = _difference(fx, loop.cross_product(x, y, z, loop.draw("lower", k)))
            x, y, z = (
                _moved(x, STEP, nu),
                _moved(y, STEP, omega),
                _moved(z, STEP, _difference(product, fy)),
            )
        ends.append((x, y, z))
    loop.x, loop.y, loop.z = (_mean([one[i] for one in ends]) for i in range(3))


def methods() -> dict[str, tuple[AbstractAlgorithm, Callable[[Loop], None]]]:
    """Return our method and its loop, by name."""
    fednest = FedNest(
        alpha=STEP,
        beta=STEP,
        inner_rounds=1,
        local_steps=LOCAL_STEPS,
        ell=BOUND,
        terms=FACTORS,
        random_length=False,
    )
    fedbio = FedBiO(STEP, STEP, STEP, local_steps=LOCAL_STEPS)
    return {"FedNest": (fednest, fednest_round), "FedBiO": (fedbio, fedbio_round)}


class Simulation:
    """Our simulator, advanced by some rounds at a call."""

    def __init__(self, job: Job) -> None:
        self.job, self.runtime = job, SimulatorRuntime(job)
        self.state, _ = self.runtime.start()

    def advance(self, rounds: int) -> None:
        """Run rounds without a measurement."""
        last = np.asarray([10**6], np.int32)
        rule, track = Rule.of(Stopping(), last[0]), Track.start()
        span = Span(0, rounds, 10**6, 10**6, last, rule, track, ends=False)
        self.state = self.runtime.advance(self.state, span).state

    def point(self) -> list:
        """Return the leaves of x and y."""
        server = self.runtime.fetch(self.state).server
        return jax.tree.leaves(self.job.algorithm.point(server))


def make_job(
    task: Task, algorithm: AbstractAlgorithm, rows: dict, batch: int | None
) -> Job:
    """Return our job on the same rows."""
    upper, lower = ({n: jnp.asarray(r[i]) for n, r in rows.items()} for i in (0, 1))
    sizes = jnp.full(CLIENTS, ROWS, jnp.int32)
    data = ClientData(upper, lower, sizes, sizes, jnp.ones(CLIENTS))
    start = (tuple(map(jnp.asarray, level)) for level in (task.x, task.y))
    problem, sampling = Problem(*task.jax_losses), Sampling(batch)
    return Job.of(algorithm, problem, data, *start, sampling=sampling)


def check_counts(job: Job, loop: Loop, one_round: Callable[[Loop], None]) -> str:
    """Raise unless one round of both evaluates and draws as much; say how much."""
    told = count(job, 1)
    expected = Counter(told["calls"]) + Counter(told["samples"])
    loop.calls.clear()
    one_round(loop)
    if loop.calls != expected:
        raise AssertionError(f"counted {dict(loop.calls)}, ours {dict(expected)}")
    rows = sum(told["samples"].values())
    return f"{sum(told['calls'].values())} derivatives, {rows} rows a round"


def check_points(task: Task, name: str, rows: dict[str, np.ndarray]) -> float:
    """Raise unless both come to the same point where nothing is drawn."""
    algorithm, one_round = methods()[name]
    simulation = Simulation(make_job(task, algorithm, rows, None))
    simulation.advance(CHECKED_ROUNDS)
    loop = Loop(task, rows, None)
    for _ in range(CHECKED_ROUNDS):
        one_round(loop)
    mine, before = simulation.point(), [*task.x, *task.y]
    # By how far they moved, not by where they started.
    walked = [np.asarray(a) - b for a, b in zip(mine, before, strict=True)]
    other = [a.numpy() - b for a, b in zip([*loop.x, *loop.y], before, strict=True)]
    distance = apart(walked, other)
    if not distance < TOLERANCE:
        raise AssertionError(f"{task.name}, {name}: the points are {distance} apart")
    return distance


def measured() -> Iterator[Row]:
    """Yield every line of the table, each checked."""
    import torch

    torch.set_num_threads(1)
    rows = made_rows()
    for task in tasks():
        for name, (algorithm, one_round) in methods().items():
            job = make_job(task, algorithm, rows, BATCH)
            loop, simulation = Loop(task, rows, BATCH), Simulation(job)
            work = check_counts(job, loop, one_round)
            distance = check_points(task, name, rows)
            ours, theirs, ratio = paired(
                lambda one=simulation: one.advance(ROUNDS_AT_ONCE),
                lambda one=loop, go=one_round: go(one),
                ROUNDS_AT_ONCE,
            )
            yield Row(
                f"{name}, {task.name}, a round",
                "PyTorch loop",
                ours,
                theirs,
                ratio,
                distance,
                work,
            )
