"""One estimator for each task that is fitted to a table."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np
from sklearn.base import RegressorMixin

from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Model
from fedbilevel.result import Result
from fedbilevel.sklearn import _rows
from fedbilevel.sklearn._base import (
    LARGEST_SEED,
    Federated,
    FederatedClassifying,
    Table,
)
from fedbilevel.tasks import cleaning, regularization


class _Regularized(Federated):
    _task = "regularization"
    _algorithm = None

    def __init__(
        self,
        *,
        clients: int | None = None,
        rounds: int | None = None,
        local_steps: int | None = None,
        batch: int | None = None,
        algorithm: str | None = None,
        folds: int = 5,
        random_state: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            clients=clients,
            rounds=rounds,
            local_steps=local_steps,
            batch=batch,
            algorithm=algorithm,
            random_state=random_state,
            options=options,
        )
        self.folds = folds

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        table, draw = self._table(X, y, sites)
        if not 2 <= self.folds <= len(table.y):
            raise InvalidInputError(
                f"folds={self.folds}: choose from 2 to the {len(table.y)} rows."
            )
        seed = int(draw.integers(LARGEST_SEED))
        _, self.result_ = self._run(table, None, seed, folds=str(self.folds))
        self.strengths_ = regularization.strengths(self.result_.x)
        return self


class FederatedRegularizer(_Regularized, FederatedClassifying):
    """Softmax regression with an l2 strength for each feature, tuned on other rows.

    The rows of each site take turns in judging the strengths, in so many `folds`; the
    model is trained on all rows at the strengths that were found. `strengths_` has the
    strength of each feature of X, after the features were scaled to variance 1.
    """


class FederatedRidge(RegressorMixin, _Regularized):
    """Linear regression with an l2 strength for each feature, tuned on other rows.

    As `FederatedRegularizer`, with numbers in place of classes.
    """

    def _label(self, y: np.ndarray) -> tuple[TargetLabel, np.ndarray]:
        numbers = np.asarray(y, float)
        spread = float(numbers.std()) or 1.0
        label = TargetLabel("target", float(numbers.mean()), spread)
        return label, (numbers - label.center) / label.spread

    def predict(self, X: Any) -> np.ndarray:
        """Return the number of every row."""
        rows = self._checked(X)
        return self._models()[0].predict(rows)


class FederatedClassifier(FederatedClassifying):
    """A network: hidden layers that are judged on other rows, and a head below them.

    Of the rows of each site a share, `validation`, trains the hidden layers; the head
    is trained on the others. `options={"width": 64}` sets the units of the layer.
    """

    _task = "representation"


class FederatedCleaner(FederatedClassifying):
    """A classifier that finds the rows whose labels are wrong, and ignores them.

    Every row has a weight from 0 to 1, `weights_`; `suspicious_` has the numbers of the
    rows of X, those with the smallest weights first.

    Weights are judged by rows that were not trained on. If some labels are known to be
    right, `fit(..., trusted=marks)` makes them the judges. Else the rows of each site
    are cut into `folds` parts; each part judges the others once, by a loss that wrong
    labels disturb and do not mislead, and a row's weight is the mean over the runs in
    which it was trained on. That needs labels most of which are right. Predictions are
    the mean over the runs. `results_` has the result of each, `result_` is the first.
    """

    _task = "cleaning"
    _algorithm = "fedbio"
    results_: list[Result]

    def __init__(
        self,
        *,
        clients: int | None = None,
        rounds: int | None = None,
        local_steps: int | None = None,
        batch: int | None = None,
        algorithm: str | None = None,
        folds: int = 4,
        random_state: Any = None,
        options: Mapping[str, Any] | None = None,
        site_weights: Any = None,
    ) -> None:
        super().__init__(
            clients=clients,
            rounds=rounds,
            local_steps=local_steps,
            batch=batch,
            algorithm=algorithm,
            random_state=random_state,
            options=options,
            site_weights=site_weights,
        )
        self.folds = folds

    def fit(
        self, X: Any, y: Any, sites: Any = None, trusted: Any = None
    ) -> "FederatedCleaner":
        """Fit to rows X with labels y; `sites` names the site of every row.

        Without sites the rows are dealt at random to so many `clients`, or stay in one
        place. `trusted` marks the rows whose labels are right; each site needs one.
        """
        table, draw = self._table(X, y, sites)
        runs, more = self._runs(table, trusted, draw)
        totals, times = np.zeros(len(table.y)), np.zeros(len(table.y))
        self.results_ = []
        for validation in runs:
            seed = int(draw.integers(LARGEST_SEED))
            task, result = self._run(table, validation, seed, **more)
            for _, row, _, weight, _ in cleaning.suspicious_rows(
                task, result.point
            ).rows:
                totals[row] += weight
                times[row] += 1
            self.results_.append(result)
        self.result_ = self.results_[0]
        # What is trusted was trained on in no run.
        self.weights_ = np.where(times > 0, totals / np.maximum(times, 1), 1.0)
        self.suspicious_ = np.argsort(self.weights_, kind="stable")
        return self

    def _runs(
        self, table: Table, trusted: Any, draw: np.random.Generator
    ) -> tuple[list[np.ndarray], dict[str, str]]:
        """Return the judges of each run, and the options that suit them."""
        if trusted is None:
            site = table.columns["site"]
            part = _rows.folds(site, [table.y], self.folds, draw)
            runs = [part == number for number in range(self.folds)]
            return runs, {"trusted": "false"}
        marks = np.asarray(trusted)
        if marks.dtype != bool or marks.shape != table.y.shape:
            raise InvalidInputError(
                f"trusted is {marks.dtype} of shape {marks.shape}. Give True or False "
                f"for each of the {len(table.y)} rows."
            )
        return [marks], {"trusted": "true"}

    def _models(self) -> list[Model]:
        return [result.model for result in self.results_ if result.model is not None]


class FederatedReweighter(FederatedClassifying):
    """A linear classifier for classes of which some are rare, or for two groups.

    Without groups, the training loss has a scale and a shift for each class, `scales_`
    and `shifts_`, tuned so that all classes count alike on other rows, `validation` of
    each site. With `fit(..., groups=...)`, of two groups and two classes, it has a
    weight for each group, `group_weights_`, tuned so that the model serves both equally
    well; `groups_` has their names. The algorithm is the task's own, which warns where
    sites differ too much for it.
    """

    _task = "loss-tuning"
    _algorithm = None

    def fit(
        self, X: Any, y: Any, sites: Any = None, groups: Any = None
    ) -> "FederatedReweighter":
        """Fit to rows X with labels y; `sites` names the site of every row.

        Without sites the rows are dealt at random to so many `clients`, or stay in one
        place. `groups` names the group of every row, one of two.
        """
        if groups is None:
            super().fit(X, y, sites)
            self.scales_ = np.asarray(jax.nn.sigmoid(self.result_.x["scales"]))
            self.shifts_ = np.asarray(self.result_.x["shifts"])
            return self
        table, draw = self._table(X, y, sites)
        table.columns["group"] = _rows.as_column("groups", groups, len(table.y))
        self.groups_ = np.unique(table.columns["group"])
        seed, marks = int(draw.integers(LARGEST_SEED)), self._judges(table, draw)
        _, self.result_ = self._run(table, marks, seed, "fairness", group="group")
        self.group_weights_ = 2 * np.asarray(jax.nn.softmax(self.result_.x))
        return self
