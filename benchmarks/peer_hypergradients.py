# pyright: reportMissingImports=false
"""Hypergradients of other packages beside ours: one point, one batch, equal work.

Every program gets the same losses, point and rows in float32, and runs Q factors of the
Neumann series or Q steps of conjugate gradient, on one thread. What it returns is
compared with what we return. Conjugate gradient to a tolerance is our public function
beside jaxopt alone: the others stop by other measures.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_timing import Failed, Row, apart, processor_seconds, quartiles

from fedbilevel import hypergradient
from fedbilevel.hypergradient import ConjugateGradient, FrozenNeumann
from fedbilevel.hypergradient._base import Bundle
from fedbilevel.problem import Batch, Oracle, Problem

Q = 10
TOLERANCE = 1e-4  # relative, in float32
RESIDUAL = 1e-6  # at which a solve ends: what `fedbilevel.hypergradient` does by itself
SIZES = (100, 1000)
ROWS = 512
Leaves = tuple[np.ndarray, ...]
Answer = Callable[[], list]


@dataclass(frozen=True)
class Case:
    """A problem, written for JAX and for PyTorch, at one point with its rows."""

    name: str
    jax_losses: tuple[Callable, Callable]  # upper and lower: of x, y and rows
    torch_losses: tuple[Callable, Callable]
    x: Leaves
    y: Leaves
    rows: dict[str, np.ndarray]
    theta: float


def quadratic(size: int) -> Case:
    """Return g = 0.5 y'Ay + x'Cy + a'y and f = 0.5 ||y - b||^2 + 0.25 ||x||^2."""
    draw = np.random.default_rng(size)
    basis, _ = np.linalg.qr(draw.standard_normal((size, size)))
    rows = {
        "A": basis @ np.diag(np.linspace(0.5, 2, size)) @ basis.T,
        "C": 0.3 * draw.standard_normal((size, size)) / math.sqrt(size),
        "a": draw.standard_normal(size),
        "b": draw.standard_normal(size),
    }

    def upper(x: Any, y: Any, rows: Any) -> Any:
        return 0.5 * ((y[0] - rows["b"]) ** 2).sum() + 0.25 * (x[0] ** 2).sum()

    def lower(x: Any, y: Any, rows: Any) -> Any:
        square = 0.5 * (y[0] @ (rows["A"] @ y[0]))
        return square + x[0] @ (rows["C"] @ y[0]) + rows["a"] @ y[0]

    both, x, y = (upper, lower), draw.standard_normal(size), draw.standard_normal(size)
    return _case(f"quadratic, d = {size}", both, both, [x], [y], rows, 0.45)


def logistic(size: int) -> Case:
    """Return logistic regression with one strength exp(x_i) for each feature."""
    draw = np.random.default_rng(size + 1)
    # Scales differ, or conjugate gradient would be done before its steps are.
    scales = np.logspace(0, -1, size)
    features = draw.standard_normal((2, ROWS, size)) * scales
    sign = np.where(draw.random((2, ROWS)) < 0.5, -1.0, 1.0)
    rows = {"train": features[0], "t": sign[0], "held": features[1], "u": sign[1]}

    def losses(softplus: Callable, exp: Callable) -> tuple[Callable, Callable]:
        def upper(x: Any, y: Any, rows: Any) -> Any:
            return softplus(-rows["u"] * (rows["held"] @ y[0])).mean()

        def lower(x: Any, y: Any, rows: Any) -> Any:
            fit = softplus(-rows["t"] * (rows["train"] @ y[0])).mean()
            return fit + 0.5 * (exp(x[0]) * y[0] ** 2).sum()

        return upper, lower

    import torch

    ours = losses(jax.nn.softplus, jnp.exp)
    theirs = losses(torch.nn.functional.softplus, torch.exp)
    x, y = np.full(size, -6.0), draw.standard_normal(size) / math.sqrt(size)
    bound = 0.25 * np.linalg.norm(features[0], 2) ** 2 / ROWS + math.exp(-6)
    name, theta = f"logistic, d = {size}, {ROWS} rows", 0.9 / bound
    return _case(name, ours, theirs, [x], [y], rows, theta)


