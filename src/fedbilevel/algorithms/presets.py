"""Methods that are another one with parts: one entry each.

An entry names its parts, the reference, and how the method is known. Its equations,
exchanges and deviations stand in `presets.md` beside this file. Nothing is imported
here but the kind of an entry, so that names can be listed without JAX.
"""

from typing import Any

from fedbilevel.algorithms.preset import Preset


def _one_machine(name: str, of: str, **more: Any) -> Preset:
    return Preset(name, of, answers="single machine", pools=True, **more)


def _one_level(name: str, **more: Any) -> Preset:
    of = "single_level.fedavg"
    return Preset(name, of, answers="shared y, x fixed", **more)


# Federated, a shared y ----------------------------------------------------------------
FedBiOControls = Preset(
    "fedbio-controls",
    "local.fedbio",
    summary="FedBiO with SCAFFOLD's control variates on x, y and z.",
    reference="Karimireddy et al. 2020, arXiv 1910.06378; arXiv 2302.06701",
    provenance="ours: two known methods put together",
    fixed={"drift": "controls"},
    letters="lr_x lr_y lr_z",
)

FedBiOAccControls = Preset(
    "fedbioacc-controls",
    "local.fedbioacc",
    summary="FedBiOAcc with SCAFFOLD's control variates on x, y and z.",
    reference="Karimireddy et al. 2020, arXiv 1910.06378; arXiv 2302.06701",
    provenance="ours: two known methods put together",
    fixed={"drift": "controls"},
)

FedBiODifferences = Preset(
    "fedbio-differences",
    "local.fedbio",
    summary="FedBiO without second derivatives, by differences of gradients.",
    reference="Li, Huang, Huang 2023, arXiv 2302.06701; arXiv 1806.09055",
    provenance="ours: two known methods put together",
    fixed={"distance": 0.01},
    letters="lr_x lr_y lr_z distance",
)

MemFBO = Preset(
    "memfbo",
    "local.simfbo",
    summary="SimFBO without second derivatives, by differences of gradients.",
    reference="AAAI 2025, doi 10.1609/aaai.v39i21.34355; arXiv 2305.19442",
    provenance="abstract read; listing reconstructed, unverified",
    fixed={"distance": 0.01},
    letters="lr_x lr_y lr_z gamma_x gamma_y gamma_z distance",
)

ShroFBO = Preset(
    "shrofbo",
    "local.simfbo",
    summary="SimFBO for clients that make different numbers of local steps.",
    reference="Yang, Xiao, Ji 2023, arXiv 2305.19442",
    provenance="abstract read; listing reconstructed, unverified",
    fixed={"normalized": True, "fewest_steps": 1},
    letters="lr_x lr_y lr_z gamma_x gamma_y gamma_z fewest_steps",
)

FedF2SA2 = Preset(
    "fed-f2sa-2",
    "penalty.fed_f2sa",
    summary="Local steps by gradients alone, with central differences of the penalty.",
    reference="F2SA-p, arXiv 2509.02937, with p = 2",
    provenance="ours: a known method made federated",
    fixed={"degree": 2},
    letters="lr_x lr_y nu",
)

FedF2SAControls = Preset(
    "fed-f2sa-controls",
    "penalty.fed_f2sa",
    summary="Fed-F2SA-2 with SCAFFOLD's control variates on x and both copies of y.",
    reference="Karimireddy et al. 2020, arXiv 1910.06378; arXiv 2509.02937",
    provenance="ours: two known methods put together",
    fixed={"degree": 2, "drift": "controls"},
    letters="lr_x lr_y nu",
)

FedNestSGD = Preset(
    "fednest-sgd",
    "nested.fednest",
    summary="Plain local steps below, a federated Neumann series above.",
    reference="Tarzanagh et al. 2022, arXiv 2205.02215, table 2",
    provenance="structure read in the paper's table; details from memory",
    fixed={"anchored": False},
)

