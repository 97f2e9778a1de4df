"""Compare three methods on a model, rows and metrics of your own.

An Equinox network is cut in two: its hidden layer is learned above, on rows that its
head was not trained on, and the head below. One method is tuned over a grid first. All
methods run from five seeds, and end when they make no progress. Then one run is
interrupted, and goes on as if it never had been.
"""

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import fedbilevel as fb


class Hidden(eqx.Module):
    """A hidden layer; its arrays are the upper variable x."""

    layer: eqx.nn.Linear

    def __call__(self, inputs):
        """Return the features of a batch."""
        return jnp.tanh(jax.vmap(self.layer)(inputs))


def loss(x, y, batch):
    """Return the mean square error of the head y on the features x."""
    return jnp.mean((jax.vmap(y)(x(batch["inputs"])) - batch["targets"]) ** 2)


def lower(x, y, batch):
    """Return what the head is trained on: its weights are kept small."""
    return loss(x, y, batch) + 0.01 * (jnp.sum(y.weight**2) + jnp.sum(y.bias**2))


def rows(seed, count):
    """Draw rows of one site; sites differ in where their inputs lie."""
    draw = np.random.default_rng(seed)
    inputs = draw.normal(0.2 * seed, 1.0, (count, 3))
    targets = np.sin(inputs @ [1.0, -1.0, 0.5]) + 0.1 * draw.normal(size=count)
    return {"inputs": inputs, "targets": targets[:, None]}


class TestError(eqx.Module):
    """The error on rows that no site has."""

    held: dict

    def __call__(self, x, y):
        """Return it by name."""
        return {"test_error": loss(x, y, self.held)}


def setting(sites=4):
    """Return the problem, the rows of all sites, the start, and the metrics."""
    data = fb.ClientData.from_clients(
        [rows(site, 20) for site in range(sites)],
        [rows(100 + site, 40) for site in range(sites)],
    )
    for_hidden, for_head = jr.split(jr.key(0))
    start = (
        Hidden(eqx.nn.Linear(3, 8, key=for_hidden)),
        eqx.nn.Linear(8, 1, key=for_head),
    )
    held = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=float), rows(7, 200))
    return fb.Problem(loss, lower), data, start, TestError(held)


def methods():
    """Return three methods, the first with numbers to choose from."""
    rule = fb.Neumann(q=5, theta=0.05)
    momentum = {"upper_weight": 0.3, "lower_weight": 0.3}
    grid = [
        fb.LocalBSGVRM.effective(
            rule, upper_step=upper, lower_step=step, **momentum, local_steps=4
        )
        for upper in (0.02, 0.1)
        for step in (0.02, 0.05)
    ]
    return {
        "LocalBSGVRM": grid,
        "FedBiO": fb.FedBiO(0.1, 0.05, 0.03, local_steps=4),
        "no tuning": fb.FedAvg(0.05, local_steps=4),
    }


def interrupted(problem, data, start, folder, **shared):
    """Stop a run midway, resume it, and return both halves' result and the whole."""
    algorithm = methods()["FedBiO"]

    def stop(done, total, newest):
        if 10 <= done < total:
            raise KeyboardInterrupt

    def run(**more):
        return fb.run(problem, data, start, algorithm, rounds=40, **shared, **more)

    try:
        run(keeping=fb.Keeping(folder, every_rounds=10), watch=stop)
    except KeyboardInterrupt as halted:
        print(f"Interrupted. {halted}")
    return run(keeping=fb.Keeping(folder, resume=True)), run()


def main(folder: Path) -> fb.Comparison:
    """Compare, and show that an interrupt costs nothing."""
    problem, data, start, metrics = setting()
    shared = {"sampling": fb.Sampling(batch=8), "metrics": metrics}
    found = fb.compare(
        problem,
        data,
        start,
        methods(),
        rounds=150,
        seeds=range(5),
        headline="test_error",
        stopping=fb.Stopping(metric="test_error", patience=15),
        keeping=fb.Keeping(folder / "comparison"),
        **shared,
    )
    for trial in found.tuned["LocalBSGVRM"].trials:
        print(f"tried: {trial.value:.4f}")
    for name, results in found.results.items():
        ends = [result.final["test_error"] for result in results]
        print(f"{name}: {np.mean(ends):.4f}, {results[0].ended}")
    resumed, whole = interrupted(problem, data, start, folder / "run", **shared)
    same = all(
        np.array_equal(whole.point[n], leaf) for n, leaf in resumed.point.items()
    )
    print(f"The resumed run ends where the other does: {same}")
    return found


if __name__ == "__main__":
    fb.configure()
    main(Path(tempfile.mkdtemp(prefix="own-model-")))
