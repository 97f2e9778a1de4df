"""Modules of PyTorch are read from stand-ins, also where PyTorch is not installed."""

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.errors import InvalidInputError
from fedbilevel.pytorch import convert

DRAW = np.random.default_rng(0)


class Module:
    """A layer, or a sequence of them, with what PyTorch tells of it."""

    def __init__(self, *children, **told):
        self.children = children
        vars(self).update(told)

    def named_children(self):
        return [(str(place), child) for place, child in enumerate(self.children)]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Put a `torch` without PyTorch in the place of one that may be there."""
    torch, nn = ModuleType("torch"), ModuleType("torch.nn")
    vars(torch)["nn"], vars(nn)["Module"] = nn, Module
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.nn", nn)


def made(kind, *children, **told):
    inside = {"__module__": f"torch.nn.modules.{kind.lower()}"}
    return type(kind, (Module,), inside)(*children, **told)


def tensor(*shape):
    held = SimpleNamespace(numpy=lambda: numbers)
    held.cpu = held.detach = lambda: held
    numbers = DRAW.normal(size=shape)
    return held


def linear(inputs, outputs, bias):
    held = tensor(outputs) if bias else None
    sizes = {"in_features": inputs, "out_features": outputs}
    return made("Linear", weight=tensor(outputs, inputs), bias=held, **sizes)


def test_dense_layers_compute_what_their_weights_say():
    first, last = linear(4, 5, bias=True), linear(5, 3, bias=False)
    inner = made("Sequential", made("Tanh"), made("Identity"))
    module = made("Sequential", first, made("ReLU"), inner, last)
    rows = DRAW.normal(size=(7, 4))
    hidden = rows @ first.weight.numpy().T + first.bias.numpy()
    expected = np.tanh(np.maximum(hidden, 0)) @ last.weight.numpy().T
    found = jax.vmap(convert(module))(jnp.asarray(rows))
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_has_its_settings_weights_and_bias(bias):
    held, weight = tensor(6) if bias else None, tensor(6, 2, 3, 2)
    sizes = {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), "groups": 2}
    more = {"stride": (1, 2), "padding": (2, 1), "dilation": (1, 2)}
    shape = {**sizes, **more, "padding_mode": "zeros"}
    layer = made("Conv2d", weight=weight, bias=held, **shape)
    rows = jnp.asarray(DRAW.normal(size=(4, 8, 9)))
    (expected,) = jax.lax.conv_general_dilated(
        rows[None],
        jnp.asarray(weight.numpy()),
        more["stride"],
        [(2, 2), (1, 1)],
        rhs_dilation=more["dilation"],
        feature_group_count=2,
    )
    if held is not None:
        expected += held.numpy()[:, None, None]
    found = convert(made("Sequential", layer))(rows)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_what_is_no_layer_of_pytorch_is_refused():
    with pytest.raises(InvalidInputError, match="layer '0' is a Softmax"):
        convert(made("Sequential", made("Softmax")))
    own = type("Linear", (Module,), {"__module__": "mine"})()
    with pytest.raises(InvalidInputError, match="layer '0' is a Linear"):
        convert(made("Sequential", own))
    with pytest.raises(InvalidInputError, match="a str is no `nn.Module`"):
        convert("Linear")
    pooled = {"kernel_size": 2, "stride": 2, "padding": 0, "return_indices": False}
    largest = made("MaxPool2d", dilation=2, ceil_mode=False, **pooled)
    with pytest.raises(InvalidInputError, match="dilation=2 is not converted; 1 is"):
        convert(made("Sequential", largest))
