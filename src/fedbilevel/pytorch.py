"""Models of PyTorch as Equinox models with the same weights.

`fedbilevel.datasets.from_torch` does the same for data sets. PyTorch is needed where a
model is converted, and nowhere else.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel.errors import InvalidInputError, needed


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
    if not type(layer).__module__.startswith("torch.nn.modules.") or kind not in _KINDS:
        raise InvalidInputError(
            f"layer '{name}' is a {kind}, which is not converted. Known: "
            f"{', '.join(sorted(_KINDS))}. Leave it out, or write the "
            "model in Equinox and copy its weights."
        )
    make, converted = _KINDS[kind]
    if isinstance(getattr(layer, "padding", 0), str):
        converted = {**converted, "padding": "valid"}
    for setting, value in converted.items():
        found = getattr(layer, setting)
        if found != value:
            raise InvalidInputError(
                f"layer '{name}', a {kind}: {setting}={found!r} is not converted; "
                f"{value!r} is."
            )
    return make(layer)


def _linear(layer: Any) -> eqx.nn.Linear:
    sizes = (layer.in_features, layer.out_features)
    made = eqx.nn.Linear(*sizes, use_bias=layer.bias is not None, key=jr.key(0))
    return _with_weights(made, layer, -1)


def _convolution(layer: Any) -> eqx.nn.Conv2d:
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
    return _with_weights(made, layer, -1, 1, 1)


def _with_weights(made: Any, layer: Any, *shape: int) -> Any:
    """Copy the weights of a layer, and its bias in the shape that Equinox wants."""
    made = eqx.tree_at(lambda one: one.weight, made, _copied(layer.weight))
    if layer.bias is None:
        return made
    return eqx.tree_at(lambda one: one.bias, made, _copied(layer.bias).reshape(shape))


def _copied(tensor: Any) -> Array:
    return jnp.array(tensor.detach().cpu().numpy(), dtype=float)


def _function(compute: Callable[[Array], Array]) -> Callable[[Any], eqx.nn.Lambda]:
    return lambda layer: eqx.nn.Lambda(compute)


# The constructor of each kind of layer, and the settings that alone have a counterpart.
_KINDS: Mapping[str, tuple[Callable[[Any], Any], Mapping[str, Any]]] = {
    "Linear": (_linear, {}),
    "Conv2d": (_convolution, {"padding_mode": "zeros"}),
    "MaxPool2d": (
        lambda layer: eqx.nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding),
        dict(dilation=1, return_indices=False, ceil_mode=False),
    ),
    "AvgPool2d": (
        lambda layer: eqx.nn.AvgPool2d(layer.kernel_size, layer.stride),
        dict(padding=0, ceil_mode=False, divisor_override=None),
    ),
    "Flatten": (_function(jnp.ravel), {"start_dim": 1, "end_dim": -1}),
    "Identity": (_function(lambda a: a), {}),
    "ReLU": (_function(jax.nn.relu), {}),
    "Sigmoid": (_function(jax.nn.sigmoid), {}),
    "Tanh": (_function(jnp.tanh), {}),
}
