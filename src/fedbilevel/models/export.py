"""Models in the formats of others: npz, safetensors, and ONNX where they are linear."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import write_arrays, write_atomically
from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.errors import InvalidInputError, needed
from fedbilevel.models.layers import Dense, Multiply
from fedbilevel.models.model import Model, save


def linear_arrays(model: Model) -> dict[str, np.ndarray]:
    """Return a linear model as arrays: scores are weight @ (a - center)/spread + bias.

    a are the features by `feature_names`: numbers as they are, filled, and texts as
    zeros and ones. Where a number is predicted, it is
    label_center + label_spread * score.
    """
    (dense,) = [one for one in model.layers if isinstance(one, Dense)]
    factor = np.prod([one.factor for one in model.layers if isinstance(one, Multiply)])
    arrays = {"weight": factor * dense.weight.astype(float), "bias": dense.bias}
    return {**arrays, **_scaling(model)}


def _scaling(model: Model) -> dict[str, np.ndarray]:
    """Return what features are called, how they are scaled, and the classes."""
    made, found = model.preparation, {}
    if made is not None:
        found["feature_names"] = np.asarray(made.feature_names, dtype=str)
        found["center"], found["spread"] = made.scales.T
        if isinstance(made.label, TargetLabel):
            found["label_center"] = np.asarray(made.label.center)
            found["label_spread"] = np.asarray(made.label.spread)
    if model.pixels is not None:
        found["center"] = np.asarray(255 * model.pixels.center)
        found["spread"] = np.asarray(255 * model.pixels.spread)
    return {**found, "classes": np.asarray(model.classes, dtype=str)}


def _to_npz(model: Model, path: Path) -> None:
    if model.is_linear:
        write_arrays(path, linear_arrays(model))
        return
    arrays: dict[str, np.ndarray] = {}
    kinds = []
    for number, layer in enumerate(model.layers):
        kind = type(layer).__name__.lower()
        for name, value in vars(layer).items():
            if name != "relu":
                arrays[f"layers.{number}.{name}"] = np.asarray(value)
        kind += " relu" if getattr(layer, "relu", kind == "convolution") else ""
        kinds.append(kind)
    arrays["layers"] = np.asarray(kinds, dtype=str)
    write_arrays(path, arrays | _scaling(model))


def _to_onnx(model: Model, path: Path) -> None:
    if not model.is_linear:
        raise InvalidInputError(
            "only linear models are written as ONNX, and this one has hidden layers. "
            "Export it as npz or safetensors."
        )
    onnx = needed("onnx", "ONNX files are written by onnx: install fedbilevel[onnx].")
    data = _onnx_graph(model, onnx).SerializeToString()
    write_atomically(path, data)


def _onnx_graph(model: Model, onnx: Any) -> Any:
    """Write (a - center)/spread, the product, and what is predicted as a graph."""
    arrays, helper = linear_arrays(model), onnx.helper
    single = {
        name: np.asarray(arrays[name], np.float32)
        for name in ("weight", "bias", "center", "spread")
    }
    single["weight"] = np.ascontiguousarray(single["weight"].T)
    node, output = helper.make_node, "probabilities" if model.classes else "value"
    nodes = [
        node("Sub", ["features", "center"], ["centered"]),
        node("Div", ["centered", "spread"], ["scaled"]),
        node("Gemm", ["scaled", "weight", "bias"], ["scores"]),
    ]
    width, count = single["weight"].shape
    if model.classes:
        nodes.append(node("Softmax", ["scores"], [output], axis=1))
    else:
        for name in ("label_center", "label_spread"):
            single[name] = np.asarray([arrays[name]], np.float32)
        nodes.append(node("Mul", ["scores", "label_spread"], ["spread_out"]))
        nodes.append(node("Add", ["spread_out", "label_center"], [output]))
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "fedbilevel",
        [helper.make_tensor_value_info("features", kind, ["rows", width])],
        [helper.make_tensor_value_info(output, kind, ["rows", count])],
        [onnx.numpy_helper.from_array(one, name) for name, one in single.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    made.ir_version = 8
    names = {"classes": "\n".join(model.classes)}
    if "feature_names" in arrays:
        names["feature_names"] = "\n".join(arrays["feature_names"])
    helper.set_model_props(made, names)
    onnx.checker.check_model(made)
    return made


FORMATS: Mapping[str, Callable[[Model, Path], None]] = {
    "npz": _to_npz,
    "safetensors": lambda model, path: save(model, path, path.with_suffix(".json")),
    "onnx": _to_onnx,
}
