"""One row per algorithm. Every test that runs over this table runs for a new row too.

The algorithms are small enough for the slow runtime and fit the problems below.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel._blocks import is_any
from fedbilevel._types import AbstractBlocks
from fedbilevel.algorithms import AbstractAlgorithm, Phases, Repeat, every_phase
from fedbilevel.algorithms.local.adafbio import AdaFBiO
from fedbilevel.algorithms.local.br_fedbim import BRFedBiM
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbio_clientwise import FedBiOClientwise
from fedbilevel.algorithms.local.fedbio_momentum import FedBiOMomentum
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.fedbioacc_clientwise import FedBiOAccClientwise
from fedbilevel.algorithms.local.fedmsa import FedMSA
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.algorithms.nested.aggitd import AggITD
from fedbilevel.algorithms.nested.e_aipod import EAiPOD
from fedbilevel.algorithms.nested.fedmbo import FedMBO
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.nested.lfednest import LFedNest
from fedbilevel.algorithms.nested.newton_bfgs import NewtonBFGS
from fedbilevel.algorithms.one_machine.amigo import AmIGO
from fedbilevel.algorithms.one_machine.asbio_bred import ASBiOBreD
from fedbilevel.algorithms.one_machine.biadam import BiAdam
from fedbilevel.algorithms.one_machine.bio_bred import BiOBreD
from fedbilevel.algorithms.one_machine.fsla import FSLA
from fedbilevel.algorithms.one_machine.ma_soba import MASOBA
from fedbilevel.algorithms.one_machine.s_tfbo import STFBO
from fedbilevel.algorithms.one_machine.saba import SABA
from fedbilevel.algorithms.one_machine.sbio_bred import SBiOBreD
from fedbilevel.algorithms.one_machine.soba import SOBA
from fedbilevel.algorithms.one_machine.spaba import SPABA
from fedbilevel.algorithms.one_machine.srba import SRBA
from fedbilevel.algorithms.one_machine.stocbio import StocBiO
from fedbilevel.algorithms.one_machine.vrbo import VRBO
from fedbilevel.algorithms.parts import Memory
from fedbilevel.algorithms.penalty.bome import BOME
from fedbilevel.algorithms.penalty.f2sa_p import F2SAP
from fedbilevel.algorithms.penalty.f3sa import F3SA
from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.algorithms.penalty.meha import MEHA
from fedbilevel.algorithms.penalty.pbgd_free import PBGDFree
from fedbilevel.algorithms.penalty.v_pbgd import VPBGD
from fedbilevel.algorithms.presets import (
    ALSET,
    BSA,
    EFSOBA,
    F2BA,
    F2SA,
    MRBO,
    RSVRB,
    SMB,
    SRMBA,
    SUSTAIN,
    SVRB,
    TTSA,
    CompressedLocalSGD,
    FedAdam,
    FedAvgM,
    FedBiOAccControls,
    FedBiOAccLocal,
    FedBiOControls,
    FedBiODifferences,
    FedCOM,
    FedF2SA2,
    FedF2SAControls,
    FedNestSGD,
    FedPAQ,
    FedProx,
    LFedNestSVRG,
    MemFBO,
    Pooled,
    Scaffold,
    ShroFBO,
    VRBiAdam,
)
from fedbilevel.algorithms.single_level.bvr_l_sgd import BVRLSGD
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.algorithms.single_level.fedcomgate import FedCOMGATE
from fedbilevel.algorithms.single_level.momentum_local_sgd import MomentumLocalSGD
from fedbilevel.algorithms.single_level.stem import STEM
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.hypergradient import Neumann, RandomNeumann
from fedbilevel.problem import ClientData, Data, PooledData, Problem
from fedbilevel.runtime import Job, Sampling
from fedbilevel.schedules import CubeRootDecay
from fedbilevel.tasks.quadratic import PROBLEM, ClosedForm, client_rows

DX, DY = 2, 3
THETA = 0.3


@dataclass(frozen=True)
class Case:
    """An algorithm, its module, and what one client sends in a round.

    `floats` is the formula of the literature for what goes up, for clients that keep
    what they were sent, and for what goes down unless `floats_down` is given;
    `bytes_up` is what goes up where a method sends more than floats of 8 bytes. The
    limits on the task two-client: `two_client` at p = 1, None if x stays; it ends at
    most `wanders` away, which is far where the choice of clients is random. `pools`
    runs it on the rows of all clients in one place, `slopes` names the phases whose
    replies are no points, and `chains` asks for so many clients, each with a message of
    its own. `of` is the name of the algorithm where a row is a variant of one, and
    `choices` what makes it one, or lets it come to rest, as the command line writes it.
    A row that `repeats` the structure of another one takes part in few fast tests.
    """

    name: str
    algorithm: AbstractAlgorithm
    floats: Callable[[int, int], int]
    exchanges: int = 1
    two_client: float | None = None
    wanders: float = 1e-6
    floats_down: Callable[[int, int], int] | None = None
    bytes_up: Callable[[int, int], int] | None = None
    slopes: tuple[str, ...] = ()
    pools: bool = False
    chains: int | None = None
    of: str | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    repeats: bool = False

    @property
    def method(self) -> str:
        """The algorithm's name in the registry."""
        return self.of or self.name


