"""Tables at unlike sites: our default, and what a user would pick instead.

    python -m benchmarks.tables --splits 20 --tables wine,diabetes --deals iid,size
    python -m benchmarks.tables --summarize a.jsonl b.jsonl

For every table, deal and split: test loss of `FederatedRegularizer` or `FederatedRidge`
with nothing chosen, of LogisticRegressionCV or RidgeCV on pooled rows, of the same at
the largest site alone and at every site alone (in the mean), and of one strength on all
rows, the best of ten on a fifth of them: the point to which FedAvg converges where
everybody takes part. The loss is log loss, or half the squared error of a target of
variance 1. Ratios are to the pooled column, with 95 % intervals over splits.

a9a is read from the folder of --data, and left out without one. Text columns are zeros
and ones for all, and gaps the mean of the others. --out takes a line of JSON a split:
several processes can share the work, by tables, deals or --first-split.
"""

import argparse
import functools
import itertools
import json
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets as known
from sklearn.linear_model import (
    LogisticRegression,
    LogisticRegressionCV,
    Ridge,
    RidgeCV,
)
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedbilevel.sklearn import FederatedRegularizer, FederatedRidge

SHARES = {"size": (0.7, 0.2, 0.06, 0.03, 0.01)}
GENERATED = {  # rows, columns, of which matter, classes, share of the rarest, wrong
    "sparse": (300, 40, 5, 2, 0.5, 0.0),
    "dense": (300, 40, 35, 2, 0.5, 0.0),
    "rare": (3000, 20, 8, 2, 0.06, 0.0),
    "spoiled": (2000, 20, 8, 2, 0.3, 0.06),
    "gaps-text": (2000, 12, 6, 3, 0.2, 0.02),
}
PLAIN = {
    "breast-cancer": known.load_breast_cancer,
    "wine": known.load_wine,
    "digits": known.load_digits,
    "diabetes": known.load_diabetes,
}


def generated(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a table of a kind; text, gaps and wrong labels where its name says so."""
    rows, columns, matter, classes, rare, wrong = GENERATED[name]
    draw = np.random.default_rng(seed)
    X = draw.normal(size=(rows, columns))
    W = np.zeros((columns, classes))
    chosen = draw.choice(columns, matter, replace=False)
    W[chosen] = draw.normal(size=(matter, classes)) * 2 / np.sqrt(matter)
    scores = X @ W
    if name == "gaps-text":
        text = draw.integers(0, 5, size=(rows, 2))
        scores += draw.normal(size=(5, classes))[text[:, 0]]
        X = np.where(draw.random(X.shape) < 0.05, np.nan, X)
        X = np.where(np.isnan(X), np.nanmean(X, axis=0), X)
        X = np.hstack([X, *(np.eye(5)[text[:, k]] for k in range(2))])
    scores = scores + draw.gumbel(size=scores.shape)
    # The rarest class has its share.
    gap = scores[:, 0] - np.max(scores[:, 1:], axis=1)
    scores[:, 0] -= np.quantile(gap, 1 - rare)
    y = np.argmax(scores, axis=1)
    flipped = draw.random(rows) < wrong
    return X, np.where(flipped, (y + 1) % classes, y)


def loaded(name: str, seed: int, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and labels of a table."""
    if name in GENERATED:
        return generated(name, seed)
    if name == "a9a":
        assert folder is not None
        path = next(
            folder / one for one in ("a9a", "a9a.gz") if (folder / one).exists()
        )
        X, y = known.load_svmlight_file(str(path), n_features=123)
        return np.asarray(X.todense()), (y > 0).astype(int)
    X, y = PLAIN[name](return_X_y=True)
    return X, y


def dealt(deal: str, y: np.ndarray, seed: int) -> np.ndarray:
    """Return the site of every row."""
    draw = np.random.default_rng(seed)
    if deal == "iid":
        return draw.permutation(len(y)) % 5
    if deal == "size":
        return draw.choice(5, size=len(y), p=SHARES["size"])
    # By Dirichlet(.1), class by class; numbers by their fifths.
    kinds = (
        y
        if len(np.unique(y)) < 20
        else np.digitize(y, np.quantile(y, [0.2, 0.4, 0.6, 0.8]))
    )
    sites = np.zeros(len(y), int)
    for kind in np.unique(kinds):
        of_kind = kinds == kind
        sites[of_kind] = draw.choice(5, size=of_kind.sum(), p=draw.dirichlet([0.1] * 5))
    return sites


def parted(X: np.ndarray, y: np.ndarray, seed: int, by: np.ndarray | None) -> Any:
    """Return rows and labels of four fifths, and of the others."""
    return train_test_split(X, y, test_size=0.2, random_state=seed, stratify=by)


class Loss:
    """Test loss; of numbers in units of the training rows' variance."""

    def __init__(self, y: np.ndarray, X_test: np.ndarray, y_test: np.ndarray) -> None:
        self.numbers = len(np.unique(y)) >= 20
        self.X, self.y, self.spread = X_test, y_test, y.std()
        self.classes = np.unique(y)

    def __call__(self, model: Any) -> float:
        """Return the loss of a fitted model; classes that it does not know are rare."""
        if self.numbers:
            apart = (model.predict(self.X) - self.y) / self.spread
            return float(0.5 * np.mean(apart**2))
        chance = np.full((len(self.y), len(self.classes)), 1e-6)
        chance[:, np.searchsorted(self.classes, model.classes_)] = model.predict_proba(
            self.X
        )
        chance = np.clip(chance / chance.sum(axis=1, keepdims=True), 1e-15, 1)
        return float(
            -np.mean(
                np.log(
                    chance[
                        np.arange(len(self.y)), np.searchsorted(self.classes, self.y)
                    ]
                )
            )
        )


def cross_validated(numbers: bool) -> Any:
    """Return what a user of scikit-learn would take."""
    if numbers:
        return make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 4, 20)))
    return make_pipeline(StandardScaler(), LogisticRegressionCV(max_iter=2000))


