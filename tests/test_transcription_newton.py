"""NewtonBFGS beside a second program of its listing, on tables in three places."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import fedbilevel as fb
from fedbilevel.algorithms.nested.newton_bfgs import Inverse, packed_hessian
from fedbilevel.channels import Channel, Privacy
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Oracle
from fedbilevel.runtime import Checkpoints, Job, Sampling, SimulatorRuntime, execute
from fedbilevel.tasks.regularization import Folded, strengths

FOLDS, WIDTH = 3, 4


def table(seed: int = 0, classes: int = 2):
    """Return rows of two kinds of sites, in which labels are far from alike."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(90, WIDTH)) * [1, 2, 0.5, 1]
    scores = features @ draw.normal(size=(WIDTH, max(classes, 1))) + 0.5
    noisy = scores + draw.gumbel(size=scores.shape)
    label = np.argmax(noisy, axis=1).astype(np.int32) if classes else noisy[:, 0]
    return np.hstack([features, np.ones((90, 1))]), label


def problem_of(classes: int = 2, weights=()):
    features, label = table(0, classes)
    parts = [np.arange(0, 60), np.arange(60, 80), np.arange(80, 90)]
    model = Folded(FOLDS, classes, tuple(range(WIDTH)))
    more = model.row_fields([label[part] for part in parts], len(parts))
    rows = [
        {"features": features[part], "label": label[part], **extra}
        for part, extra in zip(parts, more, strict=True)
    ]
    sizes = weights or [len(part) for part in parts]
    data = ClientData.from_clients(rows, rows, sizes)
    pooled = {name: np.concatenate([one[name] for one in rows]) for name in rows[0]}
    return model, data, pooled


def job_of(classes: int = 2, weights=(), **more) -> Job:
    model, data, _ = problem_of(classes, weights)
    start = model.start(-3.0)
    method, everything = fb.NewtonBFGS(), Sampling(batch=None)
    return Job.of(method, model.problem(60), data, *start, sampling=everything, **more)


class Pooled:
    """The sums of the listing, of rows in one place, for two classes."""

    def __init__(self, rows):
        self.a, self.label, self.fold = rows["features"], rows["label"], rows["fold"]
        self.n = len(self.label)
        blocks = np.arange(FOLDS + 1)[:, None]
        self.trains = np.where(self.fold == blocks, 0.0, FOLDS / (FOLDS - 1)) / self.n
        self.trains[-1] = 1 / self.n
        self.judges = (self.fold == blocks[:-1]) / self.n
        self.pull = np.mean(rows["pull"] * np.ones(self.n))
        self.usual = rows["usual"], rows["pull"]

    def __call__(self, x, W, Z):
        common, own = x[0], x[1:]
        strength = np.append(np.exp(common + own), 0.0)
        usual, pull = self.usual
        f = (
            np.sum(self.pull * (own / np.log(2)) ** 2) / 2
            + np.mean(pull * (common - usual) ** 2) / 8
        )
        h = np.append(
            np.mean(pull * (common - usual)) / 4, self.pull * own / np.log(2) ** 2
        )
        g, fy, gy, H = 0.0, np.zeros_like(W), np.zeros_like(W), []
        for b, w in enumerate(W):
            s = self.a @ w
            losses = np.logaddexp(0, s) - s * self.label
            p = 1 / (1 + np.exp(-s))
            g += self.trains[b] @ losses + strength @ w**2 / 2
            gy[b] = self.a.T @ (self.trains[b] * (p - self.label)) + strength * w
            curved = self.a.T * (self.trains[b] * p * (1 - p))
            H.append(curved @ self.a + np.diag(strength))
            indirect = (strength * w * Z[b])[:-1]
            h -= np.append(indirect.sum(), indirect)
            if b < FOLDS:
                f += self.judges[b] @ losses
                fy[b] = self.a.T @ (self.judges[b] * (p - self.label))
        return f, g, fy, gy, H, h


