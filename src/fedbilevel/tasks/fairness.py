r"""Weights of two groups in training, so that the model serves both equally well.

    w(x)     = 2 softmax(x), one weight for each group
    g_k(x,y) = mean over client k's training rows of w_group(x) CE(y'a_i, l_i)
               + (0.01/2) ||y||^2
    f_k(x,y) = (L_0 + L_1)/2 + strength (L_0 - L_1)^2

CE is the logistic loss and L_j its mean over group j of client k's validation panel. A
panel is one row of data: a gap between groups is no mean over people. In training group
1 is a minority: its share on client k is minority (1 + spread s_k), with s_k evenly
spaced from -1 to 1.

`data=synthetic`: 8 standard normal features; group j has the label 1 if a'u_j plus
0.3 N(0, 1) is positive, u_0 and u_1 being unit vectors 75 degrees apart, so that no
linear model serves both. `data=breast_cancer`: group 1 are the tumors whose mean
texture is above the median.

Of a table of your own, a column names the groups, clients have the shares of them that
the table gives them, and all validation rows judge. Few rows have a gap by chance, and
its square is larger by the variances of both means: they are subtracted, so that small
sites do not ask for a model that knows nothing. The penalty is 0.0015 of the squared
weights of columns of variance 1; the intercept is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedbilevel import _tree, datasets
from fedbilevel._types import Rows
from fedbilevel.datasets import Dataset, TableChoices
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.problem import ClientData, Problem, padded_count
from fedbilevel.tasks import _parts, _rows
from fedbilevel.tasks._base import MEASURED, Task, settings
from fedbilevel.tasks._labeled import check_not_negative, held_array, mean_of_first
from fedbilevel.tasks._networks import linear_layers

_PENALTY = 0.01
# Of columns of variance 1, and not of the intercept: rows are scaled to length 1, where
# 0.01 would leave a table of many columns little but its base rate.
_OWN_PENALTY = 0.003
_FEW = 30  # rows of a group, whose mean loss says little
_TEXTURE = 1  # a column of breast_cancer
_PEOPLE = 250  # of each group, for every client
_HELD = 0.2  # of each group for the test, and again for the panels
_ANGLE = np.deg2rad(75)
_RECOMMENDED = MEASURED | {
    "auto:fedbio-controls": "upper_step=0.5*auto",
    **settings("rounds=100 local_steps=10 batch=16 q=20 theta=0.5 upper_step=1"),
    **settings("lower_step=0.5 upper_weight=0.1 lower_weight=0.1"),
}
_Group = tuple[np.ndarray, np.ndarray]  # features and labels of its people


def _losses(y: Array, features: Array, label: Array) -> Array:
    score = features @ y
    return jax.nn.softplus(score) - label.astype(score.dtype) * score


@dataclass(frozen=True)
class _Lower:
    """The weighted loss of training rows; the first `penalized` of y are penalized."""

    penalty: float = _PENALTY
    penalized: int | None = None

    def __call__(self, x: Array, y: Array, rows: Rows) -> Array:
        weight = 2 * jax.nn.softmax(x)[rows["group"]]
        penalty = 0.5 * self.penalty * jnp.sum(y[: self.penalized] ** 2)
        return jnp.mean(weight * _losses(y, rows["features"], rows["label"])) + penalty


@dataclass(frozen=True)
class _Upper:
    """The loss of panels; `unbiased` takes the gap by chance off the squared one."""

    unbiased: bool = False

    def __call__(self, x: Array, y: Array, rows: Rows) -> Array:
        del x
        losses = _losses(y, rows["features"], rows["label"])
        means = jax.vmap(jax.vmap(mean_of_first))
        groups = means(losses, rows["size"])
        gap = (groups[:, 0] - groups[:, 1]) ** 2
        if self.unbiased:
            squares = means((losses - groups[..., None]) ** 2, rows["size"])
            left = jnp.maximum(rows["size"] - 1, 1).astype(losses.dtype)
            gap = gap - jnp.sum(squares / left, axis=-1)
        return jnp.mean(jnp.mean(groups, axis=-1) + rows["strength"] * gap)


class _TestMetrics(eqx.Module):
    """Losses and accuracies of both groups on rows that no client has.

    Rows past `size` are padding.
    """

    features: Float[Array, "2 rows features"]
    label: Int[Array, "2 rows"]
    size: Int[Array, ""]

    def __call__(self, x: Array, y: Array) -> dict[str, Array]:
        losses = mean_of_first(_losses(y, self.features, self.label), self.size)
        right = (self.features @ y > 0) == (self.label > 0)
        accuracy = mean_of_first(right.astype(y.dtype), self.size)
        return {
            "worst_group_loss": jnp.max(losses),
            "loss_gap": jnp.max(losses) - jnp.min(losses),
            "accuracy_group_0": accuracy[0],
            "accuracy_group_1": accuracy[1],
            "accuracy_gap": jnp.max(accuracy) - jnp.min(accuracy),
            "weight_group_1": 2 * jax.nn.softmax(x)[1],
        }


def _standardized(features: np.ndarray) -> np.ndarray:
    """Center and scale columns, then rows to length about 1; append a constant."""
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    features = features / np.sqrt(features.shape[1])
    return np.hstack([features, np.ones((len(features), 1))])


def _synthetic(clients: int, draw: np.random.Generator) -> list[_Group]:
    size = _PEOPLE * clients
    groups = []
    for angle in (0.0, _ANGLE):
        a = draw.standard_normal((size, 8))
        along = np.cos(angle) * a[:, 0] + np.sin(angle) * a[:, 1]
        label = along + 0.3 * draw.standard_normal(size) > 0
        groups.append((_standardized(a), label.astype(np.int32)))
    return groups


def _breast_cancer(clients: int, draw: np.random.Generator) -> list[_Group]:
    del clients
    table = datasets.load("breast_cancer")
    order = draw.permutation(len(table.label))
    raw, label = table.features[order], table.label[order]
    above = raw[:, _TEXTURE] > np.median(raw[:, _TEXTURE])
    features = _standardized(raw)
    return [(features[chosen], label[chosen]) for chosen in (~above, above)]


_DATASETS = {"synthetic": _synthetic, "breast_cancer": _breast_cancer}


def _panel(groups: Sequence[_Group], strength: float, longest: int) -> Rows:
    """Return a panel padded to so many rows of a group, and how many rows are real."""
    room, sizes = padded_count(longest), []
    features = np.zeros((1, 2, room, groups[0][0].shape[1]))
    label = np.zeros((1, 2, room), np.int32)
    for number, (held, own) in enumerate(groups):
        features[0, number, : len(own)], label[0, number, : len(own)] = held, own
        sizes.append(len(own))
    return {
        "features": features,
        "label": label,
        "strength": np.full(1, strength),
        "size": np.asarray([sizes], np.int32),
    }


def _training_rows(groups: list[_Group], minority: np.ndarray) -> list[Rows]:
    """Give every client its share of group 1, and as many rows as the groups allow."""
    pairs = list(zip(groups, (1 - minority, minority), strict=True))
    size = min(len(label) / share.sum() for (_, label), share in pairs)
    parts = []
    for index, ((features, label), share) in enumerate(pairs):
        ends = np.cumsum(np.floor(size * share).astype(int))
        group = np.full(len(label), index, np.int32)
        columns = {"features": features, "label": label, "group": group}
        parts.append({name: np.split(one, ends) for name, one in columns.items()})
    return [
        {name: np.concatenate([part[name][k] for part in parts]) for name in parts[0]}
        for k in range(len(minority))
    ]


def _check(strength: float, minority: float, spread: float) -> None:
    check_not_negative(strength=strength)
    if not (0 < minority <= 0.5 or minority == -1):
        raise InvalidInputError(
            f"minority={minority}: the share of group 1 in training is above 0 and at "
            "most 0.5."
        )
    if not 0 <= spread <= 1:
        raise InvalidInputError(
            f"spread={spread}: choose between 0, clients alike, and 1, where the "
            "minority's share goes from none to twice the mean."
        )


def make(
    clients: int = 0,
    *,
    data: Annotated[
        str | Dataset, "synthetic, breast_cancer, or a table of your own, with `group`"
    ] = "synthetic",
    strength: Annotated[float, "how much the gap between the groups counts above"] = (
        1.0
    ),
    minority: Annotated[
        float,
        "share of group 1 in training, made so by leaving rows out; -1 is 0.2 for "
        "synthetic and breast_cancer; your own table stays as it is",
    ] = -1.0,
    spread: Annotated[
        float, "how much that share differs between clients, from 0 to 1"
    ] = 0.0,
    partition: _rows.PartitionText = "iid",
    split: _rows.SplitSeed = 0,
    **table: _rows.TableOptions,
) -> Task:
    """Build the task; a fifth of each group is for testing, a fifth for the panels.

    Of a table of your own, `group` names the column of the two groups; where it has
    more values, COLUMN:VALUE sets one against all others.
    """
    _check(strength, minority, spread)
    choices = TableChoices(**table)
    if isinstance(data, str) and data in _DATASETS:
        choices.check_unused(data)
        if choices.group or choices.site or partition != "iid":
            raise InvalidInputError(
                f"data={data} has its own groups and clients: group, site and "
                "partition are for a table of your own."
            )
        minority = 0.2 if minority == -1 else minority
        return _built_in(data, clients or 8, strength, minority, spread, split)
    if minority != -1 or spread:
        raise InvalidInputError(
            "minority and spread leave out rows of synthetic and breast_cancer. A "
            "table of your own stays as it is."
        )
    pool = _rows.load(data, split, 0, table, "fairness")
    return _own_task(pool, clients, strength, partition)


def _built_in(
    data: str, clients: int, strength: float, minority: float, spread: float, split: int
) -> Task:
    if clients < 1:
        raise InvalidInputError(f"clients={clients}: there must be at least one.")
    groups = _DATASETS[data](clients, np.random.default_rng(split))
    held = int(_HELD * min(len(label) for _, label in groups))
    test, panels, training = (
        [(features[part], label[part]) for features, label in groups]
        for part in (slice(held), slice(held, 2 * held), slice(2 * held, None))
    )
    if held < clients:
        raise InvalidInputError(
            f"clients={clients}: the validation rows of {data} are enough for "
            f"panels of {held} clients."
        )
    positions = np.linspace(-1, 1, clients) if clients > 1 else np.zeros(1)
    shares = minority * (1 + spread * positions)
    size = held // clients
    judges = []
    for part in [slice(k * size, (k + 1) * size) for k in range(clients)]:
        both = [(features[part], label[part]) for features, label in panels]
        judges.append(_panel(both, strength, size))
    problem = Problem(_Upper(), _Lower())
    return _task(problem, judges, _training_rows(training, shares), test)


def _task(
    problem: Problem,
    panels: list[Rows],
    training: list[Rows],
    test: list[_Group],
    **about: Any,
) -> Task:
    features, label = (np.stack(columns) for columns in zip(*test, strict=True))
    held = held_array(features, float, axis=1), held_array(label, label.dtype, axis=1)
    return Task(
        problem,
        ClientData.from_clients(panels, training),
        _tree.filled(2),
        _tree.filled(features.shape[-1]),
        _TestMetrics(*held, jax.device_put(np.int32(label.shape[1]))),
        headline="worst_group_loss",
        recommended=_RECOMMENDED,
        **about,
    )


def _own_task(pool: _rows.Pool, clients: int, strength: float, partition: str) -> Task:
    """Build the task of a table that has a column of groups.

    Each client's validation rows become its panel; the others train.
    """
    if not pool.choices.group:
        raise InvalidInputError(
            "the task fairness compares two groups: name their column with --group "
            "COLUMN."
        )
    if pool.classes != 2:
        raise InvalidInputError(
            f"{pool.held.name} has {pool.classes} classes, and the task fairness "
            "needs two. Choose another label with --label COLUMN."
        )
    names, of_held, of_test = _groups(pool)
    remarks = [f"group {number} is '{name}'" for number, name in enumerate(names)]
    pool = _rows.with_constant(pool)
    parts = _parts.partition_rows(
        pool, clients, partition, 0.6, more={"group": of_held}
    )
    panels = _panels(parts, names, strength)
    remarks += _few(parts, panels)
    test, groups = pool.test, [np.flatnonzero(of_test == j) for j in (0, 1)]
    size = min(map(len, groups))
    if size == 0:
        raise InvalidInputError(
            f"{pool.held.name}: one of the groups {', '.join(names)} has no row for "
            "testing. It needs more rows."
        )
    both = [(test.features[one[:size]], test.label[one[:size]]) for one in groups]
    remarks.append(f"testing compares {size} rows of each group")
    about = replace(parts, remarks=tuple(remarks)).about(linear_layers)
    about["classes"] = ()  # a panel is no row with a label
    columns = test.features.shape[1] - 1
    problem = Problem(_Upper(True), _Lower(_OWN_PENALTY / columns, columns))
    return _task(problem, panels, parts.lower, both, **about)


def _few(parts: _parts.Partition, panels: list[Rows]) -> list[str]:
    """Name the sites that judge by few rows."""
    sizes = [int(panel["size"].min()) for panel in panels]
    names = parts.names or [f"client {client}" for client in range(len(panels))]
    few = [f"{name} ({n})" for name, n in zip(names, sizes, strict=True) if n < _FEW]
    if not few:
        return []
    listed = ", ".join(few[:10]) + (", ..." if few[10:] else "")
    return [f"fewer than {_FEW} rows of a group judge the gap at {listed}"]


def _groups(pool: _rows.Pool) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the names of two groups, and the group of held and of tested rows."""
    column, _, value = pool.choices.group.partition(":")
    if column not in pool.whole:
        raise unknown_name(f"column of {pool.held.name}", column, pool.whole)
    values = [str(one) for one in np.unique(pool.whole[column])]
    if value and value not in values:
        raise unknown_name(f"value of column '{column}'", value, values)
    if not value and len(values) != 2:
        raise InvalidInputError(
            f"column '{column}' of {pool.held.name} has {len(values)} values, "
            f"{', '.join(values[:10])}, and fairness compares two groups. Set one "
            f"against the others with --group {column}:{values[0]}."
        )
    chosen = value or values[1]
    names = [f"not {value}", value] if value else values
    held, test = (
        np.asarray([str(one) == chosen for one in part.columns[column]], np.int32)
        for part in (pool.held, pool.test)
    )
    return names, held, test


def _panels(parts: _parts.Partition, names: list[str], strength: float) -> list[Rows]:
    """Return each client's panel: all its validation rows, by group."""
    judges = []
    for client, upper in enumerate(parts.upper):
        both = [np.flatnonzero(upper["group"] == j) for j in range(len(names))]
        for name, found in zip(names, both, strict=True):
            if len(found) == 0:
                who = parts.names[client] if parts.names else f"client {client}"
                raise InvalidInputError(
                    f"'{who}' has no row of the group '{name}' for validation. Leave "
                    "its rows out, or ask for fewer clients."
                )
        judges.append([(upper["features"][own], upper["label"][own]) for own in both])
    longest = max(len(label) for both in judges for _, label in both)
    # One row has no variance that could be subtracted: its gap does not count.
    counted = [min(len(label) for _, label in both) > 1 for both in judges]
    return [
        _panel(both, strength * known, longest)
        for both, known in zip(judges, counted, strict=True)
    ]
