"""One estimator for each task that is fitted to a table."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np
from sklearn.base import RegressorMixin

from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Model
from fedbilevel.result import Result
from fedbilevel.sklearn import _refit
from fedbilevel.sklearn._base import Federated, FederatedClassifying
from fedbilevel.sklearn._rows import Table, as_column
from fedbilevel.tasks import regularization


@dataclass(kw_only=True, eq=False, repr=False)
class _Regularized(Federated):
    _task = "regularization"
    _algorithm = None

    folds: int = 5

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        table = self._table(X, y, sites)
        if not 2 <= self.folds <= len(table.y):
            raise InvalidInputError(
                f"folds={self.folds}: choose from 2 to the {len(table.y)} rows."
            )
        folds = str(self.folds)
        self.result_ = self._run(table, None, table.seed(), folds=folds)
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


@dataclass(kw_only=True, eq=False, repr=False)
class FederatedClassifier(FederatedClassifying):
    """A network: hidden layers that are judged on other rows, and a head below them.

    Of the rows of each site a share, `validation`, trains the hidden layers; the head
    is trained on the others. `options={"width": 64}` sets the units of the layer.
    """

    _task = "representation"
    validation: float = 0.25


@dataclass(kw_only=True, eq=False, repr=False)
class FederatedCleaner(FederatedClassifying):
    """A classifier that finds the rows whose labels are wrong, and ignores them.

    `weights_` has for every row the chance that its label is right; `suspicious_` has
    the numbers of the rows of X, the least trusted first. `noise_` says how often
    labels are wrong: once, or for each site and each class, whatever rows speak for.

    Labels are judged by rows that were not trained on. If some labels are known to be
    right, `fit(..., trusted=marks)` makes them the judges. Else the rows of each site
    are cut into `folds` parts; each part judges the others once, by a loss that expects
    wrong labels. This needs mostly right labels. `results_` has the result
    of each run.

    The model is a logistic regression, fitted again to all rows by these weights. It is
    compared with the same on all rows alike, on rows that neither was fitted to: where
    that one is not worse, it is the model, `cleaned_` is False, and a warning says so.
    `costs_` has what was compared. Where a rare class is hardly ever the likeliest one,
    `predict` compares probabilities with `bounds_`, so that every class is predicted
    about as often as it occurs, and a warning says so. With `options={"model": "mlp"}`
    predictions are the mean over the runs, and nothing is compared.
    """

    _task = "cleaning"
    _algorithm = "fedbio"
    folds: int = 4
    results_: list[Result] = field(init=False)

    def fit(self, X: Any, y: Any, sites: Any = None, trusted: Any = None) -> Self:
        """Fit to rows X with labels y; `sites` names the site of every row.

        Without sites the rows are partitioned at random over so many `clients`, or stay
        in one place. `trusted` marks the rows whose labels are right; each site needs
        one.
        """
        table = self._table(X, y, sites)
        marks = _trusted(trusted, len(table.y))
        judged_by_all = not marks.any()
        # Trusted rows are fewer than folds at some sites, which the run does not mind.
        site = table.columns["site"] if judged_by_all else np.zeros(len(marks))
        part = table.folds(site, self.folds)
        parts = [part == number for number in range(self.folds)]
        p = np.zeros((len(table.y), len(self.classes_)))
        self.results_ = []
        for judges in parts if judged_by_all else [marks]:
            known = str(not judged_by_all).lower()
            result = self._run(table, judges, table.seed(), trusted=known)
            assert result.model is not None
            doubted = judges if judged_by_all else ~marks
            p[doubted] = result.model.probabilities(table.X[doubted])
            self.results_.append(result)
        self._conclude(table, part, marks, p)
        return self

    def _conclude(
        self, table: Table, part: np.ndarray, marks: np.ndarray, p: np.ndarray
    ) -> None:
        """Say which labels are wrong, and leave the better of two models."""
        self.result_ = self.results_[0]
        model = self.result_.model
        assert model is not None
        features, site = model.features(table.X), table.columns["site"]
        rows = _refit.Rows(features, table.y, part, site, marks)
        if model.is_linear:
            found = _refit.refitted(rows, p)
            model = replace(model, layers=(found.layer,))
            self.result_ = replace(self.result_, model=model)
            self.noise_, self.cleaned_ = found.noise, found.is_cleaned
            self.costs_, self.bounds_ = found.costs, found.bounds
            _warn(found)
        else:
            self.noise_, self.cleaned_, self.costs_ = rows.noise(p), True, {}
            self.bounds_ = np.ones(p.shape[1])
        self.weights_ = self.noise_.right
        self.suspicious_ = np.argsort(self.weights_, kind="stable")

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of every row, by its part of `bounds_`."""
        likeliest = np.argmax(self.predict_proba(X) / self.bounds_, axis=1)
        return self.classes_[likeliest]

    def _models(self) -> list[Model]:
        chosen = self.result_.model
        if chosen is not None and chosen.is_linear:
            return [chosen]
        return [result.model for result in self.results_ if result.model is not None]


def _trusted(trusted: Any, rows: int) -> np.ndarray:
    """Return marks of the rows whose labels are right; none if not given."""
    if trusted is None:
        return np.zeros(rows, bool)
    marks = np.asarray(trusted)
    if marks.dtype != bool or marks.shape != (rows,):
        raise InvalidInputError(
            f"trusted is {marks.dtype} of shape {marks.shape}. Give True or False "
            f"for each of the {rows} rows."
        )
    return marks


def _warn(found: _refit.Refitted) -> None:
    """Say what a cleaned model is not."""
    if not found.is_cleaned:
        cleaned, plain = (found.costs[one] for one in ("cleaned", "uncleaned"))
        warnings.warn(
            f"the cleaned model (loss {cleaned:.4f}) is no better than that on all "
            f"rows alike ({plain:.4f}), on rows that neither was fitted to. The latter "
            "is kept.",
            stacklevel=4,
        )
    if np.any(found.bounds != 1):
        warnings.warn(
            "a class is the likeliest one of hardly any row: it is rare, and like "
            "others. `predict` chooses every class about as often as it occurs. "
            "`predict_proba` is left as it is.",
            stacklevel=4,
        )


@dataclass(kw_only=True, eq=False, repr=False)
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
    validation: float = 0.25

    def fit(self, X: Any, y: Any, sites: Any = None, groups: Any = None) -> Self:
        """Fit to rows X with labels y; `sites` names the site of every row.

        Without sites the rows are partitioned at random over so many `clients`, or stay
        in one place. `groups` names the group of every row, one of two.
        """
        if groups is None:
            super().fit(X, y, sites)
            self.scales_ = np.asarray(jax.nn.sigmoid(self.result_.x["scales"]))
            self.shifts_ = np.asarray(self.result_.x["shifts"])
            return self
        table = self._table(X, y, sites)
        table.columns["group"] = as_column("groups", groups, len(table.y))
        self.groups_ = np.unique(table.columns["group"])
        seed, marks = table.seed(), table.judges(self.validation)
        self.result_ = self._run(table, marks, seed, "fairness", group="group")
        self.group_weights_ = 2 * np.asarray(jax.nn.softmax(self.result_.x))
        if len(np.unique(self.predict(table.X))) == 1:
            warnings.warn(
                "one class is predicted for every row, so that groups look alike: that "
                "says nothing of fairness. Read `predict_proba`.",
                stacklevel=2,
            )
        return self
