"""From a module and a data set of PyTorch to a run, where PyTorch is installed."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.errors import InvalidInputError
from fedbilevel.pytorch import convert

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
nn: Any = torch.nn

GUIDE = Path(__file__).parent.parent / "docs" / "from-pytorch.md"


def dense() -> Any:
    inner = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Sigmoid())
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), inner, nn.Linear(5, 3))


def convolutional() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=(1, 2)),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1, padding=1),
        nn.Conv2d(4, 6, (3, 2), dilation=2, groups=2, bias=False, padding="valid"),
        nn.AvgPool2d(2),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(6 * 2 * 2, 3),
    )


@pytest.mark.parametrize(("made", "shape"), [(dense, (4,)), (convolutional, (2, 8, 9))])
def test_a_converted_model_computes_the_same(made, shape):
    torch.manual_seed(0)
    module = made().double()
    rows = torch.randn(7, *shape, dtype=torch.float64)
    expected = module(rows).detach().numpy()
    found = jax.vmap(convert(module))(jnp.asarray(rows.numpy()))
    assert found.shape == (7, 3) and np.std(expected) > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_slopes_are_the_same():
    """Those along the weights, too, so that training goes on as it would there."""
    torch.manual_seed(1)
    module = dense().double()
    rows = torch.randn(5, 4, dtype=torch.float64)
    module(rows).square().mean().backward()
    inputs = jnp.asarray(rows.numpy())
    slopes = jax.grad(lambda weights, model: _loss(weights, model, inputs))
    model = convert(module)
    found = slopes(model.layers[0].weight, model)
    expected = module[0].weight.grad.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def _loss(weights: Any, model: Any, inputs: Any) -> Any:
    import equinox as eqx

    changed = eqx.tree_at(lambda one: one.layers[0].weight, model, weights)
    return jnp.mean(jax.vmap(changed)(inputs) ** 2)


class Linear(nn.Module):
    """A layer of one's own, with the name of another."""


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.Dropout(), "layer '1' is a Dropout"),
        (nn.BatchNorm1d(4), "layer '1' is a BatchNorm1d"),
        (Linear(), "layer '1' is a Linear, which is not converted"),
        (nn.Flatten(0), "start_dim=0 is not converted; 1 is"),
        (nn.Conv2d(1, 1, 3, padding="same"), "padding='same'"),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), "padding_mode"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode=True"),
        (nn.Sequential(nn.Softplus()), "layer '1.0' is a Softplus"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(layer, told):
    with pytest.raises(InvalidInputError, match=re.escape(told)):
        convert(nn.Sequential(nn.Linear(4, 4), layer))
    with pytest.raises(InvalidInputError, match="a list is no `nn.Module`"):
        convert([layer])


def test_the_guide_goes_from_module_and_data_set_to_a_run(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    exec(code, {"__name__": "guide"})
    before, after = map(float, capsys.readouterr().out.split())
    assert after < 0.7 * before