LFedNestSVRG = Preset(
    "lfednest-svrg",
    "nested.lfednest",
    summary="Anchored local steps below, local hypergradients above.",
    reference="Tarzanagh et al. 2022, arXiv 2205.02215, table 2",
    provenance="structure read in the paper's table; details from memory",
    fixed={"anchored": True},
    letters="hypergradient",
)

EFSOBA = Preset(
    "ef-soba",
    "one_machine.soba",
    summary="SOBA on clients, with compressed directions and error feedback.",
    reference="He et al. 2024, arXiv 2405.18858",
    provenance="abstract read; listing reconstructed, unverified",
    letters="lr_x lr_y lr_z a fraction",
    wrap=("top-k",),
)

Pooled = Preset(
    "pooled",
    "local.fedbioacc",
    summary="FedBiOAcc on the rows of all clients, as if they could be moved.",
    reference="Dagreou et al. 2022, arXiv 2201.13409",
    provenance="updates read in a public benchmark; STORM is ours",
    answers="shared y, data pooled",
    pools=True,
)

# A personal lower variable ------------------------------------------------------------
FedBiOAccLocal = Preset(
    "fedbioacc-local",
    "local.local_bsgvrm",
    summary="STORM, x and its direction averaged after the move, y kept on its client.",
    reference="Li, Huang, Huang 2023, arXiv 2302.06701",
    provenance="abstract read; listing reconstructed, unverified",
    answers="own y per client",
    fixed={"own_lower": True},
    letters="hypergradient a=eta eta=rho1 gamma=rho2 c_nu=alpha c_omega=beta",
)

RSVRB = Preset(
    "rsvrb",
    "local.local_bsgvrm",
    summary="Variance-reduced momentum with a lower problem in every block.",
    reference="Guo et al. 2021, arXiv 2105.02266",
    provenance="abstract read; listing reconstructed, unverified",
    answers="own y, of each block",
    fixed={"own_lower": True, "drift": None},
)

# One machine --------------------------------------------------------------------------
ALSET = _one_machine(
    "alset",
    "one_machine.stocbio",
    summary="Lower steps, then one of x, on one time scale, by the random series.",
    reference="Chen, Sun, Yin 2021, arXiv 2106.13781",
    provenance="listing read in the paper",
    fixed={"upper_first": False},
    series="RandomNeumann",
)

BSA = _one_machine(
    "bsa",
    "one_machine.stocbio",
    summary="A step of x by a random term of the series, then a loop of lower steps.",
    reference="Ghadimi, Wang 2018, arXiv 1802.02246",
    provenance="updates read in a public benchmark; theory from memory",
    fixed={"upper_first": True},
    series="RandomNeumann",
)

TTSA = _one_machine(
    "ttsa",
    "one_machine.stocbio",
    summary="One lower step, then one of x, on two time scales.",
    reference="Hong et al. 2020, arXiv 2007.05170",
    provenance="updates read in a public benchmark; theory from memory",
    fixed={"upper_first": False, "inner_steps": 1},
    series="RandomNeumann",
)

SMB = _one_machine(
    "smb",
    "local.local_bsgm",
    summary="Moving averages on both levels, on one machine.",
    reference="Guo et al. 2021, arXiv 2104.14840",
    provenance="abstract and a program of others read",
    fixed={"drift": None},
)

SVRB = _one_machine(
    "svrb",
    "local.local_bsgvrm",
    summary="Variance-reduced momentum on both levels, on one machine.",
    reference="Guo et al. 2021, arXiv 2105.02266",
    provenance="abstract read; listing reconstructed, unverified",
    fixed={"drift": None, "absent": "keep", "own_lower": False},
)

MRBO = _one_machine(
    "mrbo",
    "local.local_bsgvrm",
    summary="STORM on both levels, on one machine.",
    reference="Yang, Ji, Liang 2021, arXiv 2106.04692",
    provenance="the authors' program and a benchmark's read",
    fixed={"drift": None, "absent": "keep", "own_lower": False},
    letters="hypergradient eta c1=alpha c2=beta gamma=rho1 lam=rho2",
)

