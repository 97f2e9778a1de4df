"""The result of a run. Saved as JSON and npz: NumPy alone reads it back."""

import html
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _files, _folders, _tree
from fedbilevel.errors import CheckpointError, InvalidInputError, needed, unknown_name
from fedbilevel.models import Model, can_be_kept


@dataclass(frozen=True, repr=False)
class Result:
    """Columns per measured round, the final point, costs, and where it all came from.

    `task` and `algorithm` are names. `columns` has one entry per measured round,
    `round` among them, and the `exchanges` with clients, `bytes` sent and `samples`
    drawn in all until then; `point` the leaves of x and y by name; `final` the value
    of every column there; `counts` the exact costs; `seconds` compiling apart from
    running; `config` and `versions` what to repeat it with; `ended` why there were no
    more rounds; `events` the automatic interventions. The point is that of the last
    round, or, where a better one was measured, the best, and `last` has the last one.
    `levels` are x and y in the structure of the start, where it is known; `model` is
    what predicts, where the task says how. `quality` compares it with baselines on
    held-out rows, where there are any. Of a comparison `start` has the metrics before
    the first round.
    """

    task: str
    algorithm: str
    config: dict[str, Any]
    versions: dict[str, str]
    columns: dict[str, np.ndarray]
    point: dict[str, np.ndarray]
    final: dict[str, Any]
    counts: dict[str, Any]
    seconds: dict[str, float]
    ended: str = ""
    events: list[str] = field(default_factory=list)
    last: dict[str, np.ndarray] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)
    levels: tuple[Any, Any] | None = field(default=None, compare=False)
    model: Model | None = field(default=None, compare=False)

    @property
    def x(self) -> Any:
        """The upper variable, in the structure of the start.

        Blocks that each client keeps to itself have a leading axis over clients. Of a
        result that was loaded without `like` it is an array, or nested dictionaries by
        the names of its parts.
        """
        return _nested("x", self.point) if self.levels is None else self.levels[0]

    @property
    def y(self) -> Any:
        """The lower variable, as `x`."""
        return _nested("y", self.point) if self.levels is None else self.levels[1]

    @property
    def from_start(self) -> dict[str, np.ndarray]:
        """The columns, with a row for round 0 where the start was measured."""
        costs = dict.fromkeys(("round", "exchanges", "bytes", "samples"), 0)
        first = {**costs, **self.start}
        if not self.start or not first.keys() >= self.columns.keys():
            return self.columns
        return {
            name: np.concatenate([np.asarray([first[name]], column.dtype), column])
            for name, column in self.columns.items()
        }

    @property
    def headline(self) -> str:
        """The metric to look at first."""
        return self.config.get("headline", "upper_loss")

    def __repr__(self) -> str:
        """Describe the run in a few lines; `final`, `counts` and `config` hold more."""
        found = ", ".join(f"{name} {short(value)}" for name, value in self._metrics())
        good = f"  {self.quality['sentence']}\n" if self.quality else ""
        notes = "".join(f"\n  Note: {event}" for event in self.events)
        about = f"Result of {self.algorithm} on {self.task}, {self._end()}"
        return f"{about}:\n{good}  {found}{notes}"

    def _repr_html_(self) -> str:
        good = self.quality.get("sentence", "")
        about = f"{self.algorithm} on {self.task}, {self._end()}"
        table = as_html(about, [(name, short(one)) for name, one in self._metrics()])
        notes = "".join(f"<p>Note: {html.escape(event)}</p>" for event in self.events)
        return f"<p>{html.escape(good)}</p>{table}{notes}" if good else table + notes

    def predict(self, rows: Any) -> np.ndarray:
        """Return the likeliest class, or the number, of raw rows; see `Model`.

        Rows are columns by name, a frame, or an array of the model's features.
        """
        if self.model is None:
            raise InvalidInputError(
                f"the run of {self.algorithm} on {self.task} has no model that "
                "predicts: its task does not say how, or y is personal to each "
                "client. Apply `result.x` and `result.y` yourself."
            )
        return self.model.predict(rows)

    def to_pandas(self) -> Any:
        """Return the columns as a pandas frame, one row per measured round."""
        pandas = needed(
            "pandas",
            "frames are made by pandas: install it, or read `result.columns`, which "
            "are NumPy arrays by name.",
        )
        return pandas.DataFrame(self.columns)

    def plot(
        self,
        metrics: str | Sequence[str] = (),
        *,
        along: str = "round",
        axes: Any = None,
    ) -> Any:
        """Draw metrics, the headline if none is named, and return matplotlib's axes.

        `along` is the column of the horizontal axis: round, exchanges, bytes or
        samples. Without `axes` a new figure is made.
        """
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        names = names or [self.headline]
        for name in (along, *names):
            if name not in self.columns:
                raise unknown_name("column", name, self.columns)
        if axes is None:
            sentence = "curves are drawn by matplotlib: install fedbilevel[report]."
            plots = needed("matplotlib.pyplot", sentence)
            axes = plots.subplots(layout="constrained")[1]
        for name in names:
            axes.plot(self.columns[along], self.columns[name], label=name)
        axes.set_xlabel(along)
        axes.set_ylabel(", ".join(names))
        axes.set_title(f"{self.algorithm} on {self.task}")
        if len(names) > 1:
            axes.legend()
        return axes

    def summary(self) -> dict[str, Any]:
        """Return the run as one JSON object."""
        names = ["task", "algorithm", "config", "final", "counts", "seconds", "ended"]
        names += ["events", *(n for n in ("start", "quality") if getattr(self, n))]
        return {name: to_plain(getattr(self, name)) for name in names}

    def save(self, folder: Path | str) -> Path:
        """Write the result into a folder, each file atomically."""
        place = Path(folder)
        about = {**self.summary(), "versions": self.versions}
        if self.quality:
            _write_json(place / _folders.QUALITY, about.pop("quality"))
        _files.write_arrays(place / _folders.COLUMNS, self.columns)
        _files.write_arrays(place / _folders.POINT, self.point)
        if self.last:
            _files.write_arrays(place / _folders.LAST, self.last)
        if self.model is not None and can_be_kept():
            self.model.save(place)
        elif self.model is not None:
            warnings.warn(
                "the model is not kept, which needs the package safetensors: install "
                "fedbilevel[cli].",
                stacklevel=2,
            )
        _write_json(place / _folders.RESULT, about)
        return place

    @staticmethod
    def load(
        folder: Path | str,
        like: tuple[Any, Any] | None = None,
        *,
        with_model: bool = True,
    ) -> "Result":
        """Read a saved result.

        `like` is (x, y) as the run was started, an Equinox model for instance: the
        result's `x` and `y` then have its structure. `with_model` reads the model, too,
        which only predictions need.
        """
        place = Path(folder)
        if not (place / _folders.RESULT).exists():
            raise CheckpointError(
                f"{place} holds no {_folders.RESULT}: the run has not finished, or "
                "this is not a run folder. "
                f"{_folders.how_to_continue(place)}".rstrip()
            )
        held: dict[str, Any] = {}
        files = {"columns": _folders.COLUMNS, "point": _folders.POINT}
        for kind, name in {**files, "last": _folders.LAST}.items():
            with _files.naming_damage(place / name):
                there = kind != "last" or (place / name).exists()
                held[kind] = _files.read_arrays(place / name) if there else {}
        point = held["point"]
        levels = like and (shaped("x", like[0], point), shaped("y", like[1], point))
        kept = with_model and (place / _folders.MODEL).exists() and can_be_kept()
        held |= {"levels": levels, "model": Model.load(place) if kept else None}
        if (place / _folders.QUALITY).exists():
            with _files.naming_damage(place / _folders.QUALITY):
                held["quality"] = json.loads((place / _folders.QUALITY).read_text())
        with _files.naming_damage(place / _folders.RESULT):
            return Result(**json.loads((place / _folders.RESULT).read_text()), **held)

    def _metrics(self) -> list[tuple[str, Any]]:
        """Return what was measured in the end, the headline first."""
        own = [name for name in self.final if name not in ("round", self.headline)]
        names = [n for n in (self.headline, *own) if n in self.final]
        return [(name, self.final[name]) for name in names]

    def _end(self) -> str:
        rows = self.config.get("batch", 0)
        drawn = (
            "" if rows == 0 else f", {'all' if rows is None else rows} rows a sample"
        )
        return (self.ended or f"{self.counts.get('rounds', '?')} rounds") + drawn