def network() -> Case:
    """Return 784-200-10 with ReLU: the hidden layer above, the head below."""
    draw = np.random.default_rng(7)
    width, classes, features = 200, 10, 784
    x = [draw.standard_normal((width, features)) / 28, np.zeros(width)]
    y = [0.1 * draw.standard_normal((classes, width)), np.zeros(classes)]
    rows = {
        "train": draw.standard_normal((128, features)),
        "t": np.eye(classes)[draw.integers(0, classes, 128)],
        "held": draw.standard_normal((128, features)),
        "u": np.eye(classes)[draw.integers(0, classes, 128)],
    }

    def losses(relu: Callable, log_softmax: Callable) -> tuple[Callable, Callable]:
        def fit(x: Any, y: Any, features: Any, target: Any) -> Any:
            hidden = relu(features @ x[0].T + x[1])
            scores = log_softmax(hidden @ y[0].T + y[1], -1)
            return -(target * scores).sum(-1).mean()

        def upper(x: Any, y: Any, rows: Any) -> Any:
            return fit(x, y, rows["held"], rows["u"])

        def lower(x: Any, y: Any, rows: Any) -> Any:
            squares = sum((leaf**2).sum() for leaf in y)
            return fit(x, y, rows["train"], rows["t"]) + 0.05 * squares

        return upper, lower

    import torch

    ours = losses(jax.nn.relu, jax.nn.log_softmax)
    theirs = losses(torch.relu, torch.log_softmax)
    return _case("network 784-200-10", ours, theirs, x, y, rows, 0.02)


def _case(name, ours, theirs, x, y, rows, theta) -> Case:
    def single(leaf: np.ndarray) -> np.ndarray:
        return np.asarray(leaf, np.float32)

    x, y = tuple(map(single, x)), tuple(map(single, y))
    rows = {key: single(value) for key, value in rows.items()}
    return Case(name, ours, theirs, x, y, rows, theta)


def ours(case: Case, rule: str) -> Answer:
    """Return our rule, compiled; the batch is given, as it is inside a method."""
    problem = Problem(*case.jax_losses)
    if rule == "tolerance":
        solved = partial(hypergradient, problem)
        return _bound(jax.jit(lambda x, y, rows: solved(x, y, rows, rows)), case)
    chosen = FrozenNeumann(Q, case.theta) if rule == "series" else ConjugateGradient(Q)

    @jax.jit
    def call(x, y, rows):
        batch = Batch(rows)
        oracle: Any = Oracle(problem, None, 0)  # pyright: ignore[reportArgumentType]
        return chosen(oracle, x, y, Bundle(batch, batch, batch))

    return _bound(call, case)


def _bound(call: Callable, case: Case) -> Answer:
    given = jax.tree.map(jnp.asarray, (case.x, case.y, case.rows))
    return lambda: list(jax.block_until_ready(call(*given)))


def by_jaxopt(case: Case, rule: str) -> Answer:
    """Return jaxopt's derivative of a root, compiled; it has no series of its own."""
    import jaxopt

    upper, lower = case.jax_losses

    def series(product: Callable, b: Any) -> Any:
        def longer(carry: Any, _: None) -> tuple[Any, None]:
            r, s = carry
            r = jax.tree.map(lambda r, h: r - case.theta * h, r, product(r))
            return (r, jax.tree.map(jnp.add, s, r)), None

        (_, s), _ = jax.lax.scan(longer, (b, b), None, length=Q)
        return jax.tree.map(lambda leaf: case.theta * leaf, s)

    by_steps = partial(jaxopt.linear_solve.solve_cg, maxiter=Q, tol=0.0)
    to_end = partial(jaxopt.linear_solve.solve_cg, tol=RESIDUAL)
    solve = {"series": series, "steps": by_steps, "tolerance": to_end}[rule]

    @jax.jit
    def call(x, y, rows):
        def slope(y: Any, x: Any) -> Any:
            return jax.grad(lower, argnums=1)(x, y, rows)

        @jaxopt.implicit_diff.custom_root(slope, solve=solve)
        def solution(_: Any, x: Any) -> Any:
            return y

        return jax.grad(lambda x: upper(x, solution(None, x), rows))(x)

    return _bound(call, case)


def _tensors(case: Case) -> tuple[list, list, dict]:
    import torch

    def leaf(value: np.ndarray) -> Any:
        return torch.tensor(value, requires_grad=True)

    rows = {name: torch.tensor(value) for name, value in case.rows.items()}
    return [leaf(one) for one in case.x], [leaf(one) for one in case.y], rows


def _gradient(loss: Any, at: list, **options: Any) -> list:
    import torch

    found = torch.autograd.grad(loss, at, allow_unused=True, **options)
    return [
        torch.zeros_like(w) if g is None else g for w, g in zip(at, found, strict=True)
    ]


def by_torchopt(case: Case, rule: str) -> Answer:
    """Return TorchOpt's derivative of a root."""
    import torch
    import torchopt

    (upper, lower), (x, y, rows) = case.torch_losses, _tensors(case)
    count = len(x)
    if rule == "series":
        solve = torchopt.linear_solve.solve_inv(ns=True, maxiter=Q, alpha=case.theta)
    else:
        solve = torchopt.linear_solve.solve_cg(maxiter=Q, rtol=0.0)

    def slope(y: Any, *x: Any) -> Any:
        return torch.func.grad(lambda y: lower(x, y, rows))(y)

    # The signature tells which arguments there are, so that it must name them.
    named = {1: lambda y, a: slope(y, a), 2: lambda y, a, b: slope(y, a, b)}[count]
    keep = {1: lambda y, a: y, 2: lambda y, a, b: y}[count]
    root = torchopt.diff.implicit.custom_root(
        named, argnums=tuple(range(1, count + 1)), solve=solve
    )
    solution = root(keep)
    at = tuple(leaf.detach() for leaf in y)

    def call() -> list:
        return _gradient(upper(x, solution(at, *x), rows), x)

    return call


