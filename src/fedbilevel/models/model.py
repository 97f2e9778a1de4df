"""A trained model: layers, classes, how raw rows become its features, and its files.

It is kept in two files: `model.json` says what it is, `model.safetensors` has its
arrays. Neither can hold code. Contents are checked: a file that is damaged, of another
version or of another program is refused by its name.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import write_atomically
from fedbilevel._folders import FEDERATION, MODEL, WEIGHTS
from fedbilevel.datasets import _preparation_files as files
from fedbilevel.datasets.preparation import Preparation, TargetLabel
from fedbilevel.datasets.tables import table_of_frame
from fedbilevel.errors import CheckpointError, InvalidInputError, needed
from fedbilevel.models.layers import KINDS, Dense, Layer, Multiply, Pixels

_AT_ONCE = 1000  # rows; a convolution keeps every window of them
_ENTRIES = ("about", "advice", "classes", "layers", "pixels", "preparation")
_LARGEST = 2**32  # bytes of weights
_LONGEST = 2**26  # bytes of JSON
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class Predictor:
    """How the point of a run makes a model: `layers`, a function of (x, y).

    `pixels` is for images of bytes; features of other kinds have a preparation.
    `advice` says what to do with layers that predict nothing by themselves, since every
    client has a y of its own; they are made of x alone.
    """

    layers: Callable[[Any, Any], tuple[Layer, ...]]
    pixels: Pixels | None = None
    advice: str = ""


@dataclass(frozen=True, eq=False)
class Model:
    """Predicts classes, or numbers where there are none, from raw rows.

    `layers` turn prepared features into scores. `classes` are the names in the order of
    the scores. Raw rows are prepared by `preparation`, by columns, or by `pixels`.
    `about` says where the model comes from. With an `advice` it is what other models
    begin with: it predicts nothing, and need not know what its features are made of.
    """

    layers: tuple[Layer, ...]
    classes: tuple[str, ...]
    preparation: Preparation | None = None
    pixels: Pixels | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""

    def __post_init__(self) -> None:
        if self.advice:
            if not self.layers or self.classes:
                raise InvalidInputError(
                    "a model with an `advice` has layers, and no classes."
                )
            return
        last = self.layers[-1] if self.layers else None
        if not isinstance(last, Dense) or last.relu:
            raise InvalidInputError(
                "the last layer of a model must be dense, without a relu: it gives the "
                "scores."
            )
        if len(last.bias) != (len(self.classes) or 1):
            raise InvalidInputError(
                f"a model with {len(last.bias)} scores for {len(self.classes)} "
                "classes: each class has one."
            )
        if (self.preparation is None) == (self.pixels is None):
            raise InvalidInputError(
                "a model needs a `preparation` or `pixels`, not both."
            )
        if not self.classes and not isinstance(self._label, TargetLabel):
            raise InvalidInputError(
                "a model without classes needs a `preparation` whose label is a number."
            )

    @property
    def _label(self) -> Any:
        return None if self.preparation is None else self.preparation.label

    @property
    def is_linear(self) -> bool:
        """Say whether scores are a linear function of the features."""
        if self.advice:
            return False
        dense = [one for one in self.layers if isinstance(one, Dense)]
        plain = all(isinstance(one, Multiply | Dense) for one in self.layers)
        return plain and len(dense) == 1

    def features(self, rows: Any) -> np.ndarray:
        """Prepare raw rows: columns by name, a frame, or an array.

        An array has the columns of the model's `feature_names`, not scaled yet, or is
        one of images.
        """
        if self.pixels is not None:
            return self.pixels.apply(np.asarray(rows))
        made = self.preparation
        if made is None:  # of a model that others begin with
            return np.asarray(rows, dtype=float)
        if hasattr(rows, "columns"):
            table = table_of_frame(rows)
            return made.apply(table.columns, table.where)
        if isinstance(rows, Mapping):
            return made.apply({str(n): np.asarray(one) for n, one in rows.items()})
        array = np.asarray(rows, dtype=float)
        if array.ndim != 2 or array.shape[1] != len(made.feature_names):
            raise InvalidInputError(
                f"rows of shape {array.shape}: give one row per sample and the "
                f"{len(made.feature_names)} columns of the model's features."
            )
        return made.scale(array)

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return the scores of prepared features, some rows at a time."""
        parts = []
        for first in range(0, max(len(features), 1), _AT_ONCE):
            part = np.asarray(features[first : first + _AT_ONCE], float)
            for layer in self.layers:
                part = layer(part)
            parts.append(part)
        return np.concatenate(parts)

    def probabilities(self, rows: Any) -> np.ndarray:
        """Return the probability of every class for raw rows."""
        self.check_predicts()
        if not self.classes:
            raise InvalidInputError(
                "the model predicts a number, which has no probabilities."
            )
        return softmax(self.scores(self.features(rows)))

    def predict(self, rows: Any) -> np.ndarray:
        """Return the name of the likeliest class of raw rows, or the number."""
        self.check_predicts()
        return self.decided(self.scores(self.features(rows)))

    def check_predicts(self) -> None:
        """Raise if this is what other models begin with."""
        if self.advice:
            raise InvalidInputError(self.advice)

    def decided(self, scores: np.ndarray) -> np.ndarray:
        """Return what scores say: a class, or a number in the label's own units."""
        if not self.classes:
            return self._label.decode(scores[:, 0])
        return np.asarray(self.classes)[np.argmax(scores, axis=1)]

    def save(self, folder: Path) -> None:
        """Write the model into a folder: JSON and safetensors."""
        save(self, folder / WEIGHTS, folder / MODEL)

    @staticmethod
    def load(folder: Path | str) -> "Model":
        """Read the model of a run folder."""
        folder = Path(folder)
        path = folder / MODEL
        if not path.exists():
            if (folder / FEDERATION).exists():
                raise CheckpointError(
                    f"{folder} holds no {MODEL}: its server did not know the columns "
                    "of the sites, or its task leaves no model. Serve with "
                    "--preparation FILE, the file that the nodes use."
                )
            raise CheckpointError(
                f"{folder} holds no {MODEL}: it is no folder of a finished run, or its "
                "task leaves no model. Runs of regularization, cleaning, "
                "representation, loss-tuning, architecture, few-shot, and of fairness "
                "on a table do, by `fedbilevel run ... --out`."
            )
        data, arrays = _arrays(folder / WEIGHTS)
        try:
            if path.stat().st_size > _LONGEST:
                raise InvalidInputError("it is too long.")
            return _read(path.read_bytes(), data, arrays)
        except InvalidInputError as error:
            raise CheckpointError(
                f"{path} or {WEIGHTS} beside it is damaged, or not a model of "
                f"fedbilevel: {error}"
            ) from error


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return probabilities that are proportional to exp(scores)."""
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def can_be_kept() -> bool:
    """Say whether the package that keeps arrays is installed."""
    return find_spec("safetensors") is not None


def _safetensors() -> Any:
    sentence = "models are kept by safetensors: install fedbilevel[cli]."
    return needed("safetensors.numpy", sentence)


def save(model: Model, weights: Path, described: Path) -> None:
    """Write both files, the arrays first: a model that can be read is whole."""
    library, made = _safetensors(), model.preparation
    arrays: dict[str, np.ndarray] = {}
    layers: list[dict[str, Any]] = []
    for number, layer in enumerate(model.layers):
        held = files.kinded(layer, KINDS)
        for name in [name for name in held if isinstance(held[name], np.ndarray)]:
            arrays[f"layers.{number}.{name}"] = np.ascontiguousarray(held.pop(name))
        layers.append(held)
    content = {
        "about": dict(model.about),
        "advice": model.advice or None,
        "classes": model.classes,
        "layers": layers,
        "pixels": model.pixels and vars(model.pixels),
        "preparation": None if made is None else json.loads(made.to_json()),
    }
    data = library.save(arrays)
    content["digest"] = _digest(data, content)
    write_atomically(weights, data)
    write_atomically(described, files.write("model", content))


def _digest(data: bytes, content: Mapping[str, Any]) -> str:
    """Return what changes with any bit of either file that means something."""
    rest = {name: value for name, value in content.items() if name in _ENTRIES}
    text = json.dumps(rest, sort_keys=True)
    return hashlib.sha256(data + text.encode()).hexdigest()


def _read(text: bytes, data: bytes, arrays: dict[str, np.ndarray]) -> Model:
    """Make a model of the content of both files."""
    node = files.Node.of(text, "model", (*_ENTRIES, "digest"))
    if node.content["digest"] != _digest(data, node.content):
        raise InvalidInputError(
            "the two files were not written together, or changed since."
        )
    listed = node.items("layers")
    if len(listed) > _MOST_LAYERS:
        raise InvalidInputError("the model has too many layers.")
    layers = tuple(_layer(one, n, arrays) for n, one in enumerate(listed))
    if arrays:
        raise InvalidInputError(f"nothing uses the arrays {', '.join(sorted(arrays))}.")
    made = None
    if not node.is_null("preparation"):
        held = json.dumps(node.node("preparation").content)
        made = Preparation.from_json(held)
    classes = node.texts("classes") if node.content["classes"] else ()
    if made is not None and made.label.classes != classes:
        raise InvalidInputError("its classes are not those of its label.")
    about = node.node("about").content
    advice = "" if node.is_null("advice") else node.text("advice")
    return Model(layers, classes, made, _pixels(node), about, advice)


def _layer(node: files.Node, number: int, arrays: dict[str, np.ndarray]) -> Layer:
    kind = KINDS[node.word("kind", tuple(KINDS))]
    found = {}
    for name in [one.name for one in fields(kind) if one.type is np.ndarray]:
        key = f"layers.{number}.{name}"
        if key not in arrays or arrays[key].dtype.kind != "f":
            raise InvalidInputError(f"the array {key} is missing, or holds no floats.")
        found[name] = arrays.pop(key)
    return node.made(KINDS, **found)


def _pixels(node: files.Node) -> Pixels | None:
    if node.is_null("pixels"):
        return None
    held = node.node("pixels")
    held.only("center", "spread", "shape")
    shape = held.content["shape"]
    right = isinstance(shape, list) and 1 <= len(shape) <= 4
    if not right or not all(type(n) is int and 0 < n < 2**20 for n in shape):
        raise InvalidInputError("'shape' is not the shape of an image.")
    spread = held.number("spread", above=0)
    return Pixels(held.number("center"), spread, tuple(shape))


def _arrays(path: Path) -> tuple[bytes, dict[str, np.ndarray]]:
    library = _safetensors()
    if not path.exists():
        raise CheckpointError(f"{path} is missing: the model has no weights.")
    if path.stat().st_size > _LARGEST:
        raise CheckpointError(f"{path} is too large to be a model.")
    try:
        data = path.read_bytes()
        return data, dict(library.load(data))
    except Exception as error:  # of the library's own kind, or of NumPy's
        raise CheckpointError(
            f"{path} is damaged, or not a model of fedbilevel: {error}."
        ) from error