def listing(sums, x, W, rounds):
    """Yield the point that is sent in every round."""
    Z, before, lowest = np.zeros_like(W), W, np.inf
    accepted, B, d, t, updates, left = None, None, None, 1.0, 0, -1
    for _ in range(rounds):
        yield x, W
        f, g, fy, gy, H, h = sums(x, W, Z)
        if g > lowest + 1e-14:
            W = (W + before) / 2
            continue
        step = np.stack([np.linalg.solve(A, b) for A, b in zip(H, gy, strict=True)])
        new = np.stack([np.linalg.solve(A, b) for A, b in zip(H, fy, strict=True)])
        apart = sum(e @ A @ e for A, e in zip(H, new - Z, strict=True))
        expected = 0.0 if accepted is None else -t * accepted[2] @ d
        solved = np.sum(gy * step) <= max(1e-6 * f, 0.01 * expected)
        solved &= apart <= 1e-3 * np.sum(fy * new)
        before, lowest, W, Z = W, g, W - step, new
        if left >= 0:
            lowest = np.inf
            continue
        if not solved:
            continue
        F, lowest = f - np.sum(fy * step), np.inf
        if accepted is not None and F > accepted[1] + 1e-4 * t * accepted[2] @ d:
            slope = t * accepted[2] @ d
            share = np.clip(-slope / (2 * (F - accepted[1] - slope)), 0.1, 0.5)
            t, W = share * t, accepted[3] + share * (W - accepted[3])
            x = accepted[0] + t * d
            continue
        if accepted is None:
            B = np.eye(len(x)) / np.max(np.abs(h))
        else:
            s, q = x - accepted[0], h - accepted[2]
            assert s @ q > 0
            B = np.eye(len(x)) * (s @ q) / (q @ q) if updates == 0 else B
            V = np.eye(len(x)) - np.outer(s, q) / (s @ q)
            B, updates = V @ B @ V.T + np.outer(s, s) / (s @ q), updates + 1
        d, accepted, t = -B @ h, (x, F, h, W), 1.0
        if -d @ h <= 1e-4 * F:
            left = 2
            continue
        d = d * min(1, 3 / np.max(np.abs(d)))
        x = x + d


def flat(x):
    return np.append(np.asarray(x["common"]), np.asarray(x["own"]))


