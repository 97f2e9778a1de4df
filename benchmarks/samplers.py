"""Compares the samplers of tuning on noisy valleys with an edge of divergence.

    python benchmarks/samplers.py [--seeds N]

An objective is what a run of a bilevel method looks like as a function of its step
sizes: smooth in their logarithms, with a valley that is not along the axes, a value
that grows on both sides, infinity beyond an edge where steps are too long, and a noise
of 10 to 80 % from one random seed to the next. There are six of them, with two to six
step sizes. Every seed moves the valley and the edge.

The regret is how far the point that a sampler takes is above the lowest there is,
judged without noise. Printed are its median over objectives and seeds, its 90th
percentile, and the median of each objective, after 8, 16 and 32 trials; and on how many
of the objectives and seeds it is lower than that of `fitted`. The samplers:

    fitted, even         those of the package
    optuna               that of the package: TPE, in batches that run as one program
    optuna, one by one   multivariate TPE in groups; it knows every trial before it
                         asks for the next, which a batch of trials cannot
    random               independent points
"""

import sys
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from fedbilevel.studies.searching import Point, Range, Search

TRIALS = (8, 16, 32)
SIZES = (2, 2, 2, 3, 4, 6)
NOISES = (0.1, 0.3, 0.8, 0.2, 0.2, 0.2)
LOW, HIGH = 0.1, 10.0


class Valley:
    """An objective in the unit cube, drawn by a seed."""

    def __init__(self, number: int, seed: int) -> None:
        draw = np.random.default_rng((number, seed))
        self.size, self.noise = SIZES[number], NOISES[number]
        self.center = draw.uniform(0.15, 0.75, self.size)
        turned, _ = np.linalg.qr(draw.standard_normal((self.size, self.size)))
        self.shape = turned * np.sqrt(draw.uniform(2.0, 20.0, self.size))
        # Steps are too long together: the edge is a sum of them, above the valley.
        self.slope = draw.uniform(0.3, 1.0, self.size)
        self.edge = self.slope @ self.center + draw.uniform(0.1, 0.4)
        self.draw = draw

    def exact(self, shares: np.ndarray) -> float:
        """Return the value without noise; 1 is the lowest."""
        if self.slope @ shares > self.edge:
            return np.inf
        square = float(np.sum(((shares - self.center) @ self.shape) ** 2))
        return float(np.exp(min(square, 6.0)))

    def trial(self, shares: np.ndarray) -> float:
        """Return what a trial from two random seeds comes to."""
        noise = np.exp(self.noise * self.draw.standard_normal(2)).mean()
        return self.exact(shares) * float(noise)


Taken = Callable[[Valley, int, int], np.ndarray]


def of_package(sampler: str) -> Taken:
    """Return what a search of the package takes, in its batches."""

    def taken(valley: Valley, trials: int, seed: int) -> np.ndarray:
        space = {f"step{n}": Range(LOW, HIGH) for n in range(valley.size)}
        search = Search(dict, space, trials, sampler)  # type: ignore[arg-type]
        tried: list[tuple[Point, float]] = []
        for batch, size in enumerate(search.batches(trials)):
            points = search.proposed(size, tried, batch)
            tried += [(one, valley.trial(shares_of(space, one))) for one in points]
        return shares_of(space, tried[search.best(tried)][0])

    return taken


def shares_of(space: dict[str, Range], point: Point) -> np.ndarray:
    return np.asarray([one.share_of(point[name]) for name, one in space.items()])


def of_optuna(*, random: bool) -> Taken:
    """Return what a sampler of Optuna takes: the least value that it saw."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

    def made(seed: int):
        if random:
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=5, multivariate=True, group=True
        )

    def taken(valley: Valley, trials: int, seed: int) -> np.ndarray:
        names = [f"step{n}" for n in range(valley.size)]
        space = {n: optuna.distributions.FloatDistribution(0.0, 1.0) for n in names}
        study = optuna.create_study(sampler=made(seed))
        for _ in range(trials):
            asked = study.ask(dict(space))
            found = valley.trial(np.asarray([asked.params[name] for name in names]))
            study.tell(asked, min(found, 1e30))
        return np.asarray([study.best_params[name] for name in names])

    return taken


def regrets(taken: Taken, trials: int, seeds: Sequence[int]) -> np.ndarray:
    """Return how far above the lowest, of every objective and seed."""
    found = []
    for number in range(len(SIZES)):
        for seed in seeds:
            valley = Valley(number, seed)
            found.append(valley.exact(taken(valley, trials, seed)) - 1)
    return np.reshape(found, (len(SIZES), len(seeds)))


def main() -> None:
    seeds = range(int(sys.argv[2]) if sys.argv[1:2] == ["--seeds"] else 32)
    samplers = {
        "fitted": of_package("fitted"),
        "even": of_package("even"),
        "optuna": of_package("optuna"),
        "optuna, one by one": of_optuna(random=False),
        "random": of_optuna(random=True),
    }
    sizes = " ".join(f"{f'{size} steps':>8}" for size in SIZES)
    print(f"{'':20} trials   median  90th %  {sizes}  lower than fitted")
    fitted: dict[int, np.ndarray] = {}
    for name, taken in samplers.items():
        for trials in TRIALS:
            found = regrets(taken, trials, seeds)
            lower = found < fitted.setdefault(trials, found)
            each = " ".join(f"{one:8.0%}" for one in np.median(found, axis=1))
            print(
                f"{name:20} {trials:6} {np.median(found):8.0%} "
                f"{np.quantile(found, 0.9):7.0%}  {each}  "
                f"{lower.sum()} of {lower.size}: {lower.sum(axis=1).tolist()}",
                flush=True,
            )


if __name__ == "__main__":
    main()