NEST: dict[str, Any] = {"alpha": 0.2, "beta": 0.3, "inner_rounds": 2, "local_steps": 2}
STORM: dict[str, Any] = {
    "a": CubeRootDecay(0.5, 8.0),
    "eta": 0.2,
    "gamma": 0.4,
    "c_nu": 4.0,
    "c_omega": 5.0,
    "local_steps": 2,
}
SHARED, BIASED, OWN = 1.0, 8 / 7, 24 / 29
PENALIZED = 1 / (1 + 0.01 / 4)  # by nu = 0.01
LETTERS: dict[str, Any] = {
    "hypergradient": Neumann(1, THETA),
    "alpha": 3.0,
    "beta": 4.0,
    "rho1": 0.5,
    "rho2": 0.8,
}
RANDOM: dict[str, Any] = {
    "hypergradient": RandomNeumann(2, THETA),
    "lr_x": 0.1,
    "lr_y": 0.2,
}
# Where the rows of all clients are in one place nothing is sent, and all ends well.
ONE_MACHINE: dict[str, Any] = {
    "floats": lambda dx, dy: 0,
    "exchanges": 0,
    "pools": True,
}

CASES = [
    Case(
        "adafbio",
        AdaFBiO(
            Neumann(1, THETA),
            CubeRootDecay(0.5, 8.0),
            gamma=0.3,
            lam=0.8,
            c1=4.0,
            c2=5.0,
            r=0.5,
            local_steps=2,
        ),
        floats=lambda dx, dy: 2 * (dx + dy),
        floats_down=lambda dx, dy: 2 * (dx + dy) + dx + 1,
        two_client=BIASED,
        slopes=("first_directions",),
    ),
    Case(
        "fed-f2sa",
        FedF2SA(0.1, 0.2, 0.3, local_steps=2, alternating=True),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=PENALIZED,
        repeats=True,
    ),
    Case(
        "fed-f2sa, degree 4",
        FedF2SA(0.1, 0.2, 0.05, local_steps=2, degree=4, drift="anchor"),
        floats=lambda dx, dy: 2 * (dx + 4 * dy),
        exchanges=2,
        two_client=SHARED,
        slopes=("anchor",),
        of="fed-f2sa",
        choices={"degree": "4", "drift": "anchor"},
        repeats=True,
    ),
    Case(
        "fed-f2sa-2",
        FedF2SA2(0.1, 0.2, 0.2, local_steps=2),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        wanders=1e-4,
        repeats=True,
    ),
    Case(
        "fed-f2sa-controls",
        FedF2SAControls(0.1, 0.2, 0.2, local_steps=2),
        floats=lambda dx, dy: 2 * (dx + 2 * dy),
        two_client=SHARED,
        wanders=1e-4,
        repeats=True,
    ),
    Case(
        "f2sa-p",
        F2SAP(0.1, 0.2, 0.05, CubeRootDecay(2.0, 8.0), degree=3, inner_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
        wanders=1e-4,
        slopes=("lower", "upper"),
        repeats=True,
    ),
    Case(
        "f2sa",
        F2SA(0.1, 0.2, 0.3, inner_steps=2, b=CubeRootDecay(2.0, 8.0), local_steps=2),
        **ONE_MACHINE,
        two_client=PENALIZED,
        slopes=("lower", "upper"),
        repeats=True,
    ),
    Case(
        "f2ba",
        F2BA(0.1, 0.2, 0.3, inner_steps=3),
        **ONE_MACHINE,
        two_client=PENALIZED,
        wanders=1e-4,
        slopes=("lower", "upper"),
        repeats=True,
    ),
    Case(
        "f3sa",
        F3SA(0.1, 0.2, 0.3, 0.4, 0.3, local_steps=2),
        **ONE_MACHINE,
        two_client=PENALIZED,
        slopes=("lower", "upper"),
        repeats=True,
    ),
    Case(
        "v-pbgd",
        VPBGD(0.1, 0.2, 0.15, 3.0, inner_steps=2, rise=3),
        **ONE_MACHINE,
        two_client=1 / 1.025,
        slopes=("lower", "step"),
        repeats=True,
    ),
    Case(
        "pbgd-free",
        PBGDFree(0.1, 0.2, 0.3, inner_steps=2, flat="yes"),
        **ONE_MACHINE,
        two_client=0.0,
        wanders=1e-2,
        slopes=("lower", "upper"),
        choices={"flat": "yes"},
        repeats=True,
    ),
    Case(
        "fedavg",
        FedAvg(0.2, local_steps=2),
        floats=lambda dx, dy: dy,
    ),
    Case(
        "fedbio",
        FedBiO(0.1, 0.2, 0.15, local_steps=2, radius=1.5, alternating=True),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
    ),
    Case(
        "fedbio-clientwise",
        FedBiOClientwise(Neumann(1, THETA), 0.1, 0.2, local_steps=2),
        floats=lambda dx, dy: dx,
        two_client=OWN,
    ),
    Case(
        "fedbioacc",
        FedBiOAcc(**STORM, tau=0.3, c_q=6.0),
        floats=lambda dx, dy: 2 * (dx + 2 * dy),
        two_client=SHARED,
    ),
    Case(
        "fedbioacc-clientwise",
        FedBiOAccClientwise(Neumann(1, THETA), **STORM),
        floats=lambda dx, dy: 2 * dx,
        two_client=OWN,
    ),
    Case(
        "fedbioacc-local",
        FedBiOAccLocal(Neumann(1, THETA), **STORM),
        floats=lambda dx, dy: 2 * dx,
        two_client=OWN,
    ),
    Case(
        "fedmbo",
        FedMBO(
            lr_x=0.1,
            lr_y=0.2,
            theta=THETA,
            terms=2,
            chains=3,
            inner_rounds=2,
            random_length=False,
        ),
        floats=lambda dx, dy: (2 + 1 + 2) * dy + 2 * dx,
        floats_down=lambda dx, dy: dx + (2 + 2 + 1) * dy,
        exchanges=2 + 2 + 2,
        two_client=SHARED,
        wanders=0.3,
        slopes=("lower", "chain_start", "last_hop"),
        chains=3,
    ),
    Case(
        "fednest",
        FedNest(**NEST, ell=3.0, terms=2, random_length=False),
        floats=lambda dx, dy: (2 * 2 + 1 + 2) * dy + 2 * dx,
        exchanges=2 * 2 + 2 + 3,
        two_client=SHARED,
        slopes=("inner_anchor", "series_start", "outer_anchor"),
    ),
    Case(
        "fednest-sgd",
        FedNestSGD(**NEST, ell=3.0, terms=2, random_length=False),
        floats=lambda dx, dy: (2 + 1 + 2) * dy + 2 * dx,
        exchanges=2 + 2 + 3,
        two_client=SHARED,
        slopes=("series_start", "outer_anchor"),
    ),
    Case(
        "lfednest",
        LFedNest(Neumann(1, THETA), **NEST),
        floats=lambda dx, dy: 2 * dy + dx,
        exchanges=2 + 1,
        two_client=BIASED,
    ),
    Case(
        "newton-bfgs",
        NewtonBFGS(),
        floats=lambda dx, dy: dx + 2 * dy + 2 + dy * (dy + 1) // 2,
        floats_down=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        slopes=("sums",),
    ),
    Case(
        "lfednest-svrg",
        LFedNestSVRG(Neumann(1, THETA), **NEST),
        floats=lambda dx, dy: 2 * 2 * dy + dx,
        exchanges=2 * 2 + 1,
        two_client=BIASED,
        slopes=("inner_anchor",),
    ),
    Case(
        "local-bsgm",
        LocalBSGM(Neumann(1, THETA), 0.1, 3.0, 4.0, 0.5, 0.8, local_steps=2),
        floats=lambda dx, dy: 2 * (dx + dy),
        two_client=BIASED,
    ),
    Case(
        "local-bsgvrm",
        LocalBSGVRM(
            Neumann(1, THETA),
            CubeRootDecay(0.3, 8.0),
            5.0,
            6.0,
            0.5,
            0.8,
            local_steps=2,
            warm_start=1,
            first_batch=2,
        ),
        floats=lambda dx, dy: 2 * (dx + dy),
        two_client=BIASED,
    ),
    Case(
        "momentum-local-sgd",
        MomentumLocalSGD(0.1, 0.6, local_steps=2),
        floats=lambda dx, dy: 2 * dy,
    ),
    Case(
        "pooled",
        Pooled(**STORM, tau=0.3, c_q=6.0),
        floats=lambda dx, dy: 0,
        exchanges=0,
        pools=True,
        two_client=SHARED,
    ),
    Case(
        "scaffold",
        Scaffold(0.2, 0.7, local_steps=2),
        floats=lambda dx, dy: 2 * dy,
    ),
    Case(
        "simfbo",
        SimFBO(0.1, 0.2, 0.15, 0.08, 0.15, 0.1, local_steps=2, radius=1.5),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        slopes=("local",),
    ),
    Case(
        "soba",
        SOBA(0.1, 0.2, 0.15, CubeRootDecay(2.0, 8.0), local_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
        slopes=("step",),
    ),
    Case(
        "ma-soba",
        MASOBA(0.1, 0.2, 0.15, 0.3, local_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
        slopes=("step",),
    ),
    Case(
        "saba",
        SABA(0.1, 0.2, 0.15, parts=2, local_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
        slopes=("step",),
    ),
    Case(
        "srba",
        SRBA(0.1, 0.2, 0.15, period=3, large_batch=2),
        **ONE_MACHINE,
        two_client=SHARED,
        slopes=("large", "step"),
    ),
    Case(
        "spaba",
        SPABA(0.1, 0.2, 0.15, 0.5, large_batch=2, longest=4),
        **ONE_MACHINE,
        two_client=SHARED,
        slopes=("large", "step"),
    ),
    Case(
        "srmba",
        SRMBA(**STORM, tau=0.3, c_q=6.0),
        **ONE_MACHINE,
        two_client=SHARED,
    ),
    Case(
        "stocbio",
        StocBiO(Neumann(1, THETA), 0.1, 0.2, inner_steps=2, local_steps=2),
        **ONE_MACHINE,
        slopes=("lower", "upper"),
        two_client=SHARED,
    ),
    Case(
        "alset",
        ALSET(**RANDOM, inner_steps=2),
        **ONE_MACHINE,
        slopes=("lower", "upper"),
        two_client=SHARED,
    ),
    Case(
        "bsa",
        BSA(**RANDOM, inner_steps=2),
        **ONE_MACHINE,
        slopes=("upper", "lower"),
        two_client=SHARED,
    ),
    Case(
        "ttsa",
        TTSA(**RANDOM, a=CubeRootDecay(0.5, 8.0)),
        **ONE_MACHINE,
        slopes=("lower", "upper"),
        two_client=SHARED,
    ),
    Case(
        "amigo",
        AmIGO(0.1, 0.2, 0.15, inner_steps=2, system_steps=2),
        **ONE_MACHINE,
        slopes=("lower", "system", "upper"),
        two_client=SHARED,
    ),
    Case(
        "fsla",
        FSLA(0.1, 0.2, 0.15, 0.4),
        **ONE_MACHINE,
        slopes=("lower", "system", "upper"),
        two_client=SHARED,
    ),
    Case(
        "s-tfbo",
        STFBO(local_steps=2),
        **ONE_MACHINE,
        slopes=("step",),
        two_client=SHARED,
        wanders=1e-3,
    ),
    Case(
        "smb",
        SMB(**LETTERS, eta=0.1, local_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
    ),
    Case(
        "svrb",
        SVRB(**LETTERS, eta=0.3, local_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
    ),
    Case(
        "mrbo",
        MRBO(Neumann(1, THETA), 0.3, 5.0, 6.0, 0.5, 0.8, local_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
    ),
    Case(
        "sustain",
        SUSTAIN(RandomNeumann(2, THETA), 0.3, 5.0, 6.0, 0.5, 0.8, local_steps=2),
        **ONE_MACHINE,
        two_client=SHARED,
    ),
    Case(
        "rsvrb",
        RSVRB(**LETTERS, eta=0.3, local_steps=2),
        floats=lambda dx, dy: 2 * dx,
        two_client=OWN,
        repeats=True,
    ),
    Case(
        "vrbo",
        VRBO(Neumann(1, THETA), 0.1, 0.2, 2, 2, 2),
        **ONE_MACHINE,
        slopes=("large", "step"),
        two_client=SHARED,
    ),
    Case(
        "biadam",
        BiAdam(Neumann(1, THETA), 0.1, 0.2, 0.3, 0.4, start=0.5, form="paper"),
        **ONE_MACHINE,
        slopes=("step",),
        two_client=SHARED,
        choices={"small": "1"},
    ),
    Case(
        "vr-biadam",
        VRBiAdam(
            hypergradient=Neumann(1, THETA), lr_x=0.1, lr_y=0.2, alpha=0.3, beta=0.4
        ),
        **ONE_MACHINE,
        slopes=("step",),
        two_client=SHARED,
        choices={"small": "1"},
    ),
    Case(
        "bio-bred",
        BiOBreD(0.1, 0.2, 0.05, inner_steps=2, psi="diagonal"),
        **ONE_MACHINE,
        slopes=("step",),
        two_client=SHARED,
        wanders=0.1,
    ),
    Case(
        "sbio-bred",
        SBiOBreD(RandomNeumann(2, THETA), 0.1, 0.2, l1=0.05),
        **ONE_MACHINE,
        slopes=("step",),
        two_client=SHARED,
    ),
    Case(
        "asbio-bred",
        ASBiOBreD(RandomNeumann(2, THETA), 0.1, 0.2, 0.05, 2, 2),
        **ONE_MACHINE,
        slopes=("large", "step"),
        two_client=SHARED,
    ),
    Case(
        "bome",
        BOME(0.1, 0.2, 0.15, inner_steps=2, local_steps=2),
        floats=lambda dx, dy: 2 * (2 * dy + 2 * (dx + dy)),
        floats_down=lambda dx, dy: 2 * (dx + (2 + 2) * dy),
        exchanges=2 * (2 + 1),
        slopes=("lower", "step"),
        two_client=SHARED,
        wanders=2e-3,
        repeats=True,
    ),
    Case(
        "meha",
        MEHA(0.3, 0.2, 0.15, 3.0, alternating=True, local_steps=2),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        wanders=5e-3,
        choices={"c0": "100", "power": "0"},
        repeats=True,
    ),
    Case(
        "fedbio, anchor",
        FedBiO(0.1, 0.2, 0.15, local_steps=2, drift="anchor"),
        floats=lambda dx, dy: 2 * (dx + 2 * dy),
        exchanges=2,
        two_client=SHARED,
        slopes=("anchor",),
        of="fedbio",
        choices={"drift": "anchor"},
    ),
    Case(
        "fedbio-controls",
        FedBiOControls(0.1, 0.2, 0.15, local_steps=2, radius=1.5),
        floats=lambda dx, dy: 2 * (dx + 2 * dy),
        two_client=SHARED,
    ),
    Case(
        "fedbioacc-controls",
        FedBiOAccControls(
            **STORM, tau=0.3, c_q=6.0, alternating=True, absent="correct"
        ),
        floats=lambda dx, dy: 3 * (dx + 2 * dy),
        two_client=SHARED,
    ),
    Case(
        "fedbio-momentum",
        FedBiOMomentum(
            0.1, 0.2, 0.15, 0.5, CubeRootDecay(2.0, 8.0), local_steps=2, radius=1.5
        ),
        floats=lambda dx, dy: 2 * dx + 2 * dy,
        two_client=SHARED,
        repeats=True,
    ),
    Case(
        "e-aipod",
        EAiPOD(
            alpha=0.2,
            lr_y=0.2,
            probability=0.5,
            inner_rounds=2,
            longest=3,
            local_steps=2,
            ell=3.0,
            terms=2,
            random_length=False,
        ),
        floats=lambda dx, dy: (2 + 1 + 2) * dy + 2 * dx,
        exchanges=2 + 2 + 3,
        two_client=SHARED,
        slopes=("series_start", "outer_anchor"),
        repeats=True,
    ),
    Case(
        "fedmsa",
        FedMSA(0.1, 0.2, 0.6, terms=0, local_steps=2),
        floats=lambda dx, dy: 2 * (dx + 2 * dy),
        exchanges=2,
        two_client=SHARED,
    ),
    Case(
        "shrofbo",
        ShroFBO(0.1, 0.2, 0.15, 0.08, 0.15, 0.1, local_steps=3),
        floats=lambda dx, dy: dx + 2 * dy + 1,
        floats_down=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        slopes=("local",),
        repeats=True,
    ),
    Case(
        "memfbo",
        MemFBO(0.1, 0.2, 0.15, 0.08, 0.15, 0.1, local_steps=2),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        slopes=("local",),
        repeats=True,
    ),
    Case(
        "fedbio-differences",
        FedBiODifferences(0.1, 0.2, 0.15, local_steps=2),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        repeats=True,
    ),
    Case(
        "aggitd",
        AggITD(
            alpha=0.2,
            beta=0.3,
            lam=THETA,
            terms=3,
            local_steps=2,
            random_length=False,
        ),
        floats=lambda dx, dy: (3 * 3 + 1) * dy + 2 * dx,
        exchanges=2 * 3 + 3,
        two_client=SHARED,
        slopes=("inner_anchor", "series_end", "outer_anchor"),
        repeats=True,
    ),
    Case(
        "br-fedbim",
        BRFedBiM(0.1, 0.2, 0.15, 0.4, robust="mean"),
        floats=lambda dx, dy: dx + 2 * dy,
        two_client=SHARED,
        slopes=("step",),
        repeats=True,
    ),
    Case(
        "ef-soba",
        EFSOBA(0.1, 0.2, 0.15, CubeRootDecay(2.0, 8.0), fraction=0, local_steps=2),
        floats=lambda dx, dy: 2 * (dx + 2 * dy),
        exchanges=2,
        two_client=SHARED,
        slopes=("step",),
        repeats=True,
    ),
    Case(
        "fedprox",
        FedProx(0.2, 0.3, local_steps=2),
        floats=lambda dx, dy: dy,
        repeats=True,
    ),
    Case(
        "fedavgm",
        FedAvgM(0.1, 0.6, 0.7, local_steps=2),
        floats=lambda dx, dy: dy,
        repeats=True,
    ),
    Case(
        "fedadam",
        FedAdam(0.2, 0.3, local_steps=2),
        floats=lambda dx, dy: dy,
        repeats=True,
    ),
    Case(
        "stem",
        STEM(0.2, 4.0, CubeRootDecay(1.0, 8.0), first_batch=2, local_steps=2),
        floats=lambda dx, dy: 2 * dy,
        repeats=True,
    ),
    Case(
        "bvr-l-sgd",
        BVRLSGD(0.2, large_batch=2, local_steps=2),
        floats=lambda dx, dy: 2 * dy,
        exchanges=2,
        slopes=("anchor",),
    ),
    Case(
        "fedcom",
        FedCOM(0.2, 0.7, 8, local_steps=2),
        floats=lambda dx, dy: 1,  # the scale; levels are whole numbers
        bytes_up=lambda dx, dy: 8 + dy,
        floats_down=lambda dx, dy: dy,
        repeats=True,
    ),
    Case(
        "fedpaq",
        FedPAQ(lr=0.2, bits=8, local_steps=2),
        floats=lambda dx, dy: 1,  # the scale; levels are whole numbers
        bytes_up=lambda dx, dy: 8 + dy,
        floats_down=lambda dx, dy: dy,
        repeats=True,
    ),
    Case(
        "fedcomgate",
        FedCOMGATE(0.2, 0.7, 8, local_steps=2),
        floats=lambda dx, dy: 1,  # the scale; levels are whole numbers
        bytes_up=lambda dx, dy: 8 + dy,
        floats_down=lambda dx, dy: dy,
        repeats=True,
    ),
    Case(
        "compressed-local-sgd",
        CompressedLocalSGD(0.2, 0.5, local_steps=2),
        floats=lambda dx, dy: 2,  # half of dy, and their places
        bytes_up=lambda dx, dy: 2 * (8 + 4),
        floats_down=lambda dx, dy: dy,
        repeats=True,
    ),
]
NAMES = [case.name for case in CASES if case.of is None]


def some_of(values: Iterable[Any], quick: int) -> list:
    """Return parameters: so many, evenly spread, are quick, and the others slow."""
    every = list(values)
    first = {number * len(every) // quick for number in range(quick)}
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if place in first else pytest.mark.slow,
        )
        for place, one in enumerate(every)
    ]


def case_of(name: str) -> Case:
    """Return a row by its name."""
    (found,) = (case for case in CASES if case.name == name)
    return found


def for_cases(chosen: Callable[[Case], bool] = lambda _: True):
    """Run a test for every row, or those that have a property.

    Variants of an algorithm, and methods of one machine, take part before a release
    alone, unless their structure is new.
    """
    rows = _rows(
        chosen,
        lambda case: _is_alike(case) and case.name not in _STRUCTURES,
    )
    return pytest.mark.parametrize("case", rows)


def _is_alike(case: Case) -> bool:
    return bool(case.of) or case.pools or case.repeats


def _rows(
    chosen: Callable[[Case], bool],
    repeats: Callable[[Case], bool],
    quick: Callable[[Case], bool] = lambda _: True,
) -> list:
    def marks(case: Case):
        if repeats(case):
            return pytest.mark.exhaustive
        return () if quick(case) else pytest.mark.slow

    return [
        pytest.param(case, id=case.name, marks=marks(case))
        for case in CASES
        if chosen(case)
    ]


def structures_first(chosen: Callable[[Case], bool] = lambda _: True):
    """Run a test for rows that show all there is, then for structures, then for all.

    `make test` runs the few, `make test-all` the structures, and a release all rows.
    """
    long = _rows(
        lambda case: case.name in _LISTINGS and chosen(case),
        lambda case: case.name not in _STRUCTURES,
        lambda case: case.name in _FEW,
    )
    return pytest.mark.parametrize("case", long)


def of_structures(chosen: Callable[[Case], bool]):
    """Run a test for one row of each structure, where that has a property.

    `make test` runs those of the few, `make test-all` the others.
    """
    rows = _rows(
        lambda case: case.name in _STRUCTURES and chosen(case),
        lambda _: False,
        lambda case: case.name in _FEW,
    )
    return pytest.mark.parametrize("case", rows)


def _structure(case: Case) -> tuple:
    """Return what a runtime sees of an algorithm: what is kept where, and its phases.

    The classes of states are no part of it, or every method would have its own.
    """
    algorithm, (x, y) = case.algorithm, (jnp.zeros(1), jnp.zeros(1))
    kept, phases = algorithm.init_client(x, y), algorithm.phases()
    kind = next((kind for kind in _KEPT if isinstance(kept, kind)), object)
    private = tuple(jax.tree.leaves(algorithm.private_blocks()))
    repeats = any(isinstance(entry, Repeat) for entry in phases)
    several = has_several_phases(case)
    return kind, private, case.pools, several, repeats, case.chains is not None


# Nothing, what tells who was away, blocks that may be private, or whatever else.
_KEPT = (type(None), Memory, AbstractBlocks)


def keeps_something(case: Case) -> bool:
    """Say whether clients carry a state from round to round."""
    kept = case.algorithm.init_client(jnp.zeros(1), jnp.zeros(1)) is not None
    return not case.pools and (kept or is_any(case.algorithm.private_blocks()))


def has_several_phases(case: Case) -> bool:
    """Say whether a round has several exchanges."""
    return len(every_phase(case.algorithm.phases())) > 1


def asks_everyone(case: Case) -> int:
    """Return how many exchanges of a round ask all clients, whatever a cohort is."""

    def among(phases: Phases) -> int:
        return sum(
            entry.times * among(entry.phases)
            if isinstance(entry, Repeat)
            else int(entry.everyone)
            for entry in phases
        )

    return among(case.algorithm.phases())


_DISTINCT = {_structure(case): case.name for case in CASES if not case.repeats}
_STRUCTURES = set(_DISTINCT.values())


def _few() -> set[str]:
    """Return structures that show together every part that any of them has."""
    parts = {
        name: set(enumerate((*structure, asks_everyone(case_of(name)) > 0)))
        for structure, name in _DISTINCT.items()
    }
    found, missing = set(), set().union(*parts.values())
    while missing:
        best = max(parts, key=lambda name: len(parts[name] & missing))
        found.add(best)
        missing -= parts[best]
    return found


_FEW = _few()
# A preset is its class with other numbers, unless its parts make a structure of it: one
# row of a class and a structure stands for the others. Rows that repeat a structure are
# run beside their transcription, and to their limit, but not on every runtime.
_OF_ITS_CLASS = {
    (type(one.algorithm), _structure(one)): one.name
    for one in CASES[::-1]
    if not one.repeats
}
_LISTINGS = _STRUCTURES | set(_OF_ITS_CLASS.values())
EVERY = for_cases()
# Without a program nothing takes long.
ROWS = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in CASES]
)
# One algorithm of each structure, where a test is about runtimes and costs a program.
STRUCTURES = of_structures(lambda _: True)
# Those of the structures that ask most of a runtime: memories, private blocks, nests.
DEMANDING = of_structures(
    lambda case: not case.pools and (keeps_something(case) or has_several_phases(case))
)


def data_for(case: Case, clients: int) -> Data:
    """Return quadratic data as a case needs it: for so many clients, maybe pooled."""
    data = quadratic_data(case.chains or clients)
    return data.pooled() if case.pools else data


def cohort_of(case: Case, participants: int) -> int | None:
    """Return so many participants, unless a case leaves no choice."""
    everyone = any(one.everyone for one in every_phase(case.algorithm.phases()))
    return None if case.pools or case.chains or everyone else participants


# Without the noise functions: here a sample is a row, drawn from a client's few.
ROWWISE = Problem(PROBLEM.upper, PROBLEM.lower)


def quadratic_data(
    clients: int, *, noise: float = 0.3, alike: bool = False, seed: int = 0
) -> ClientData:
    """Return clients with quadratics of curvature near 0.5 to 2, equal or different.

    With noise client k holds 3 + k rows that scatter around its quadratic, without it
    one row.
    """
    every = [_client(0 if alike else k, noise, seed, 3 + k) for k in range(clients)]
    return ClientData.from_clients([up for up, _ in every], [low for _, low in every])


def _client(client: int, noise: float, seed: int, count: int):
    draw = np.random.default_rng((seed, client))
    basis, _ = np.linalg.qr(draw.standard_normal((DY, DY)))
    A = basis @ np.diag(np.linspace(0.5, 2, DY)) @ basis.T
    C = 0.5 * draw.standard_normal((DX, DY))
    a, b = draw.standard_normal(DY), draw.standard_normal(DY)
    rows = []
    for _ in range(count if noise else 1):
        half = 0.1 * noise * draw.standard_normal((DY, DY))
        near = (A + half + half.T, C + 0.1 * noise * draw.standard_normal((DX, DY)))
        ends = (
            a + noise * draw.standard_normal(DY),
            b + noise * draw.standard_normal(DY),
        )
        rows.append(client_rows(*near, *ends, 0.5, noise=0.0))
    uppers, lowers = zip(*rows, strict=True)
    return tuple(
        {name: np.concatenate([row[name] for row in level]) for name in level[0]}
        for level in (uppers, lowers)
    )


def quadratic_job(
    algorithm: AbstractAlgorithm,
    data: Data,
    *,
    seed: int = 0,
    participants: int | None = None,
    precision: str = "float64",
    channel: Channel = PLAIN,
) -> Job:
    """Return a job on quadratics, started away from zero."""
    job = Job.of(
        algorithm,
        ROWWISE,
        data,
        jnp.arange(1.0, DX + 1),
        -jnp.arange(1.0, DY + 1),
        metrics=ClosedForm.of(data.parts if isinstance(data, PooledData) else data),
        seed=seed,
        sampling=Sampling(batch=1, participants=participants),
        channel=channel,
    )
    return with_precision(job, precision)


def with_precision(job: Job, precision: str) -> Job:
    """Return a job with all its floating numbers in another precision."""
    kind = jnp.dtype(precision)

    def cast(leaf):
        floating = eqx.is_inexact_array(leaf)
        return leaf.astype(kind) if floating else leaf

    return jax.tree.map(cast, job)