def test_newton_bfgs_is_its_listing():
    job, rounds = job_of(), 40
    _, _, rows = problem_of()
    start = np.append(-3.0, np.zeros(WIDTH)), np.zeros((FOLDS + 1, WIDTH + 1))
    sent = list(listing(Pooled(rows), *start, rounds))
    done, found = 0, None
    for done, (x, W) in enumerate(sent[1:], 1):
        found = execute(SimulatorRuntime(job), done)
        if "tolerance" in found.ended:
            break
        server = found.state.server
        np.testing.assert_allclose(flat(server.trial.x), x, rtol=0, atol=1e-9)
        np.testing.assert_allclose(server.trial.y[:, 0], W, rtol=0, atol=1e-9)
    assert found is not None and 10 < done < rounds - 1
    # Its own end is the pooled one.
    last = sent[done][1]
    np.testing.assert_allclose(found.state.server.point.y[:, 0], last, atol=1e-9)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_the_model_is_that_of_pooled_rows_at_the_strengths_that_were_found(classes):
    job = job_of(classes)
    _, _, rows = problem_of(classes)
    point = execute(SimulatorRuntime(job), 100).state.server.point
    a, width = rows["features"][:, :-1], np.sqrt(strengths(point.x))
    last = np.asarray(point.y)[-1]
    if classes:
        # At one strength, 1/n of the mean loss, in columns that are scaled for it.
        fitted = LogisticRegression(C=1 / len(a), tol=1e-12, max_iter=10_000)
        fitted.fit(a / width, rows["label"])
        weights, bias = fitted.coef_ / width, fitted.intercept_
    else:
        columns = np.hstack([a, np.ones((len(a), 1))])
        gram = columns.T @ columns / len(a) + np.diag([*width**2, 0.0])
        whole = np.linalg.solve(gram, columns.T @ rows["label"] / len(a))
        weights, bias = whole[None, :-1], whole[-1:]
    np.testing.assert_allclose(last[:, :-1], weights, atol=2e-6)
    np.testing.assert_allclose(last[:, -1], bias, atol=2e-6)


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("client", [0, 2])  # the second has 10 rows, and padding
def test_blocks_of_the_hessian_are_those_of_the_whole(classes, client):
    model, data, _ = problem_of(classes)
    x, y = model.start(-1.0)
    y = y + 0.3 * jnp.asarray(np.random.default_rng(1).normal(size=y.shape))
    folded = model.problem(60)
    ways = {
        "closed": folded,
        "in pieces": replace(folded, rows_at_once=16),
        "by products": replace(folded, lower_hessian=None),
        "whole": fb.Problem(folded.upper, folded.lower),
    }
    found = {}
    for name, problem in ways.items():
        oracle = Oracle(problem, data, client, None, None)
        packed = packed_hessian(oracle, fb.Pair(x, y), oracle.all_lower())
        found[name] = np.array(Inverse(packed).matrix)
    (whole,) = found.pop("whole")
    size = found["closed"].shape[1]
    for number in range(FOLDS + 1):
        here = slice(number * size, (number + 1) * size)
        for blocks in found.values():
            np.testing.assert_allclose(whole[here, here], blocks[number], atol=1e-12)
        whole[here, here] = 0
    np.testing.assert_allclose(whole, 0, atol=1e-12)


def test_a_hessian_that_is_not_definite_is_damped():
    at = jnp.asarray([[1.0, 0.0, -2.0]])  # diag(1, -2), packed
    solved, decrement = Inverse(at)(jnp.asarray([1.0, 1.0]))
    assert np.isfinite(solved).all() and decrement > 0


def test_a_run_ends_by_itself_and_stays_ended(tmp_path: Path):
    keep = Checkpoints(tmp_path / "run", every_rounds=1)
    first = execute(SimulatorRuntime(job_of()), 90, checkpoints=keep)
    assert "reached its own tolerance" in first.ended
    again = execute(SimulatorRuntime(job_of()), 90, checkpoints=keep)
    assert again.columns["round"].tolist() == first.columns["round"].tolist()
    for left, right in zip(
        jax.tree.leaves(first.state), jax.tree.leaves(again.state), strict=True
    ):
        np.testing.assert_array_equal(left, right)


def test_a_search_that_takes_too_long_ends_at_the_best_that_it_found():
    job = job_of()
    short = replace(job, algorithm=fb.NewtonBFGS(exchanges=20))
    whole = execute(SimulatorRuntime(job), 20).state.server
    found = execute(SimulatorRuntime(short), 90)
    assert found.columns["round"][-1] == 22 and "tolerance" in found.ended
    server = found.state.server
    assert flat(server.point.x).tolist() == flat(whole.point.x).tolist()
    assert found.columns["lower_gradient_norm"][-1] < 1e-12


def test_what_it_cannot_bear_is_refused():
    with pytest.raises(InvalidInputError, match="which clip and noise would break"):
        job_of(weights=[1, 1, 1], channel=Channel((Privacy(1.0, 1.0),)))
    rows = [{"row": np.ones((3, 1))}] * 2
    data = ClientData.from_clients(rows, rows)

    def loss(x, y, rows):
        return jnp.sum(y**2) + x * jnp.mean(rows["row"])

    large = (jnp.zeros(()), jnp.zeros(2001))
    with pytest.raises(InvalidInputError, match="2,001 parameters"):
        fb.run(fb.Problem(loss, loss), data, large, fb.NewtonBFGS(), rounds=1)