SUSTAIN = _one_machine(
    "sustain",
    "local.local_bsgvrm",
    summary="STORM on both levels with the random series, on one machine.",
    reference="Khanduri et al. 2021, arXiv 2102.07367",
    provenance="abstract and a benchmark's program read",
    fixed={"drift": None, "absent": "keep", "own_lower": False},
    letters="hypergradient a=eta c_f=alpha c_g=beta c_a=rho1 c_b=rho2",
    series="RandomNeumann",
)

SRMBA = _one_machine(
    "srmba",
    "local.fedbioacc",
    summary="STORM on x, y and z, on one machine.",
    reference="Chu et al. 2024, arXiv 2405.18777",
    provenance="abstract and the authors' program read",
)

VRBiAdam = _one_machine(
    "vr-biadam",
    "one_machine.biadam",
    summary="STORM on both levels, with adaptive steps.",
    reference="Huang, Li, Huang 2021, arXiv 2106.11396",
    provenance="abstract and a co-author's program read, presumably",
    fixed={"corrected": True},
)

F2SA = _one_machine(
    "f2sa",
    "penalty.f2sa_p",
    summary="Loops on two copies of y, one with a penalty, then a step of x.",
    reference="Kwon et al. 2023, arXiv 2301.10945",
    provenance="abstract and a benchmark's program read",
    fixed={"degree": 1, "begin": "own"},
    letters="lr_x lr_y nu",
)

F2BA = _one_machine(
    "f2ba",
    "penalty.f2sa_p",
    summary="F2SA whose copies of y begin every loop at one place.",
    reference="Chen et al. 2025, arXiv 2306.14853",
    provenance="the authors' program and abstract read",
    fixed={"degree": 1, "begin": "one"},
    letters="lr_x lr_y nu",
)

# One level, x fixed -------------------------------------------------------------------
Scaffold = _one_level(
    "scaffold",
    summary="Local steps on y at the given x, corrected by control variates.",
    reference="Karimireddy et al. 2020, arXiv 1910.06378",
    provenance="standard method; updates read in a maintained program",
    fixed={"drift": "controls", "beta": 0.0},
    letters="lr lr_server",
    wrap=("server-step",),
)

FedProx = _one_level(
    "fedprox",
    summary="Local steps on y at the given x, drawn back to where they began.",
    reference="Li et al. 2020, arXiv 1812.06127",
    provenance="standard method; maintained programs are known",
    letters="lr mu",
    wrap=("proximal",),
)

FedAvgM = _one_level(
    "fedavgm",
    summary="Local steps on y at the given x; the server moves with momentum.",
    reference="Hsu, Qi, Brown 2019, arXiv 1909.06335",
    provenance="standard method; maintained programs are known",
    fixed={"beta": 0.9},
    letters="lr beta lr_server",
    wrap=("server-step",),
)

FedAdam = _one_level(
    "fedadam",
    summary="Local steps on y at the given x; the server scales its step as Adam does.",
    reference="Reddi et al. 2021, arXiv 2003.00295",
    provenance="standard method; maintained programs are known",
    letters="lr lr_server beta1 beta2 tau",
    wrap=("server-adam",),
)

FedCOM = _one_level(
    "fedcom",
    summary="Local steps on y at the given x, quantized; a step of the server.",
    reference="Haddadpour et al. 2021, arXiv 2007.01154",
    provenance="standard method; a program of the authors read",
    fixed={"beta": 0.0},
    letters="lr lr_server bits",
    wrap=("quantize", "server-step"),
)

FedPAQ = _one_level(
    "fedpaq",
    summary="Local steps on y at the given x, sent back quantized, averaged.",
    reference="Reisizadeh et al. 2020, arXiv 1909.13014",
    provenance="standard method, from memory",
    letters="lr bits",
    wrap=("quantize",),
)

CompressedLocalSGD = _one_level(
    "compressed-local-sgd",
    summary="Local steps on y at the given x, of which the largest entries are sent.",
    reference="Gao, Xu, Huang 2021 (AAAI); cf. arXiv 1906.02735",
    provenance="a summary of its updates read",
    letters="lr fraction",
    wrap=("top-k",),
)
