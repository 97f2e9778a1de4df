"""A model in two files: `model.json` says what it is, `model.safetensors` its arrays.

Neither can hold code. Contents are checked: a file that is damaged, of another
version or of another program is refused by its name.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedbilevel._files import write_atomically
from fedbilevel._folders import FEDERATION, MODEL, WEIGHTS
from fedbilevel.datasets import Preparation
from fedbilevel.datasets._preparation_files import Node, kinded
from fedbilevel.datasets._preparation_files import write as written
from fedbilevel.errors import CheckpointError, InvalidInputError, needed
from fedbilevel.models.layers import (
    Convolution,
    Dense,
    Layer,
    Multiply,
    OneLength,
    Pixels,
    Tanh,
)

T = TypeVar("T")

_ENTRIES = ("about", "advice", "classes", "layers", "pixels", "preparation")
_KINDS = {
    "multiply": Multiply,
    "dense": Dense,
    "convolution": Convolution,
    "tanh": Tanh,
    "one length": OneLength,
}
_LARGEST = 2**32  # bytes of weights
_LONGEST = 2**26  # bytes of JSON
_MOST_LAYERS = 1000


def can_be_kept() -> bool:
    """Say whether the package that keeps arrays is installed."""
    return find_spec("safetensors") is not None


def save(model: Any, weights: Path, described: Path) -> None:
    """Write both files, the arrays first: a model that can be read is whole."""
    library = _safetensors()
    arrays: dict[str, np.ndarray] = {}
    layers: list[dict[str, Any]] = []
    for number, layer in enumerate(model.layers):
        held = kinded(layer, _KINDS)
        for name in [name for name in held if isinstance(held[name], np.ndarray)]:
            arrays[f"layers.{number}.{name}"] = np.ascontiguousarray(held.pop(name))
        layers.append(held)
    pixels, made = model.pixels, model.preparation
    content = {
        "about": dict(model.about),
        "advice": model.advice or None,
        "classes": list(model.classes),
        "layers": layers,
        "pixels": pixels and {**vars(pixels), "shape": list(pixels.shape)},
        "preparation": None if made is None else json.loads(made.to_json()),
    }
    data = library.save(arrays)
    content["digest"] = _digest(data, content)
    text = written("model", content).encode()
    write_atomically(weights, lambda file: file.write(data))
    write_atomically(described, lambda file: file.write(text))


def _digest(data: bytes, content: Mapping[str, Any]) -> str:
    """Return what changes with any bit of either file that means something."""
    rest = {name: value for name, value in content.items() if name in _ENTRIES}
    text = json.dumps(rest, sort_keys=True)
    return hashlib.sha256(data + text.encode()).hexdigest()


def load(folder: Path, make: Callable[..., T]) -> T:
    """Read both files; return what `make` makes of the parts in them."""
    path = folder / MODEL
    if not path.exists():
        if (folder / FEDERATION).exists():
            raise CheckpointError(
                f"{folder} holds no {MODEL}: its server did not know the columns of "
                "the sites, or its task leaves no model. Serve with --preparation "
                "FILE, the file that the nodes use."
            )
        raise CheckpointError(
            f"{folder} holds no {MODEL}: it is no folder of a finished run, or its "
            "task leaves no model. Runs of regularization, cleaning, representation, "
            "loss-tuning, architecture, few-shot, and of fairness on a table do, by "
            "`fedbilevel run ... --out`."
        )
    data, arrays = _arrays(folder / WEIGHTS)
    try:
        if path.stat().st_size > _LONGEST:
            raise InvalidInputError("it is too long.")
        return make(*_parts(path.read_bytes(), data, arrays))
    except InvalidInputError as error:
        raise CheckpointError(
            f"{path} or {WEIGHTS} beside it is damaged, or not a model of fedbilevel: "
            f"{error}"
        ) from error


def _parts(text: bytes, data: bytes, arrays: dict[str, np.ndarray]) -> tuple:
    """Return the fields of `Model`, in their order."""
    node = Node.of(text, "model", (*_ENTRIES, "digest"))
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
    return layers, classes, made, _pixels(node), about, advice


def _layer(node: Node, number: int, arrays: dict[str, np.ndarray]) -> Layer:
    kind = _KINDS[node.word("kind", tuple(_KINDS))]
    found = {}
    for name in [one.name for one in fields(kind) if one.type is np.ndarray]:
        key = f"layers.{number}.{name}"
        if key not in arrays or arrays[key].dtype.kind != "f":
            raise InvalidInputError(f"the array {key} is missing, or holds no floats.")
        found[name] = arrays.pop(key)
    return node.made(_KINDS, **found)


def _pixels(node: Node) -> Pixels | None:
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


def _safetensors() -> Any:
    sentence = "models are kept by safetensors: install fedbilevel[cli]."
    return needed("safetensors.numpy", sentence)
