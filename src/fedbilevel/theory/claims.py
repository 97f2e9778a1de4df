r"""Claims of papers about their algorithms, by the type of the algorithm.

Theorems 1, 2 and 3 are those of the founding paper. FedBiOAcc and FedNest have no
schedules in its parameters and take those of their nearest relative. M is the mean
of the metric over a run. Exponents (Gao 2022, table 1; arXiv 2302.06701, 2205.02215):

    M ~ K^a, M ~ T^b;   T ~ K^c, T ~ epsilon^d;   rounds ~ K^e, rounds ~ epsilon^f
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import Neumann
from fedbilevel.schedules import Constant, Schedule, parse_schedule
from fedbilevel.theory.plan import Plan
from fedbilevel.theory.theorems import Parameters


@dataclass(frozen=True)
class Claims:
    """The theorems that plan an algorithm, its exponents, and how a plan is read."""

    theorems: tuple[int, ...]
    exponents: Mapping[str, float]
    build: Callable[[Plan, Schedule], AbstractAlgorithm]


_WEIGHTS = ("alpha", "beta", "rho1", "rho2")
_ROOT = {"K": -1 / 2, "T": -1 / 2, "TK": -1.0, "Te": -2.0, "RK": 0.0, "Re": -1.5}
_TWO_THIRDS = {"K": -2 / 3, "T": -2 / 3, "TK": -1.0, "Te": -1.5, "RK": 0.0, "Re": -1.0}
_NEST = {"K": 0.0, "T": -1 / 2, "TK": 0.0, "Te": -2.0, "RK": 0.0, "Re": -2.0}


def _local_bsgm(plan: Plan, eta: Schedule, kind: Any = LocalBSGM, **more: Any) -> Any:
    numbers = (getattr(plan, name) for name in _WEIGHTS)
    series = Neumann(plan.q, plan.theta)
    return kind(series, eta, *numbers, local_steps=plan.local_steps, **more)


def _local_bsgvrm(plan: Plan, eta: Schedule) -> Any:
    return _local_bsgm(plan, eta, LocalBSGVRM, first_batch=plan.first_batch)


def _fedbioacc(plan: Plan, eta: Schedule) -> FedBiOAcc:
    steps = (plan.rho1, plan.rho2, plan.rho2)
    weights = (plan.alpha, plan.beta, plan.beta)
    return FedBiOAcc(eta, *steps, *weights, local_steps=plan.local_steps)


def _fednest(plan: Plan, eta: Schedule) -> FedNest:
    # One of its rounds moves as far as p local steps do.
    whole = plan.local_steps * float(eta(0))
    return FedNest(
        alpha=whole * plan.rho1,
        beta=whole * plan.rho2,
        inner_rounds=1,
        local_steps=plan.local_steps,
        ell=1 / plan.theta,
        terms=plan.q,
        random_length=False,
    )


CLAIMS: Mapping[type[AbstractAlgorithm], Claims] = {
    LocalBSGM: Claims((1,), _ROOT, _local_bsgm),
    LocalBSGVRM: Claims((2, 3), _TWO_THIRDS, _local_bsgvrm),
    FedBiOAcc: Claims((2, 3), _TWO_THIRDS, _fedbioacc),
    FedNest: Claims((1,), _NEST, _fednest),
}


def claims_of(kind: type[AbstractAlgorithm]) -> Claims:
    """Return what is claimed of an algorithm, or say of which something is."""
    if kind not in CLAIMS:
        known = ", ".join(f"`{one.__name__}`" for one in CLAIMS)
        raise InvalidInputError(
            f"no theorem is known of `{kind.__name__}`: there are theorems of {known}."
        )
    return CLAIMS[kind]


def theorem_for(kind: type[AbstractAlgorithm], theorem: int | None) -> int:
    """Return the theorem asked for, or the first one an algorithm is planned by."""
    known = claims_of(kind).theorems
    if theorem is not None and theorem not in known:
        raise InvalidInputError(
            f"theorem {theorem} is not about `{kind.__name__}`: there is "
            f"{' and '.join(map(str, known))}."
        )
    return known[0] if theorem is None else theorem


def subject_of(theorem: int) -> type[AbstractAlgorithm]:
    """Return the algorithm that a theorem is about."""
    return LocalBSGM if theorem == 1 else LocalBSGVRM


def algorithm_by(plan: Plan, kind: type[AbstractAlgorithm]) -> AbstractAlgorithm:
    """Return an algorithm with all the numbers of a plan."""
    claims = claims_of(kind)
    if plan.theorem not in claims.theorems:
        raise InvalidInputError(
            f"a plan by theorem {plan.theorem} is for "
            f"`{subject_of(plan.theorem).__name__}`, not `{kind.__name__}`."
        )
    sizes = {"clients": plan.clients, "local_steps": plan.local_steps}
    return claims.build(plan, parse_schedule(plan.eta, **sizes, rho1=plan.rho1))


def parameters_of(
    algorithm: AbstractAlgorithm, clients: int
) -> tuple[int, Parameters, Neumann]:
    """Return the theorem about an algorithm, its parameters, and its series."""
    bundles = algorithm.settings().get("first_batch", 1)
    algorithm = algorithm.unwrapped()
    if not isinstance(algorithm, LocalBSGM | LocalBSGVRM):
        raise InvalidInputError(
            "the conditions are those of `LocalBSGM` and `LocalBSGVRM`, not of "
            f"`{type(algorithm).__name__}`."
        )
    series = algorithm.hypergradient
    if not isinstance(series, Neumann):
        raise InvalidInputError("the theorems are about the stochastic Neumann series.")
    storm = isinstance(algorithm, LocalBSGVRM)
    constant = isinstance(algorithm.eta, Constant)
    found = Parameters(
        clients=clients,
        local_steps=algorithm.local_steps,
        eta=float(algorithm.eta(0)),
        **{name: float(getattr(algorithm, name)) for name in _WEIGHTS},
        first_batch=bundles if storm else 1,
    )
    return (2 if constant else 3) if storm else 1, found, series
