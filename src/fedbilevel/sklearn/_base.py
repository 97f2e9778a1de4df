"""Shared parts of all estimators: from arrays to a finished run and predictions."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedbilevel import evaluation
from fedbilevel.datasets.preparation import ClassLabel, TargetLabel
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.models import Model
from fedbilevel.result import Result
from fedbilevel.sklearn._rows import LARGEST_SEED, Table, as_column, dealt
from fedbilevel.studies.single import run_job

_OURS = ("data", "partition", "train", "split", "rows", "site", "group")
_ONE_PLACE = "all rows"


@dataclass(kw_only=True, eq=False, repr=False)
class Federated(BaseEstimator, abc.ABC):
    """The base of the estimators, each of which solves a task by its name.

    `rounds`, `local_steps` and `batch` are what the task recommends where they are
    None; `algorithm` is fedbioacc, but where the estimator says otherwise. `options`
    are further options of the task or the algorithm, as `fedbilevel list tasks NAME`
    and `fedbilevel list algorithms NAME` have them. Sites count by their rows, unless
    `site_weights` is "equal", or has a number for each, in the order of `sites_`.
    """

    _task: ClassVar[str]
    # Where nothing is chosen; None is the task's own. Sites differ: the limit of this
    # one is right where they do.
    _algorithm: ClassVar[str | None] = "fedbioacc"
    validation = 0.25  # of the rows judge, unless an estimator takes another share

    clients: int | None = None
    rounds: int | None = None
    local_steps: int | None = None
    batch: int | None = None
    algorithm: str | None = None
    random_state: Any = None
    options: Mapping[str, Any] | None = None
    site_weights: Any = None

    result_: Result = field(init=False)
    n_features_in_: int = field(init=False)

    @abc.abstractmethod
    def _label(self, y: np.ndarray) -> tuple[ClassLabel | TargetLabel, np.ndarray]:
        """Return what is predicted, and the labels as a task takes them."""

    def _table(self, X: Any, y: Any, sites: Any) -> Table:
        """Check the input of `fit`, and assign rows to sites."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        label, y = self._label(y)
        seed = check_random_state(self.random_state).randint(LARGEST_SEED)
        draw = np.random.default_rng(seed)
        site = dealt(sites, self.clients, len(X), draw)
        self.sites_ = np.unique(site)
        return Table(X, label, y, {"site": site}, draw)

    def _experiment(self, seed: int, task: str, more: Mapping[str, str]) -> Experiment:
        """Return the names and numbers of a run."""
        options = {}
        for name, value in (self.options or {}).items():
            if name in _OURS:
                raise InvalidInputError(
                    f"options: '{name}' is decided by what `fit` is given. Leave it "
                    "out."
                )
            text = str(value)
            options[name] = text.lower() if isinstance(value, bool) else text
        return Experiment(
            task,
            self.algorithm or self._algorithm,
            rounds=self.rounds,
            local_steps=self.local_steps,
            batch=self.batch,
            seed=seed,
            weights=self.site_weights,
            options={**options, "partition": "column:site", "split": str(seed), **more},
        )

    def _run(
        self,
        table: Table,
        validation: np.ndarray | None,
        seed: int,
        task: str = "",
        **more: str,
    ) -> Result:
        """Run the task on the rows, some of which judge, and return how it ended."""
        experiment = self._experiment(seed, task or self._task, more)
        names = getattr(self, "feature_names_in_", ())
        built, values, _ = experiment.build_task(table.dataset(names, validation))
        # No row is held out: users with a test set call `score` with it.
        built = replace(built, metrics=None, headline="upper_loss")
        made = experiment.bind(built, values)
        with made.naming_sites():
            result = run_job(
                made.job(seed),
                made.rounds,
                task=experiment.label,
                config={**made.config, "seed": seed},
            )
        result = made.named(result)
        if result.model is None:
            raise InvalidInputError(
                f"algorithm='{result.algorithm}' leaves every site with a model of its "
                "own, and an estimator predicts by one. Choose one whose answer is a "
                "shared y."
            )
        return result

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Fit to rows X with labels or numbers y; `sites` names the site of every row.

        Without sites the rows are partitioned at random over so many `clients`, or stay
        in one place.
        """
        table = self._table(X, y, sites)
        seed = table.seed()
        self.result_ = self._run(table, table.judges(self.validation), seed)
        return self

    def quality(
        self, X: Any, y: Any, sites: Any = None, *, training: tuple[Any, ...]
    ) -> dict[str, Any]:
        """Return how good the model is on rows that it was not fitted to.

        `training` is what `fit` was given, (X, y) or (X, y, sites): baselines are made
        of it, which an estimator does not keep. With `sites` of the rows every site is
        judged by its own, too. The answer is plain data, as `result.quality` of a run:
        metrics with 95 % intervals, a `sentence`, and `warnings`.
        """
        one: Any = self  # a classifier or a regressor
        classes = getattr(self, "classes_", None)
        predicted = one.predict(X) if classes is None else one.predict_proba(X)
        tested, rows = self._checked(X), self._checked(training[0])
        held = _codes("training", training[1], classes, rows)
        column = np.full(len(rows), _ONE_PLACE)
        if training[2:] and training[2] is not None:
            column = as_column("sites of training", training[2], len(rows))
        names, places = np.unique(column), None
        if sites is not None:
            found = as_column("sites", sites, len(tested))
            places = np.asarray([_place(names, one) for one in found])
        count = 0 if classes is None else len(classes)
        shares = np.bincount(held, minlength=count) if count else np.array([len(held)])
        asked = evaluation.Judged(
            evaluation.Rows(_codes("y", y, classes, tested), count),
            predicted,
            [] if classes is None else [str(one) for one in classes],
            tested if evaluation.is_linear_cheap(tested.shape[1], count) else None,
            places,
            np.round(self.validation * shares).astype(int).tolist(),
        )
        parts = []
        for name in names:
            own = column == name
            at_site = partial(rows.__getitem__, own)
            parts.append(evaluation.Site(str(name), held[own], at_site))
        return evaluation.quality(asked, parts)

    def _models(self) -> list[Model]:
        """Return the models that predict together."""
        model = self.result_.model
        assert model is not None
        return [model]

    def _checked(self, X: Any) -> Any:
        check_is_fitted(self, "result_")
        return validate_data(self, X, dtype=np.float64, reset=False)


class FederatedClassifying(ClassifierMixin, Federated):
    """The base of the classifiers."""

    classes_: np.ndarray

    def _label(self, y: np.ndarray) -> tuple[ClassLabel, np.ndarray]:
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InvalidInputError(
                f"all labels are of one class, {self.classes_.tolist()[0]!r}: there "
                "is nothing to distinguish."
            )
        names = tuple(str(one) for one in self.classes_)
        return ClassLabel("label", names), codes.astype(np.int32)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of every class, in the order of `classes_`."""
        rows = self._checked(X)
        every = [model.probabilities(rows) for model in self._models()]
        return np.mean(every, axis=0)

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of every row."""
        likeliest = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[likeliest]


def _place(names: np.ndarray, name: str) -> int:
    """Return the number of a site; -1 is one that nothing was fitted to."""
    found = np.flatnonzero(names == name)
    return int(found[0]) if len(found) else -1


def _codes(
    what: str, label: Any, classes: np.ndarray | None, rows: np.ndarray
) -> np.ndarray:
    """Return labels as numbers of classes; where numbers are predicted, as they are."""
    values = column_or_1d(label)
    check_consistent_length(rows, values)
    if classes is None:
        return np.asarray(values, float)
    for value in values[~np.isin(values, classes)]:
        raise InvalidInputError(
            f"{what}: the label '{value}' is none of those that were fitted. Leave its "
            "rows out."
        )
    return np.searchsorted(classes, values)
