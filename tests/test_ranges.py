"""Every range has two edges: just inside is taken, just outside is refused.

What is allowed stands here a second time, by hand, so that a check that accepts too
much is noticed at its edge.
"""

import dataclasses
import importlib
import inspect
import math
import pkgutil
from typing import Any

import equinox as eqx
import numpy as np
import pytest

from fedbilevel import algorithms
from fedbilevel.algorithms.presets import Scaffold
from fedbilevel.algorithms.wrappers.clip import StepClip, quantile_clipped
from fedbilevel.algorithms.wrappers.optimizer import Adam, Descent
from fedbilevel.channels import (
    GeometricMedian,
    Krum,
    Privacy,
    Quantize,
    TopK,
    TrimmedMean,
)
from fedbilevel.channels.accountant import epsilon, epsilon_of_events
from fedbilevel.channels.discrete_gaussian import discrete_gaussian
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments.clients import read_channel, read_quantile
from fedbilevel.federation import SiteLimits
from fedbilevel.federation.secure.fixed_point import encode
from fedbilevel.runtime import Sampling
from fedbilevel.schedules import check_fields, number
from tests.cases import case_of, quadratic_data, quadratic_job

NEAR = 1e-6
CHEAPEST = case_of("momentum-local-sgd").algorithm


def edges(text: str) -> tuple[list, list]:
    """Return values just inside and just outside of an interval such as (0, 1].

    Of whole numbers, written without a point, the neighbors; there are none beyond inf.
    """
    low, high = text[1:-1].split(", ")
    inside, outside = [], []
    for end, closed, outward in ((low, text[0] == "[", -1), (high, text[-1] == "]", 1)):
        if end == "inf":
            continue
        whole = "." not in end
        value, near = (int(end), 1) if whole else (float(end), NEAR)
        inside.append(value if closed else value - outward * near)
        outside.append(value + outward * near if closed else value)
    real = isinstance((inside + outside)[0], float)
    return inside, outside + ([math.nan] if real else [])


def shared_by(reduction):
    return lambda count: reduction.check(count)


