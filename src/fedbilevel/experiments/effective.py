"""What an effective step or weight means for the letters of every method.

A letter that is not given follows from an option that means the same for all methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.biadam import BiAdam
from fedbilevel.algorithms.bome import BOME
from fedbilevel.algorithms.br_fedbim import BRFedBiM
from fedbilevel.algorithms.e_aipod import EAiPOD
from fedbilevel.algorithms.f3sa import F3SA
from fedbilevel.algorithms.fedbio_momentum import FedBiOMomentum
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fedbioacc_clientwise import FedBiOAccClientwise
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.fsla import FSLA
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.algorithms.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.ma_soba import MASOBA
from fedbilevel.algorithms.meha import MEHA
from fedbilevel.algorithms.momentum_local_sgd import MomentumLocalSGD
from fedbilevel.algorithms.sbio_bred import SBiOBreD
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.algorithms.stem import STEM
from fedbilevel.algorithms.stocbio import StocBiO
from fedbilevel.algorithms.v_pbgd import VPBGD
from fedbilevel.units import OfDistance

__all__ = ["EARLY", "Effective", "effective_of"]


@dataclass(frozen=True)
class Effective:
    """What a letter is if it is not given: the first of some options, converted.

    Divided by the schedule `over` at t = 0, to a power, where that is only a shape;
    multiplied by the count `times`.
    """

    names: tuple[str, ...]
    over: str | None = None
    power: int = 1
    times: str | None = None
    convert: Callable[[float, Mapping[str, Any]], float] = lambda value, _: value


def _storm(schedule: str, power: int, *letters: str) -> dict[str, Effective]:
    """Return steps and weights of x, y and maybe z, coupled to a schedule."""
    levels = (("upper",), ("lower",), ("auxiliary", "lower"))
    count = len(letters) // 2
    table = {}
    for letter, names in zip(letters[:count], levels, strict=False):
        steps = tuple(f"{name}_step" for name in names)
        table[letter] = Effective(steps, over=schedule)
    for letter, names in zip(letters[count:], levels, strict=False):
        weights = tuple(f"{name}_weight" for name in names)
        table[letter] = Effective(weights, over=schedule, power=power)
    return table


_WHOLE_STEPS = {
    "alpha": Effective(("upper_step",), times="local_steps"),
    "beta": Effective(("lower_step",), times="local_steps"),
}
_BOUND = Effective(("theta",), convert=lambda theta, _: 1 / theta)
# Letters that mean the same in every method that has them; of steps that have a common
# shape, its letter is a.
_USUAL = {
    "lr": Effective(("lower_step",)),
    "lr_x": Effective(("upper_step",), over="a"),
    "lr_y": Effective(("lower_step",), over="a"),
    "lr_z": Effective(("auxiliary_step", "lr_y", "lower_step"), over="a"),
    "theta": Effective(("theta",)),
    "terms": Effective(("q",)),
    "chains": Effective(("participants",)),
}


def _times_r(step: Any, made: Mapping[str, Any]) -> Any:
    return step * made.get("r", _R)


def _times_c0(step: Any, made: Mapping[str, Any]) -> Any:
    # Directions are c0 times shorter than a hypergradient, as a measured step sees.
    return step if isinstance(step, OfDistance) else step * made.get("c0", _C0)


_R = next(one.default for one in fields(AdaFBiO) if one.name == "r")
_C0 = next(one.default for one in fields(MEHA) if one.name == "c0")
_SCALED = _storm("eta", 2, "gamma", "lam", "c1", "c2")
_ALIASES: Mapping[type[AbstractAlgorithm], Mapping[str, Effective]] = {
    AdaFBiO: {
        **_SCALED,
        # Divided by r at least, a step is no longer than the one that was asked for.
        "gamma": replace(_SCALED["gamma"], convert=_times_r),
        "lam": replace(_SCALED["lam"], convert=_times_r),
    },
    LocalBSGM: _storm("eta", 1, "rho1", "rho2", "alpha", "beta"),
    LocalBSGVRM: _storm("eta", 2, "rho1", "rho2", "alpha", "beta"),
    FedBiOAcc: _storm("a", 2, "eta", "gamma", "tau", "c_nu", "c_omega", "c_q"),
    FedBiOAccClientwise: _storm("a", 2, "eta", "gamma", "c_nu", "c_omega"),
    FedMSA: {
        "alpha": Effective(("upper_step",)),
        "beta": Effective(("lower_step",)),
    },
    AggITD: {**_WHOLE_STEPS, "lam": Effective(("theta",))},
    EAiPOD: {"alpha": _WHOLE_STEPS["alpha"], "ell": _BOUND},
    FedNest: {**_WHOLE_STEPS, "ell": _BOUND},
    LFedNest: _WHOLE_STEPS,
    SimFBO: {
        "gamma_x": Effective(("upper_step",)),
        "gamma_y": Effective(("lower_step",)),
        "gamma_z": Effective(("auxiliary_step", "lower_step")),
    },
    BiAdam: {
        "alpha": Effective(("upper_weight",)),
        "beta": Effective(("lower_weight",)),
    },
    F3SA: {
        "alpha": Effective(("upper_weight",), over="a", power=2),
        "beta": Effective(("lower_weight",), over="a", power=2),
    },
    BOME: {"alpha": Effective(("auxiliary_step", "lower_step"))},
    BRFedBiM: {"alpha": Effective(("upper_weight",))},
    FedBiOMomentum: {"alpha": Effective(("upper_weight",), over="a")},
    FSLA: {"alpha": Effective(("upper_weight",), over="a")},
    MASOBA: {"alpha": Effective(("upper_weight",), over="a")},
    MEHA: {
        "lr_x": Effective(("upper_step",), convert=_times_c0),
        "eta": Effective(("auxiliary_step", "lower_step")),
    },
    SBiOBreD: {"lr_y": Effective(("lower_step",), over="b")},
    STEM: {
        "lr": Effective(("lower_step",), over="eta"),
        "c": Effective(("lower_weight",), over="eta", power=2),
    },
    StocBiO: {"lr_y": Effective(("lower_step",), over="b")},
    VPBGD: {"lr_w": Effective(("lower_step",))},
    MomentumLocalSGD: {
        "beta": Effective(("lower_weight",), convert=lambda weight, _: 1 - weight),
        # A sum of momentum beta is 1/(1 - beta) times longer than an average.
        "lr": Effective(
            ("lower_step",), convert=lambda step, made: (1 - made["beta"]) * step
        ),
    },
}
# Letters that others are converted by.
EARLY = {AdaFBiO: ("r",), MEHA: ("c0",), MomentumLocalSGD: ("beta",)}


def effective_of(kind: type[AbstractAlgorithm], letter: str) -> Effective | None:
    """Return what a letter of a method follows from, if it follows from anything."""
    return _ALIASES.get(kind, {}).get(letter) or _USUAL.get(letter)