def as_html(about: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return names and texts as a table for notebooks."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td>{html.escape(text)}</td></tr>"
        for name, text in pairs
    )
    return f"<table><caption>{html.escape(about)}</caption>{rows}</table>"


def named_leaves(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of a tree by name, on the host."""
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return dict(zip(_names(prefix, tree), leaves, strict=True))


def _names(prefix: str, tree: PyTree) -> list[str]:
    names = _tree.leaf_names(tree)
    return [f"{prefix}.{name}" if name else prefix for name in names]


def _nested(level: str, point: Mapping[str, np.ndarray]) -> Any:
    """Return the leaves of a level as dictionaries in dictionaries."""
    if level in point:
        return point[level]
    prefix, tree = f"{level}.", {}
    own = {n.removeprefix(prefix): a for n, a in point.items() if n.startswith(prefix)}
    for name, leaf in own.items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):  # a key of the user's has a dot in it
                return own
        inner[last] = leaf
    return tree


def shaped(
    level: str,
    tree: PyTree,
    point: Mapping[str, np.ndarray],
    as_leaf: Callable[[np.ndarray], Any] = jnp.asarray,
) -> PyTree:
    """Return a tree with its numbers replaced by those of a point, where it has any."""
    leaves, structure = jax.tree.flatten(tree)
    names = _names(level, tree)
    wanted = {name for name in point if name.split(".")[0] == level} - {*names}
    if wanted:
        raise CheckpointError(
            f"`like` has no place for {', '.join(sorted(wanted))} of the result. Give "
            "the start that the run was begun with."
        )
    held = zip(names, leaves, strict=True)
    found = [as_leaf(point[n]) if n in point else leaf for n, leaf in held]
    return jax.tree.unflatten(structure, found)


def _write_json(path: Path, about: Any) -> None:
    text = json.dumps(about, indent=2, allow_nan=False)
    _files.write_atomically(path, f"{text}\n")


def short(value: Any) -> str:
    """Write a value in a few characters."""
    if isinstance(value, int | float):
        return f"{value:.5g}"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def to_plain(value: Any) -> Any:
    """Turn numbers of any kind into JSON's; what JSON cannot write becomes null."""
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's and JAX's
        return to_plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