RANGES = {
    "clip": (Privacy, "(0.0, inf)"),
    "noise": (lambda value: Privacy(1.0, value), "[0.0, inf)"),
    "typed-clip": (lambda value: read_channel(clip=str(value)), "(0.0, inf)"),
    "typed-noise": (lambda value: read_channel(1.0, value), "[0.0, inf)"),
    "delta": (lambda value: epsilon(1.0, 1, 1, 2, 2, value), "(0.0, 1.0)"),
    "delta-of-events": (
        lambda value: epsilon_of_events([(2.0, 1)], value),
        "(0.0, 1.0)",
    ),
    "multiplier": (lambda value: epsilon(value, 1, 1, 2, 2, 1e-5), "(0.0, inf)"),
    "quantile": (lambda value: read_quantile(f"quantile:{value!r}"), "(0.0, 1.0)"),
    "step-clip": (StepClip, "(0.0, 1.0)"),
    "reply-clip": (lambda value: quantile_clipped(CHEAPEST, value), "(0.0, 1.0)"),
    "topk": (TopK, "(0.0, 1.0]"),
    "quantize": (Quantize, "[2, 16]"),
    "trimmed-mean": (TrimmedMean, "[0.0, 0.5)"),
    "trimmed-mean-of": (shared_by(TrimmedMean(0.3)), "[3, inf)"),
    "iterations": (lambda count: GeometricMedian(iterations=count), "[1, inf)"),
    "krum": (Krum, "[0, inf)"),
    "krum-of": (shared_by(Krum(1)), "[5, inf)"),
    "krum-of-more": (shared_by(Krum(2)), "[7, inf)"),
    "deviation": (lambda value: discrete_gaussian(value, 1), "[1, 16777216]"),
    "weight": (lambda value: encode([np.ones(2)], value, [1], 2), "(0.0, 1.0]"),
    "max-exchanges": (lambda count: SiteLimits(max_exchanges=count), "[1, inf)"),
    "max-epsilon": (lambda value: SiteLimits(max_epsilon=value), "(0.0, inf)"),
    "minimum-batch": (lambda count: SiteLimits(minimum_batch=count), "[1, inf)"),
    "minimum-rows": (lambda count: SiteLimits(minimum_rows=count), "[1, inf)"),
    "batch": (lambda count: Sampling(batch=count), "[1, inf)"),
    "participants": (
        lambda count: quadratic_job(CHEAPEST, quadratic_data(3), participants=count),
        "[1, 3]",
    ),
    "descent-beta": (lambda value: Descent(beta=value), "[0.0, 1.0)"),
    "adam-beta1": (lambda value: Adam(beta1=value), "[0.0, 1.0)"),
    "adam-beta2": (lambda value: Adam(beta2=value), "[0.0, 1.0)"),
    "adam-tau": (lambda value: Adam(tau=value), "(0.0, inf)"),
    "scaffold": (lambda count: Scaffold(0.2, 0.7, local_steps=count), "[1, inf)"),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_range_ends_where_it_says(name):
    make, text = RANGES[name]
    inside, outside = edges(text)
    for value in inside:
        make(value)
    for value in outside:
        with pytest.raises(FedbilevelError):
            make(value)


@pytest.mark.parametrize("name", ["clip", "noise", "max-epsilon"])
def test_no_limit_is_infinite(name):
    with pytest.raises(InvalidInputError):
        RANGES[name][0](math.inf)


# The fields of methods and their parts, by name. A count begins at 1 if it is not here.
DECLARED = {
    "[0.0, 1.0)": (
        "MomentumLocalSGD.beta Descent.beta Adam.beta1 Adam.beta2 AdaFBiO.tau"
    ),
    "(0.0, 1.0]": "EAiPOD.probability SPABA.probability",
    "[0.0, inf)": "Proximal.mu",
    "(0.0, inf)": (
        "MEHA.c0 MEHA.gamma BOME.eta BOME.small NewtonBFGS.first_step "
        "NewtonBFGS.tolerance VPBGD.gam F2SAP.nu F3SA.nu FedF2SA.nu PBGDFree.nu "
        "AdaFBiO.r Ball.radius STFBO.start Adam.tau Simplex.total"
    ),
    "[0, inf)": (
        "FedCOMGATE.bits Quantized.bits SimFBO.fewest_steps Largest.fraction "
        "FedMSA.terms WithSeries.terms EAiPOD.terms FedNest.terms FedNest.upper_steps "
        "LFedNest.upper_steps Options.warm_start WarmStart.warm_start "
        "_AbstractSeries.q _AbstractSeries.theta Neumann.q Neumann.theta "
        "FrozenNeumann.q FrozenNeumann.theta RandomNeumann.theta"
    ),
    "(0, inf)": "DARTS.gamma DARTS.radius SAMA.gamma SAMA.small SAMA.radius",
    "[0, 1)": "ConjugateGradient.tolerance",
}


def declared_fields():
    """Return what every class in the package declares, as intervals."""
    found = {}
    for part in ("algorithms", "hypergradient", "estimators"):
        package = importlib.import_module(f"fedbilevel.{part}")
        below = getattr(package, "__path__", ())  # a module has none
        inside = pkgutil.walk_packages(below, f"{package.__name__}.")
        for name in (package.__name__, *(one.name for one in inside)):
            module = importlib.import_module(name)
            for kind in vars(module).values():
                own = inspect.isclass(kind) and kind.__module__ == module.__name__
                if own and dataclasses.is_dataclass(kind):
                    for field in dataclasses.fields(kind):
                        interval = interval_of(field.metadata)
                        if interval:
                            found[f"{kind.__name__}.{field.name}"] = interval
    return found


def interval_of(known):
    if not {"above", "least", "most", "below"} & set(known):
        return ""
    low = f"({known['above']}" if "above" in known else f"[{known['least']}"
    high = f"{known['most']}]" if "most" in known else f"{known.get('below', 'inf')})"
    return f"{low}, {high}"


def test_fields_declare_the_ranges_that_stand_here():
    wanted = {
        name: interval for interval, names in DECLARED.items() for name in names.split()
    }
    found = declared_fields()
    assert set(wanted) <= set(found)
    assert found == {name: wanted.get(name, "[1, inf)") for name in found}


@pytest.mark.parametrize("text", [*DECLARED, "[1, inf)"])
def test_what_is_declared_is_checked_at_its_edges(text):
    low, high = text[1:-1].split(", ")
    bounds: dict[str, Any] = {"least" if text[0] == "[" else "above": float(low)}
    if high != "inf":
        bounds["most" if text[-1] == "]" else "below"] = float(high)

    class Bounded(eqx.Module):
        value: float = number("a number", **bounds)

        def __check_init__(self) -> None:
            check_fields(self)

    inside, outside = edges(text)
    for value in inside:
        Bounded(value)
    for value in outside:
        with pytest.raises(InvalidInputError, match="must be"):
            Bounded(value)


@pytest.mark.parametrize("name", algorithms.names())
def test_no_method_takes_no_local_steps(name):
    """Whatever it is wrapped in; presets hand their fields on."""
    entry = algorithms.find(name)
    if "local_steps" not in entry.parameters:
        return
    known_values = {"flat": "yes", "beta": 0.5}
    needed = {
        option: known_values.get(option, 1)
        for option, known in entry.parameters.items()
        if option in known_values or known.default is dataclasses.MISSING
    }
    with pytest.raises(InvalidInputError, match="local_steps"):
        entry.make(**{**needed, "local_steps": 0})
