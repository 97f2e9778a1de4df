from fedbilevel import algorithms as algorithms
from fedbilevel._types import Pair as Pair
from fedbilevel._types import Triple as Triple
from fedbilevel.algorithms.local.adafbio import AdaFBiO as AdaFBiO
from fedbilevel.algorithms.local.br_fedbim import BRFedBiM as BRFedBiM
from fedbilevel.algorithms.local.fedbio import FedBiO as FedBiO
from fedbilevel.algorithms.local.fedbio_clientwise import (
    FedBiOClientwise as FedBiOClientwise,
)
from fedbilevel.algorithms.local.fedbio_momentum import FedBiOMomentum as FedBiOMomentum
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc as FedBiOAcc
from fedbilevel.algorithms.local.fedbioacc_clientwise import (
    FedBiOAccClientwise as FedBiOAccClientwise,
)
from fedbilevel.algorithms.local.fedmsa import FedMSA as FedMSA
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM as LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM as LocalBSGVRM
from fedbilevel.algorithms.local.simfbo import SimFBO as SimFBO
from fedbilevel.algorithms.nested.aggitd import AggITD as AggITD
from fedbilevel.algorithms.nested.e_aipod import EAiPOD as EAiPOD
from fedbilevel.algorithms.nested.fedmbo import FedMBO as FedMBO
from fedbilevel.algorithms.nested.fednest import FedNest as FedNest
from fedbilevel.algorithms.nested.lfednest import LFedNest as LFedNest
from fedbilevel.algorithms.nested.newton_bfgs import NewtonBFGS as NewtonBFGS
from fedbilevel.algorithms.one_machine.amigo import AmIGO as AmIGO
from fedbilevel.algorithms.one_machine.asbio_bred import ASBiOBreD as ASBiOBreD
from fedbilevel.algorithms.one_machine.biadam import BiAdam as BiAdam
from fedbilevel.algorithms.one_machine.bio_bred import BiOBreD as BiOBreD
from fedbilevel.algorithms.one_machine.fsla import FSLA as FSLA
from fedbilevel.algorithms.one_machine.ma_soba import MASOBA as MASOBA
from fedbilevel.algorithms.one_machine.s_tfbo import STFBO as STFBO
from fedbilevel.algorithms.one_machine.saba import SABA as SABA
from fedbilevel.algorithms.one_machine.sbio_bred import SBiOBreD as SBiOBreD
from fedbilevel.algorithms.one_machine.soba import SOBA as SOBA
from fedbilevel.algorithms.one_machine.spaba import SPABA as SPABA
from fedbilevel.algorithms.one_machine.srba import SRBA as SRBA
from fedbilevel.algorithms.one_machine.stocbio import StocBiO as StocBiO
from fedbilevel.algorithms.one_machine.vrbo import VRBO as VRBO
from fedbilevel.algorithms.penalty.bome import BOME as BOME
from fedbilevel.algorithms.penalty.f2sa_p import F2SAP as F2SAP
from fedbilevel.algorithms.penalty.f3sa import F3SA as F3SA
from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA as FedF2SA
from fedbilevel.algorithms.penalty.meha import MEHA as MEHA
from fedbilevel.algorithms.penalty.pbgd_free import PBGDFree as PBGDFree
from fedbilevel.algorithms.penalty.v_pbgd import VPBGD as VPBGD
from fedbilevel.algorithms.presets import ALSET as ALSET
from fedbilevel.algorithms.presets import BSA as BSA
from fedbilevel.algorithms.presets import EFSOBA as EFSOBA
from fedbilevel.algorithms.presets import F2BA as F2BA
from fedbilevel.algorithms.presets import F2SA as F2SA
from fedbilevel.algorithms.presets import MRBO as MRBO
from fedbilevel.algorithms.presets import RSVRB as RSVRB
from fedbilevel.algorithms.presets import SMB as SMB
from fedbilevel.algorithms.presets import SRMBA as SRMBA
from fedbilevel.algorithms.presets import SUSTAIN as SUSTAIN
from fedbilevel.algorithms.presets import SVRB as SVRB
from fedbilevel.algorithms.presets import TTSA as TTSA
from fedbilevel.algorithms.presets import (
    CompressedLocalSGD as CompressedLocalSGD,
)
from fedbilevel.algorithms.presets import FedAdam as FedAdam
from fedbilevel.algorithms.presets import FedAvgM as FedAvgM
from fedbilevel.algorithms.presets import (
    FedBiOAccControls as FedBiOAccControls,
)
from fedbilevel.algorithms.presets import FedBiOAccLocal as FedBiOAccLocal
from fedbilevel.algorithms.presets import FedBiOControls as FedBiOControls
from fedbilevel.algorithms.presets import (
    FedBiODifferences as FedBiODifferences,
)
from fedbilevel.algorithms.presets import FedCOM as FedCOM
from fedbilevel.algorithms.presets import FedF2SA2 as FedF2SA2
from fedbilevel.algorithms.presets import FedF2SAControls as FedF2SAControls
from fedbilevel.algorithms.presets import FedNestSGD as FedNestSGD
from fedbilevel.algorithms.presets import FedPAQ as FedPAQ
from fedbilevel.algorithms.presets import FedProx as FedProx
from fedbilevel.algorithms.presets import LFedNestSVRG as LFedNestSVRG
from fedbilevel.algorithms.presets import MemFBO as MemFBO
from fedbilevel.algorithms.presets import Pooled as Pooled
from fedbilevel.algorithms.presets import Scaffold as Scaffold
from fedbilevel.algorithms.presets import ShroFBO as ShroFBO
from fedbilevel.algorithms.presets import VRBiAdam as VRBiAdam
from fedbilevel.algorithms.single_level.bvr_l_sgd import BVRLSGD as BVRLSGD
from fedbilevel.algorithms.single_level.fedavg import FedAvg as FedAvg
from fedbilevel.algorithms.single_level.fedcomgate import FedCOMGATE as FedCOMGATE
from fedbilevel.algorithms.single_level.momentum_local_sgd import (
    MomentumLocalSGD as MomentumLocalSGD,
)
from fedbilevel.algorithms.single_level.stem import STEM as STEM
from fedbilevel.algorithms.wrappers.measured_steps.steps import (
    SteadySteps as SteadySteps,
)
from fedbilevel.algorithms.wrappers.optimizer import LocalOptimizer as LocalOptimizer
from fedbilevel.algorithms.wrappers.optimizer import ServerOptimizer as ServerOptimizer
from fedbilevel.channels import Channel as Channel
from fedbilevel.channels import GeometricMedian as GeometricMedian
from fedbilevel.channels import Krum as Krum
from fedbilevel.channels import Mean as Mean
from fedbilevel.channels import Median as Median
from fedbilevel.channels import Privacy as Privacy
from fedbilevel.channels import Quantize as Quantize
from fedbilevel.channels import SecureMean as SecureMean
from fedbilevel.channels import TopK as TopK
from fedbilevel.channels import TrimmedMean as TrimmedMean
from fedbilevel.datasets.partition import by_column as by_column
from fedbilevel.datasets.partition import by_indices as by_indices
from fedbilevel.datasets.partition import dirichlet as dirichlet
from fedbilevel.datasets.partition import dominant as dominant
from fedbilevel.datasets.partition import iid as iid
from fedbilevel.datasets.partition import shards as shards
from fedbilevel.experiments.recommendation import Situation as Situation
from fedbilevel.experiments.recommendation import recommend as recommend
from fedbilevel.hypergradient import DARTS as DARTS
from fedbilevel.hypergradient import SAMA as SAMA
from fedbilevel.hypergradient import ConjugateGradient as ConjugateGradient
from fedbilevel.hypergradient import Exact as Exact
from fedbilevel.hypergradient import FiniteDifference as FiniteDifference
from fedbilevel.hypergradient import ForwardGradient as ForwardGradient
from fedbilevel.hypergradient import FrozenNeumann as FrozenNeumann
from fedbilevel.hypergradient import Neumann as Neumann
from fedbilevel.hypergradient import RandomNeumann as RandomNeumann
from fedbilevel.hypergradient import Unrolled as Unrolled
from fedbilevel.hypergradient import hypergradient as hypergradient
from fedbilevel.hypergradient import local_inverse_bias as local_inverse_bias
from fedbilevel.problem import ClientData as ClientData
from fedbilevel.problem import PooledData as PooledData
from fedbilevel.problem import Problem as Problem
from fedbilevel.problem import coin_mask as coin_mask
from fedbilevel.problem import stored as stored
from fedbilevel.result import Result as Result
from fedbilevel.runtime import DiskSimulatorRuntime as DiskSimulatorRuntime
from fedbilevel.runtime import Event as Event
from fedbilevel.runtime import ReferenceRuntime as ReferenceRuntime
from fedbilevel.runtime import Sampling as Sampling
from fedbilevel.runtime import SimulatorRuntime as SimulatorRuntime
from fedbilevel.runtime import Stopping as Stopping
from fedbilevel.runtime import configure as configure
from fedbilevel.runtime import join as join
from fedbilevel.schedules import Constant as Constant
from fedbilevel.schedules import CubeRootDecay as CubeRootDecay
from fedbilevel.schedules import PowerDecay as PowerDecay
from fedbilevel.schedules import TheoremThree as TheoremThree
from fedbilevel.studies import Comparison as Comparison
from fedbilevel.studies import Contender as Contender
from fedbilevel.studies import Keeping as Keeping
from fedbilevel.studies import Range as Range
from fedbilevel.studies import Search as Search
from fedbilevel.studies import Trial as Trial
from fedbilevel.studies import Tuned as Tuned
from fedbilevel.studies import Values as Values
from fedbilevel.studies import calibrate as calibrate
from fedbilevel.studies import check_theory as check_theory
from fedbilevel.studies import compare as compare
from fedbilevel.studies import complexity as complexity
from fedbilevel.studies import minimize as minimize
from fedbilevel.studies import plan as plan
from fedbilevel.studies import run as run
from fedbilevel.studies import speedup as speedup
from fedbilevel.studies import sweep as sweep
from fedbilevel.studies import tune as tune
from fedbilevel.tasks import Task as Task

__version__: str
from fedbilevel.units import OfCurvature as OfCurvature
from fedbilevel.units import OfDistance as OfDistance