def by_betty(case: Case, rule: str) -> Answer:
    """Return Betty's hypergradient alone, without the engine that steps with it."""
    import torch
    from betty.configs import Config
    from betty.hypergradient import get_grads
    from betty.problems import ImplicitProblem

    (upper, lower), (x, y, rows) = case.torch_losses, _tensors(case)

    class Level(ImplicitProblem):
        def training_step(self, batch: Any) -> Any:
            return lower(inner_x, inner_y, batch)

    def level(name: str, leaves: list, config: Any) -> Any:
        module = torch.nn.ParameterList(torch.nn.Parameter(one) for one in leaves)
        return Level(name=name, config=config, module=module, device="cpu")

    kind = "neumann" if rule == "series" else "cg"
    settings: dict[str, float] = {f"{kind}_iterations": Q}
    if rule == "series":
        settings["neumann_alpha"] = case.theta
    below = level("below", y, Config(type=kind, **settings))
    above = level("above", x, Config())
    inner_x, inner_y = list(above.module), list(below.module)
    below.cur_batch = rows

    def call() -> list:
        loss = upper(inner_x, inner_y, rows)
        indirect = get_grads(loss, [above, below, above], retain_graph=True)
        direct = _gradient(loss, inner_x)
        return [d + i for d, i in zip(direct, indirect, strict=True)]

    return call


def by_boat(case: Case, rule: str) -> Answer:
    """Return the routines behind boat-torch's `NS` and `CG` operators."""
    import torch
    from boat_torch.utils import op_utils

    (upper, lower), (x, y, rows) = case.torch_losses, _tensors(case)
    series = rule == "series"
    solve = op_utils.neumann if series else op_utils.conjugate_gradient
    # Its system is theta H, whose solution does not depend on theta.
    step = case.theta

    def mapped(y: list, loss: Any) -> list:
        slopes = torch.autograd.grad(loss, y, create_graph=True)
        return [w - step * slope for w, slope in zip(y, slopes, strict=True)]

    def call() -> list:
        losses = upper(x, y, rows), lower(x, y, rows)
        return solve(y, x, *losses, Q, mapped, 0.0)

    return call


PEERS: dict[str, tuple[Callable[[Case, str], Answer], str]] = {
    "jaxopt": (by_jaxopt, "`custom_root`, jitted"),
    "TorchOpt": (by_torchopt, "`custom_root`"),
    "Betty": (by_betty, "`get_grads`, no engine"),
    "boat-torch": (by_boat, "`op_utils`, no `higher`"),
}
RULES = {
    "series": f"series, {Q} factors",
    "steps": f"CG, {Q} steps",
    "tolerance": f"CG to {RESIDUAL:g}",
}


def cases() -> list[Case]:
    """Return all problems."""
    both = [make(size) for make in (quadratic, logistic) for size in SIZES]
    return [*both, network()]


def compared(case: Case, rule: str) -> Iterator[Row | Failed]:
    """Time all that run, in turns, and compare what they return."""
    work = f"{case.name}; {RULES[rule]}"
    mine = ours(case, rule)
    running, right = {"ours": mine}, mine()
    distances = {}
    for peer, (make, _) in PEERS.items():
        if rule == "tolerance" and peer != "jaxopt":
            continue
        try:
            call = make(case, rule)
            found = [
                leaf.detach() if hasattr(leaf, "detach") else leaf for leaf in call()
            ]
            distances[peer] = apart(right, found)
            running[peer] = call
        except Exception as error:  # whatever it is, it is what the table tells
            yield Failed(work, peer, f"{type(error).__name__}: {error}")
    seconds = processor_seconds(running)
    for peer, distance in distances.items():
        how = PEERS[peer][1]
        if distance > TOLERANCE:
            how += f"; **its answer differs** by more than {TOLERANCE:g}"
        mine, other = seconds["ours"], seconds[peer]
        medians = float(np.median(mine)), float(np.median(other))
        yield Row(work, peer, *medians, quartiles(mine, other), distance, how)


def measured() -> Iterator[Row | Failed]:
    """Yield every line of the table."""
    import torch

    torch.set_num_threads(1)
    for case in cases():
        for rule in RULES:
            yield from compared(case, rule)
