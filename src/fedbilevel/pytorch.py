"""Models of PyTorch as Equinox models with the same weights.

`fedbilevel.datasets.from_torch` does the same for data sets. PyTorch is needed where a
model is converted, and nowhere else.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from fedbilevel.errors import InvalidInputError, needed

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda a: a,
    "ReLU": jax.nn.relu,
    "Sigmoid": jax.nn.sigmoid,
    "Tanh": jnp.tanh,
}


def convert(module: Any) -> eqx.nn.Sequential:
    """Return an Equinox model that computes what an `nn.Sequential` does.

    Its layers may be Linear, Conv2d, MaxPool2d, AvgPool2d, Flatten, ReLU, Sigmoid, Tanh
    and Identity, also nested; another one is refused by its name. As always in Equinox,
    the model takes one sample, without the axis of a batch: use `jax.vmap(model)`. The
    weights are copied, and have JAX's precision.
    """
    nn = needed("torch.nn", "models of PyTorch are read by PyTorch: install torch.")
    if not isinstance(module, nn.Module):
        raise InvalidInputError(f"a {type(module).__name__} is no `nn.Module`.")
    layers = [_layer(name, one) for name, one in _flat("", module)]
    return eqx.nn.Sequential(layers)


def _flat(name: str, module: Any) -> list[tuple[str, Any]]:
    """Return the layers, with their names, in the order in which they are applied."""
    if type(module).__name__ != "Sequential":
        return [(name, module)]
    return [
        found
        for inner, child in module.named_children()
        for found in _flat(f"{name}.{inner}".lstrip("."), child)
    ]


def _layer(name: str, layer: Any) -> Any:
    kind = type(layer).__name__
    # A class of one's own may have any name, and compute anything.
    if type(layer).__module__.startswith("torch.nn.modules."):
        if kind in _FUNCTIONS:
            return eqx.nn.Lambda(_FUNCTIONS[kind])
        if kind in _LAYERS:
            return _LAYERS[kind](name, layer)
    raise InvalidInputError(
        f"layer '{name}' is a {kind}, which is not converted. Known: "
        f"{', '.join(sorted([*_FUNCTIONS, *_LAYERS]))}. Leave it out, or write the "
        "model in Equinox and copy its weights."
    )


def _refuse(name: str, layer: Any, **usual: Any) -> None:
    """Raise if a layer was made with a setting that has no counterpart."""
    for setting, value in usual.items():
        found = getattr(layer, setting)
        if found != value:
            raise InvalidInputError(
                f"layer '{name}', a {type(layer).__name__}: {setting}={found!r} is not "
                f"converted; {value!r} is."
            )


def _weights(layer: Any, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
    """Copy the weights of a layer, and its bias in the shape that Equinox wants."""
    weight = jnp.asarray(_copied(layer.weight), dtype=float)
    if layer.bias is None:
        return weight, None
    return weight, jnp.asarray(_copied(layer.bias).reshape(shape), dtype=float)


def _copied(tensor: Any) -> np.ndarray:
    return np.array(tensor.detach().cpu().numpy())


def _holding(layer: Any, weight: Array, bias: Array | None) -> Any:
    made = eqx.tree_at(lambda one: one.weight, layer, weight)
    if bias is None:
        return made
    return eqx.tree_at(lambda one: one.bias, made, bias)


def _linear(name: str, layer: Any) -> eqx.nn.Linear:
    del name
    has_bias = layer.bias is not None
    sizes = (layer.in_features, layer.out_features)
    made = eqx.nn.Linear(*sizes, use_bias=has_bias, key=jr.key(0))
    return _holding(made, *_weights(layer, (-1,)))


def _convolution(name: str, layer: Any) -> eqx.nn.Conv2d:
    _refuse(name, layer, padding_mode="zeros")
    if isinstance(layer.padding, str):
        _refuse(name, layer, padding="valid")
    made = eqx.nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        layer.stride,
        0 if isinstance(layer.padding, str) else layer.padding,
        layer.dilation,
        layer.groups,
        use_bias=layer.bias is not None,
        key=jr.key(0),
    )
    return _holding(made, *_weights(layer, (-1, 1, 1)))


def _largest(name: str, layer: Any) -> eqx.nn.MaxPool2d:
    _refuse(name, layer, dilation=1, return_indices=False, ceil_mode=False)
    return eqx.nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding)


def _mean(name: str, layer: Any) -> eqx.nn.AvgPool2d:
    _refuse(name, layer, padding=0, ceil_mode=False, divisor_override=None)
    return eqx.nn.AvgPool2d(layer.kernel_size, layer.stride)


def _flatten(name: str, layer: Any) -> eqx.nn.Lambda:
    _refuse(name, layer, start_dim=1, end_dim=-1)
    return eqx.nn.Lambda(jnp.ravel)


_LAYERS: dict[str, Callable[[str, Any], Any]] = {
    "Linear": _linear,
    "Conv2d": _convolution,
    "MaxPool2d": _largest,
    "AvgPool2d": _mean,
    "Flatten": _flatten,
}
