"""Are wrong labels found, and is the model better? The table of docs/clean-labels.md.

    pip install --target peers cleanlab
    PYTHONPATH=peers python benchmarks/cleaning_tables.py rows.jsonl [--seeds 8]
    python benchmarks/cleaning_tables.py rows.jsonl --table    # what the file holds

Labels of seven tenths of each table are spoiled, the other rows test with right labels.
`FederatedCleaner` has nothing chosen. Its peers see the rows of all sites in one place:
logistic regression of scikit-learn on scaled columns, five folds, rows ordered by the
probability of their labels (`get_label_quality_scores` of cleanlab is the same), and
cleanlab's `find_label_issues`, the rows that it names before all others. cleanlab is no
dependency; without it that column is empty. A line is added to the file when a table is
done, and rows that the file holds are not run again.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn import datasets
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    log_loss,
)
from sklearn.model_selection import (
    StratifiedKFold,
    cross_val_predict,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedbilevel
from fedbilevel.sklearn import FederatedCleaner

try:
    find_label_issues: Any = import_module("cleanlab.filter").find_label_issues
except ImportError:
    find_label_issues = None

THREE = (1 / 3, 1 / 3, 1 / 3)
UNLIKE = (0.7, 0.2, 0.06, 0.03, 0.01)


class Table(NamedTuple):
    """Rows and their right labels, shares of the sites, and how labels go wrong."""

    load: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
    shares: tuple[float, ...]
    rate: Callable[[np.ndarray, np.ndarray], Any]  # of labels and sites


def _known(name: str) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return lambda draw: getattr(datasets, f"load_{name}")(return_X_y=True)


def _two_classes(
    rows: int, rare: float, apart: float, features: int = 12
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Make two normal clouds `2 apart` from each other, columns that go together."""

    def load(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        label = (draw.random(rows) < rare).astype(int)
        toward = np.where(np.arange(features) < 5, draw.normal(size=features), 0)
        toward *= 2 * apart / np.linalg.norm(toward)
        mixed = np.eye(features) + 0.3 * draw.normal(size=(features, features))
        clouds = draw.normal(size=(rows, features)) + np.outer(label, toward)
        return clouds @ mixed, label

    return load


TABLES = {
    "breast cancer, 20 % wrong": Table(
        _known("breast_cancer"), THREE, lambda label, site: 0.2
    ),
    "digits, 20 % wrong": Table(_known("digits"), THREE, lambda label, site: 0.2),
    "wine, 20 % wrong": Table(_known("wine"), THREE, lambda label, site: 0.2),
    "a class of 8 %, 6 % wrong": Table(
        _two_classes(2000, 0.08, 1.6), THREE, lambda label, site: 0.06
    ),
    "one class loses 20 %": Table(
        _two_classes(1500, 0.5, 1.2), THREE, lambda label, site: 0.2 * (label == 1)
    ),
    "one site of three, 30 % wrong": Table(
        _two_classes(1500, 0.4, 1.2), THREE, lambda label, site: 0.3 * (site == 1)
    ),
    "a class of 5 %, 15 % wrong at one site": Table(
        _two_classes(3000, 0.05, 1.6), THREE, lambda label, site: 0.15 * (site == 1)
    ),
    "sites of 70 to 1 %, 10 % wrong": Table(
        _two_classes(2000, 0.2, 1.2), UNLIKE, lambda label, site: 0.1
    ),
    "such sites, a class of 6 % that overlaps, 6 % wrong at two": Table(
        _two_classes(4000, 0.06, 0.65, 20),
        UNLIKE,
        lambda label, site: 0.06 * (site < 2),
    ),
    "no label is wrong, a class of 6 % that overlaps": Table(
        _two_classes(3000, 0.06, 0.65, 20), UNLIKE, lambda label, site: 0.0
    ),
}


def spoiled(name: str, seed: int) -> Iterator[np.ndarray]:
    """Return training rows, given labels, marks of wrong ones, sites; test rows."""
    table, draw = TABLES[name], np.random.default_rng((seed, list(TABLES).index(name)))
    X, label = table.load(draw)
    order, tested = train_test_split(
        np.arange(len(X)), test_size=0.3, stratify=label, random_state=seed
    )
    right = label[order]
    site = draw.choice(len(table.shares), len(right), p=table.shares)
    wrong = draw.random(len(right)) < table.rate(right, site)
    classes = int(label.max()) + 1
    other = (right + draw.integers(1, classes, len(right))) % classes
    given = np.where(wrong, other, right)
    yield from (X[order], given, wrong, site, X[tested], label[tested])


def scores(model: Any, X: np.ndarray, label: np.ndarray) -> dict[str, float]:
    """Return what a model is worth on rows with right labels."""
    p = model.predict_proba(X)
    guess = model.predict(X)
    return {
        "accuracy": float(np.mean(guess == label)),
        "balanced accuracy": float(balanced_accuracy_score(label, guess)),
        "log loss": float(log_loss(label, p)),
        "classes": len(np.unique(guess)),
    }


def row(name: str, seed: int) -> dict[str, Any]:
    """Clean one table, and let the peers order its rows."""
    X, given, wrong, site, X_test, label = spoiled(name, seed)
    plain = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    chances = cross_val_predict(plain, X, given, cv=folds, method="predict_proba")
    p = np.asarray(chances)
    own = p[np.arange(len(given)), given]
    orders = {"self-confidence": own}
    if find_label_issues is not None:
        orders["cleanlab"] = own - 2.0 * find_label_issues(given, p, n_jobs=1)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cleaner = FederatedCleaner(random_state=seed).fit(X, given, site)
    orders["ours"] = cleaner.weights_
    found = {
        one: float(average_precision_score(wrong, -order)) if wrong.any() else None
        for one, order in orders.items()
    }
    return {
        "table": name,
        "seed": seed,
        "average precision": found,
        "cleaned": scores(cleaner, X_test, label),
        "plain": scores(plain.fit(X, given), X_test, label),
        "kept": "cleaned" if cleaner.cleaned_ else "uncleaned",
        "noise": cleaner.noise_.kind,
        "said": [str(one.message) for one in said if one.category is UserWarning],
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Run what the file lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", default="", help="tables whose names contain this")
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args()
    fedbilevel.configure()
    held = [json.loads(line) for line in _lines(given.file)]
    done = {(one["table"], one["seed"]) for one in held}
    for seed in [] if given.table else range(given.seeds):
        for name in [one for one in TABLES if given.only in one]:
            if (name, seed) not in done:
                held.append(row(name, seed))
                with given.file.open("a") as out:
                    out.write(json.dumps(held[-1]) + "\n")
    print(_printed(held))


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _printed(rows: list[dict[str, Any]]) -> str:
    """Return means over seeds; of models those of plain regression, to ours."""
    lines = [
        "| table | seeds | self-confidence | cleanlab | ours | accuracy "
        "| balanced accuracy | log loss | one class |",
        "|" + "---|" * 9,
    ]
    for name in [one for one in TABLES if any(row["table"] == one for row in rows)]:
        own = [one for one in rows if one["table"] == name]
        found = [one["average precision"] for one in own]
        cells = []
        for peer in ("self-confidence", "cleanlab", "ours"):
            values = [one[peer] for one in found if one.get(peer) is not None]
            cells.append(f"{np.mean(values):.3f}" if values else "")
        for kind in ("accuracy", "balanced accuracy", "log loss"):
            pair = [
                np.mean([one[k][kind] for one in own]) for k in ("plain", "cleaned")
            ]
            cells.append(f"{pair[0]:.3f} to {pair[1]:.3f}")
        single = sum(one["cleaned"]["classes"] == 1 for one in own)
        lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} | {single} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