def one_strength(X: np.ndarray, y: np.ndarray, numbers: bool, seed: int) -> Any:
    """Return the best of ten strengths on a fifth of the rows."""
    rest = None if numbers or np.bincount(y).min() < 2 else y
    A, B, a, b = parted(X, y, seed, rest)
    judge, fitted = Loss(y, B, b), []
    for strength in np.logspace(-4, 4, 10):
        made = (
            Ridge(strength)
            if numbers
            else LogisticRegression(C=1 / strength, max_iter=2000)
        )
        fitted.append(make_pipeline(StandardScaler(), made).fit(A, a))
    return min(fitted, key=judge)


def alone(
    X: np.ndarray, y: np.ndarray, sites: np.ndarray, loss: Loss
) -> dict[str, float]:
    """Return the loss of the largest site's model, and the mean of all sites'."""
    sizes, found = np.bincount(sites), {}
    for site in np.unique(sites):
        A, b = X[sites == site], y[sites == site]
        if loss.numbers and len(b) >= 10:
            found[site] = loss(cross_validated(True).fit(A, b))
        elif not loss.numbers and len(b) and len(np.unique(b)) > 1:
            enough = np.unique(b, return_counts=True)[1].min() >= 5
            made = (
                cross_validated(False)
                if enough
                else make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
            )
            found[site] = loss(made.fit(A, b))
    largest = found.get(int(np.argmax(sizes)), np.nan)
    return {
        "largest site": largest,
        "sites": float(np.mean(list(found.values()) or [np.nan])),
    }


@functools.cache
def in_one_place(
    name: str, split: int, folder: Path | None
) -> tuple[np.ndarray, np.ndarray, Loss, dict[str, float]]:
    """Return training rows, what judges, and the losses that no deal changes."""
    X, y = loaded(name, split, folder)
    numbers = len(np.unique(y)) >= 20
    A, B, a, b = parted(X, y, split, None if numbers else y)
    loss = Loss(a, B, b)
    found = {
        "pooled": loss(cross_validated(numbers).fit(A, a)),
        "one strength": loss(one_strength(A, a, numbers, split)),
    }
    return A, a, loss, found


def measured(name: str, deal: str, split: int, folder: Path | None) -> dict[str, float]:
    """Return the test losses of all on one split."""
    A, a, loss, pooled = in_one_place(name, split, folder)
    sites = dealt(deal, a, 1000 + split)
    began = time.perf_counter()
    kind = FederatedRidge if loss.numbers else FederatedRegularizer
    ours = kind(random_state=split).fit(A, a, sites=sites)
    seconds = time.perf_counter() - began
    return {
        "ours": loss(ours),
        **pooled,
        **alone(A, a, sites, loss),
        "exchanges": float(ours.result_.columns["exchanges"][-1]),
        "seconds": seconds,
    }


def interval(values: np.ndarray) -> str:
    """Return the mean and the half width of its 95 % interval."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return f"{values.mean() if len(values) else np.nan:.3f}"
    return (
        f"{values.mean():.3f} +- {1.96 * values.std(ddof=1) / len(values) ** 0.5:.3f}"
    )


def every_split(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure what is asked for, split by split."""
    names = given.tables.split(",") + (["a9a"] if given.data else [])
    splits = range(given.first_split, given.first_split + given.splits)
    deals = given.deals.split(",")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    for name, split, deal in itertools.product(filter(None, names), splits, deals):
        found = measured(name, deal, split, given.data)
        row = {"table": name, "deal": deal, "split": split, **found}
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def summarize(rows: Iterable[dict[str, Any]]) -> None:
    """Print a row for every table and deal, and the mean of all ratios."""
    shown = ("ours", "largest site", "sites", "one strength")
    head = ("table", "deal", "splits", "pooled", *shown, "exchanges", "seconds")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["table"], row["deal"]), []).append(row)
    ratios = []
    for (name, deal), every in groups.items():
        found = {
            key: np.asarray([one[key] for one in every])
            for key in (*shown, "pooled", "exchanges", "seconds")
        }
        base = found["pooled"]
        cells = [interval(found[key] / base) for key in shown]
        most, typical = found["exchanges"].max(), np.median(found["seconds"])
        line = [name, deal, str(len(every)), f"{base.mean():.4f}", *cells]
        print(f"| {' | '.join([*line, f'{most:.0f}', f'{typical:.1f}'])} |")
        ratios.append(float(np.mean(found["ours"] / base)))
    print(f"\nMean ratio to pooled cross-validation: {np.mean(ratios):.3f}")


def main() -> None:
    """Measure, or read what was measured, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", default=",".join([*PLAIN, *GENERATED]))
    parser.add_argument("--deals", default="iid,size,dirichlet")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--first-split", type=int, default=0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--summarize", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="sklearn")
    if given.summarize:
        lines = [line for one in given.summarize for line in one.open()]
        summarize(map(json.loads, lines))
    else:
        summarize(every_split(given))


if __name__ == "__main__":
    main()
