"""The theory against the paper's own lines, with letters that all differ.

Constants that are 1 hide a power, equal ones a mix-up: both sets here are drawn, and no
two letters of a set are alike. `tests.reference.theorems` has the paper's expressions.
"""

import math
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from fedbilevel import FedBiOAcc, FedNest, LocalBSGM, LocalBSGVRM
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import ConjugateGradient, Neumann
from fedbilevel.schedules import Constant, CubeRootDecay, TheoremThree
from fedbilevel.theory.claims import (
    CLAIMS,
    algorithm_by,
    claims_of,
    parameters_of,
    subject_of,
    theorem_for,
)
from fedbilevel.theory.constants import Constants, Inputs
from fedbilevel.theory.plan import Calibration, Plan, practical_plan, theory_plan
from fedbilevel.theory.theorems import (
    Condition,
    Parameters,
    bound,
    conditions,
    dominating,
    largest_steps,
)
from tests.reference import theorems

EXACT = 1e-12
PROBLEM_LETTERS = ("L0", "L1", "L21", "L22", "mu", "sigma")


def drawn(seed):
    """Return a problem, a series and a run whose letters are all different."""
    draw = np.random.default_rng(seed)
    problem = dict(zip(PROBLEM_LETTERS, draw.uniform(1.1, 3.0, 6), strict=True))
    problem["mu"] = float(draw.uniform(0.3, 0.9))
    problem["sigma"] = float(draw.uniform(0.1, 0.9))
    run = {"K": 5 + seed, "p": 3 + 5 * seed, "B": 7 + 2 * seed}
    names = ("eta", "alpha", "beta", "rho1", "rho2")
    run |= dict(zip(names, draw.uniform(0.02, 0.9, 5), strict=True))
    theta = float(draw.uniform(0.1, 0.25))
    return problem, theta, 4 + 3 * seed, run


SETS = [drawn(seed) for seed in (0, 1)]
TWO_SETS = pytest.mark.parametrize(("problem", "theta", "Q", "run"), SETS)
THEOREMS = pytest.mark.parametrize("theorem", [1, 2, 3])


def ours(problem, theta, Q):
    names = {name.lower(): value for name, value in problem.items()}
    return Constants(Inputs(**names), theta, Q)


def letters(run):
    counts = {"clients": run["K"], "local_steps": run["p"], "first_batch": run["B"]}
    rest = {name: run[name] for name in ("eta", "alpha", "beta", "rho1", "rho2")}
    return Parameters(**counts, **rest)


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=EXACT, atol=0)


@TWO_SETS
def test_letters_of_a_set_differ(problem, theta, Q, run):
    values = [*problem.values(), theta, Q, *run.values()]
    assert len(set(values)) == len(values) and 1 not in values


@TWO_SETS
def test_every_derived_constant(problem, theta, Q, run):
    del run
    expected, found = theorems.derived(problem, theta, Q), ours(problem, theta, Q)
    same(found.l_phi, expected["L_Phi"])
    same(found.l_hat**2, expected["Lhat2"])
    same(found.l_tilde, expected["Ltil"])
    same(found.g_squared, expected["G2"])
    same(found.delta_q, expected["Delta_Q"])
    names = ("l_phi", "l_hat", "l_tilde", "g_squared", "delta_q")
    assert found.as_dict() == {name: getattr(found, name) for name in names}


@TWO_SETS
@THEOREMS
def test_every_right_hand_side(theorem, problem, theta, Q, run):
    found = conditions(theorem, ours(problem, theta, Q), letters(run))
    expected = theorems.limits(theorem, problem, theta, Q, run)
    assert Counter(one.letter for one in found) == Counter(name for name, _ in expected)
    for letter in {name for name, _ in expected}:
        same(
            sorted(one.right for one in found if one.letter == letter),
            sorted(right for name, right in expected if name == letter),
        )
    for one in found:
        assert one.theorem == theorem
        if one.letter != "alpha = beta":
            assert one.left == {**run, "theta": theta}[one.letter]
        # Theorem 1 prints < for eta, and all three for theta.
        strict = one.letter == "theta" or (theorem == 1 and one.letter == "eta")
        assert one.strict == strict


def test_theorem_three_asks_for_its_alpha_and_beta_exactly():
    problem, theta, Q, run = SETS[1]
    expected = dict(theorems.limits(3, problem, theta, Q, run))["alpha = beta"]
    for alpha, beta, holds in (
        (expected, expected, True),
        (expected * 1.00001, expected, False),
        (expected, expected / 1.00001, False),
    ):
        s = letters({**run, "alpha": alpha, "beta": beta})
        found = conditions(3, ours(problem, theta, Q), s)
        (one,) = (one for one in found if one.letter == "alpha = beta")
        assert one.holds == holds
        assert ("set alpha and beta" in one.advice()) != holds


@TWO_SETS
@THEOREMS
@pytest.mark.parametrize("given", [(), (0.37, 0.59)])
def test_every_largest_step(theorem, given, problem, theta, Q, run):
    c = ours(problem, theta, Q)
    found = largest_steps(theorem, c, run["K"], run["p"], *given)
    Lhat2 = theorems.derived(problem, theta, Q)["Lhat2"]
    usual = {1: 1.0, 2: Lhat2 / run["K"]}
    third = Lhat2 / (3 * run["p"] * run["K"] ** 2) + Lhat2 / run["K"]
    weights = given or (usual.get(theorem, third),) * 2
    start = {**run, "alpha": weights[0], "beta": weights[1]}
    expected = theorems.largest(theorem, problem, theta, Q, start)
    assert (found.clients, found.local_steps) == (run["K"], run["p"])
    for name in ("alpha", "beta", "rho1", "rho2", "eta"):
        same(getattr(found, name), expected[name])


@TWO_SETS
@THEOREMS
def test_every_term_of_the_bound(theorem, problem, theta, Q, run):
    T, phi0, y0 = 1234.0, 1.7, 2.3
    found = bound(theorem, ours(problem, theta, Q), letters(run), T, phi0, y0)
    expected = theorems.bound(theorem, problem, theta, Q, run, T, phi0, y0)
    assert set(found) == set(expected)
    for name, value in expected.items():
        same(found[name], value)
    assert dominating(found) == max(expected, key=lambda name: expected[name])


def test_a_condition_tells_its_slack_and_what_to_do():
    weak, strict = (Condition(1, "n", "eta", 2.0, 2.0, one) for one in (False, True))
    assert weak.holds and not strict.holds
    assert Condition(1, "n", "eta", 2.0 + 1e-6, 2.0).holds  # single precision
    assert not Condition(1, "n", "eta", 2.0 + 1e-5, 2.0).holds
    broken = Condition(1, "n", "eta", 3.0, 0.5)
    assert not broken.holds and broken.slack == 0.5 / 3.0
    assert broken.advice() == "eta at most 0.5, 6 times less"
    assert replace(broken, strict=True).advice() == "eta below 0.5, 6 times less"
    assert Condition(1, "n", "eta", 0.0, 2.0).slack == math.inf
    assert weak.plain() == {
        **asdict(weak),
        **{"holds": True, "slack": 1.0, "advice": ""},
    }


# Plans ---------------------------------------------------------------------------


def quarter_of_noise(theorem, problem, theta, Q, run):
    """Say whether drift is at most a quarter of the noise, and eta is allowed."""
    terms = theorems.bound(theorem, problem, theta, Q, run, 1.0, 0.0, 0.0)
    drift = sum(value for name, value in terms.items() if "drift" in name)
    most = theorems.largest(theorem, problem, theta, Q, run)["eta"]
    inside = run["eta"] <= 0.99 * most * (1 + 1e-9)
    return inside and drift <= (terms["noise of u"] + terms["noise of v"]) / 4


def best_step(theorem, problem, theta, Q, run, T, start):
    """Return where the bound is least, by looking everywhere."""
    most = theorems.largest(theorem, problem, theta, Q, {**run, "p": 1})["eta"]
    etas = 0.99 * most * np.exp(-np.arange(0, 60, 2e-4))
    terms = theorems.bound(theorem, problem, theta, Q, {**run, "eta": etas}, T, *start)
    return etas[np.argmin(sum(terms.values()))]


def run_of(plan, eta):
    names = ("alpha", "beta", "rho1", "rho2")
    counts = {"K": plan.clients, "p": plan.local_steps, "B": plan.first_batch}
    return {**counts, "eta": eta, **{name: getattr(plan, name) for name in names}}


# Weaker third derivatives and noise, so that p and Q are not at their least.
MILD = [
    ({**problem, "L21": 0.02 + 0.01 * i, "L22": 0.03, "sigma": 0.4 + i}, i)
    for i, (problem, *_) in enumerate(SETS)
]


@pytest.mark.parametrize(("problem", "i"), MILD)
@pytest.mark.parametrize("theorem", [1, 2])
def test_every_letter_that_a_theorem_plans(theorem, problem, i):
    K, T, start, sizes = 3 + i, 10 ** (11 + i), (1.7, 2.3), (5, 6 + i)
    inputs = ours(problem, 0.1, 1).inputs
    plan = theory_plan(theorem, inputs, K, sizes=sizes, iterations=T, start=start)
    theta = 0.5 / problem["L1"]
    same(plan.theta, theta)
    assert (plan.preset, plan.theorem, plan.clients) == ("theory", theorem, K)
    assert plan.iterations == T and plan.local_steps > 1 and plan.q > 1
    eta = float(plan.eta)
    run = run_of(plan, eta)
    weight = 1.0 if theorem == 1 else theorems.derived(problem, theta, plan.q)["Lhat2"]
    weights = dict.fromkeys(("alpha", "beta"), weight / (1 if theorem == 1 else K))
    most = theorems.largest(theorem, problem, theta, plan.q, {**run, **weights})
    for name in ("alpha", "beta", "rho1", "rho2"):
        same(getattr(plan, name), most[name])
    found = best_step(theorem, problem, theta, plan.q, run, T, start)
    np.testing.assert_allclose(eta, found, rtol=2e-3)
    assert quarter_of_noise(theorem, problem, theta, plan.q, run)
    longer = {**run, "p": plan.local_steps + 1}
    assert not quarter_of_noise(theorem, problem, theta, plan.q, longer)
    assert plan.first_batch == (1 if theorem == 1 else plan.local_steps)
    check_bound_and_costs(plan, problem, run, T, start, sizes)


def check_bound_and_costs(plan, problem, run, T, start, sizes):
    given = (problem, plan.theta, plan.q, run, T, *start)
    terms = theorems.bound(plan.theorem, *given)
    assert set(plan.terms) == set(terms)
    for name, value in terms.items():
        same(plan.terms[name], value)
    same(plan.promise, sum(terms.values()))
    counts = (plan.local_steps, plan.first_batch, plan.rounds, plan.q)
    assert all(type(count) is int for count in counts)
    series = terms["truncated series"]
    assert series <= 0.1 * (plan.promise - series)
    assert plan.dominating == max(terms, key=lambda name: terms[name])
    assert plan.rounds == math.ceil(T / plan.local_steps)
    assert plan.floats_up == plan.rounds * 2 * sum(sizes)  # u, v, x, y
    assert plan.bytes_up == 4 * plan.floats_up
    # xi, zeta, zeta_0 .. zeta_Q in every iteration, and B times in the first.
    assert plan.samples_per_client == (T - 1 + plan.first_batch) * (plan.q + 3)


@pytest.mark.parametrize("theorem", [1, 2, 3])
@pytest.mark.parametrize("T", [10**4, 10**7, 10**10, 10**13])
def test_a_period_is_a_whole_number_of_steps(theorem, T):
    """Also where one step is all that the drift allows, and half of it is none."""
    problem = SETS[0][0]
    theta = 0.5 / problem["L1"]
    given = {"sizes": (5, 6), "iterations": T, "start": (1.7, 2.3), "theta": theta}
    plan = theory_plan(theorem, ours(problem, 0.1, 1).inputs, 3, **given)
    counts = (plan.local_steps, plan.first_batch, plan.rounds)
    assert all(type(count) is int and count >= 1 for count in counts)


@pytest.mark.parametrize(("problem", "i"), MILD)
def test_every_letter_that_theorem_three_plans(problem, i):
    K, T, start, sizes = 3 + i, 10 ** (13 + i), (1.7, 2.3), (5, 6 + i)
    theta = 0.11 + 0.02 * i
    inputs = ours(problem, 0.1, 1).inputs
    plan = theory_plan(
        3, inputs, K, sizes=sizes, iterations=T, start=start, theta=theta
    )
    assert plan.theta == theta and plan.local_steps > 1
    # The first term of 200 p/T + 1/(K T)^(2/3) stays the smaller one.
    assert plan.local_steps == int(T / 200 / (K * T) ** (2 / 3))
    assert plan.first_batch == plan.local_steps
    derived = theorems.derived(problem, theta, plan.q)
    run = run_of(plan, math.nan)
    weight = derived["Lhat2"] / (3 * plan.local_steps * K**2) + derived["Lhat2"] / K
    most = theorems.largest(3, problem, theta, plan.q, run)
    for name, value in {**most, "alpha": weight, "beta": weight}.items():
        if name in ("alpha", "beta", "rho1", "rho2"):
            same(getattr(plan, name), value)
    name, hat, phi = plan.eta.split(":")
    assert name == "theorem3"
    same([float(hat), float(phi)], [math.sqrt(derived["Lhat2"]), derived["L_Phi"]])
    schedule = algorithm_by(plan, LocalBSGVRM).eta  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(schedule, TheoremThree)
    same(schedule(0), most["eta"])
    check_bound_and_costs(plan, problem, run, T, start, sizes)


@pytest.mark.parametrize("theorem", [1, 2])
def test_a_plan_has_no_more_factors_than_the_truncation_needs(theorem):
    problem, K, T, start = MILD[0][0], 3, 10**11, (1.7, 2.3)
    theta = 0.5 / problem["L1"]
    inputs = ours(problem, 0.1, 1).inputs
    Q = theory_plan(theorem, inputs, K, sizes=(1, 1), iterations=T, start=start).q
    tried = [0]
    while tried[-1] < Q:
        tried.append(tried[-1] + max(1, tried[-1] // 8))
    assert tried[-1] == Q
    fewer = tried[-2]
    weight = theorems.derived(problem, theta, fewer)["Lhat2"] / K
    weights = dict.fromkeys(("alpha", "beta"), 1.0 if theorem == 1 else weight)
    run = {"K": K, "p": 1, "B": 1, "eta": 0.1, **weights}
    run = theorems.largest(theorem, problem, theta, fewer, run)
    for _ in range(4):
        run["eta"] = best_step(theorem, problem, theta, fewer, run, T, start)
        run["p"] = 1
        while quarter_of_noise(theorem, problem, theta, fewer, run):
            run["p"] += 1
        run["p"] = max(1, run["p"] - 1)
        run["B"] = run["p"] if theorem == 2 else 1
    terms = theorems.bound(theorem, problem, theta, fewer, run, T, *start)
    series = terms["truncated series"]
    assert series > 0.1 * (sum(terms.values()) - series)


@THEOREMS
def test_a_target_takes_the_least_iterations(theorem):
    problem = MILD[1][0]
    inputs = ours(problem, 0.1, 1).inputs
    target = 300.0 if theorem == 1 else 3e4
    plan = theory_plan(theorem, inputs, 4, sizes=(5, 6), target=target)
    assert plan.promise <= target
    fewer = int(plan.iterations * (1 - 1 / 500))
    short = theory_plan(theorem, inputs, 4, sizes=(5, 6), iterations=fewer)
    assert short.promise > target


@pytest.mark.parametrize("theorem", [1, 2, 3])
@pytest.mark.parametrize(("K", "T"), [(7, 5000), (2, 90_000)])
def test_every_letter_that_a_corollary_scales(theorem, K, T):
    K0, T0, q0, value, theta = 3, 2000, 9, 0.37, 0.23
    first = Parameters(K0, 40, 0.013, 3.1, 4.7, 0.29, 0.53, 90)
    base = Calibration(theorem, T0, first, theta, q0, (4, 6), value)
    plan = practical_plan(base, K, iterations=T)
    if theorem == 1:  # eta ~ (K/T)^1/2, p ~ T^1/4 / K^3/4, M ~ (K T)^-1/2
        eta = 0.013 * (K / T) ** (1 / 2) / (K0 / T0) ** (1 / 2)
        period = (T ** (1 / 4) / K ** (3 / 4)) / (T0 ** (1 / 4) / K0 ** (3 / 4))
        promise, weight = value * ((K0 * T0) / (K * T)) ** (1 / 2), 1.0
    else:  # eta ~ K^2/3 / T^1/3, p, B ~ T^1/3 / K^2/3, alpha ~ 1/K, M ~ (K T)^-2/3
        eta = 0.013 * (K ** (2 / 3) / T ** (1 / 3)) / (K0 ** (2 / 3) / T0 ** (1 / 3))
        period = (T ** (1 / 3) / K ** (2 / 3)) / (T0 ** (1 / 3) / K0 ** (2 / 3))
        promise, weight = value * ((K0 * T0) / (K * T)) ** (2 / 3), K0 / K
    assert plan.local_steps == round(40 * period)
    assert plan.first_batch == round(90 * period)
    same([plan.alpha, plan.beta], [3.1 * weight, 4.7 * weight])
    assert (plan.rho1, plan.rho2, plan.theta) == (0.29, 0.53, theta)
    assert plan.q == round(9 * math.log(K * T + 1) / math.log(K0 * T0 + 1))
    same(plan.promise, promise)
    if theorem == 3:  # twice eta at the start, eta at the end
        name, c0, w0 = plan.eta.split(":")
        assert name == "decay"
        same(float(c0) / float(w0) ** (1 / 3), eta * 9 ** (1 / 3))
        same(float(c0) / (float(w0) + T) ** (1 / 3), eta)
    else:
        same(float(plan.eta), eta)
    assert plan.rounds == math.ceil(T / plan.local_steps)
    assert plan.floats_up == plan.rounds * 2 * (4 + 6)
    assert plan.samples_per_client == (T - 1 + plan.first_batch) * (plan.q + 3)
    assert (plan.preset, plan.theorem, plan.clients) == ("practical", theorem, K)


@THEOREMS
def test_the_corollary_for_a_target_is_solved_for_T(theorem):
    base = Calibration(
        theorem, 2000, Parameters(3, 40, 0.1, 3, 4, 0.3, 0.5), 0.2, 9, (4, 6), 0.37
    )
    found = practical_plan(base, 5, target=0.05)
    power = 2 if theorem == 1 else 3 / 2
    expected = (0.37 / 0.05) ** power * 3 * 2000 / 5
    assert expected <= found.iterations <= expected * 1.0011 + 1


def test_plans_refuse_what_says_nothing():
    base = Calibration(
        1, 2000, Parameters(3, 4, 0.1, 3, 4, 0.3, 0.5), 0.2, 9, (4, 6), 0.37
    )
    with pytest.raises(InvalidInputError, match="iterations=0: at least 1"):
        practical_plan(base, 5, iterations=0)
    with pytest.raises(InvalidInputError, match="target=0: must be above 0"):
        practical_plan(base, 5, target=0)
    plan = practical_plan(base, 5, iterations=100)
    assert "below K^3 = 125" in plan.notes[0]
    read = Plan.from_plain(plan.plain())
    assert read == plan
    with pytest.raises(ValueError, match="theorem 4"):
        Plan.from_plain({**plan.plain(), "theorem": 4})


# Claims --------------------------------------------------------------------------

# M ~ K^a T^b; T ~ K^c epsilon^d; rounds ~ K^e epsilon^f, as the tables print them.
CLAIMED = {
    LocalBSGM: (-1 / 2, -1 / 2, -1, -2, 0, -3 / 2),
    LocalBSGVRM: (-2 / 3, -2 / 3, -1, -3 / 2, 0, -1),
    FedBiOAcc: (-2 / 3, -2 / 3, -1, -3 / 2, 0, -1),
    FedNest: (0, -1 / 2, 0, -2, 0, -2),
}


def test_the_claims_are_those_of_the_tables():
    assert set(CLAIMS) == set(CLAIMED)
    for kind, exponents in CLAIMED.items():
        names = ("K", "T", "TK", "Te", "RK", "Re")
        assert claims_of(kind).exponents == dict(zip(names, exponents, strict=True))
    assert CLAIMS[LocalBSGM].theorems == CLAIMS[FedNest].theorems == (1,)
    assert CLAIMS[LocalBSGVRM].theorems == CLAIMS[FedBiOAcc].theorems == (2, 3)
    assert [subject_of(n) for n in (1, 2, 3)] == [LocalBSGM, LocalBSGVRM, LocalBSGVRM]
    assert theorem_for(LocalBSGVRM, None) == 2 and theorem_for(LocalBSGVRM, 3) == 3
    assert theorem_for(LocalBSGM, None) == 1
    with pytest.raises(InvalidInputError, match="theorem 2 is not about `LocalBSGM`"):
        theorem_for(LocalBSGM, 2)
    with pytest.raises(InvalidInputError, match="no theorem is known of `FedAvg`"):
        claims_of(FedAvg)


@pytest.mark.parametrize("kind", [LocalBSGM, LocalBSGVRM, FedBiOAcc, FedNest])
def test_the_claims_agree_with_each_other(kind):
    """M ~ (K^a T^b) <= epsilon, solved for T; p ~ 1/(K epsilon^1/2) for the rounds."""
    of = claims_of(kind).exponents
    same(of["Te"], 1 / of["T"])
    same(of["TK"], -of["K"] / of["T"])
    if of["TK"]:  # FedNest has one round per iteration
        same([of["RK"], of["Re"]], [of["TK"] + 1, of["Te"] + 1 / 2])


def planned(theorem):
    first = Parameters(3, 40, 0.013, 3.1, 4.7, 0.29, 0.53, 90)
    base = Calibration(theorem, 2000, first, 0.23, 9, (4, 6), 0.37)
    return practical_plan(base, 3, iterations=2000)


def test_algorithms_take_every_letter_of_a_plan():
    first = algorithm_by(planned(1), LocalBSGM)
    assert isinstance(first, LocalBSGM)
    assert parameters_of(first, 3) == (
        1,
        Parameters(3, 40, 0.013, 3.1, 4.7, 0.29, 0.53, 1),
        first.hypergradient,
    )
    for theorem in (2, 3):
        storm: Any = algorithm_by(planned(theorem), LocalBSGVRM)
        assert isinstance(storm.unwrapped(), LocalBSGVRM)
        number, found, rule = parameters_of(storm, 3)
        assert number == theorem and isinstance(rule, Neumann)
        eta = 0.013 if theorem == 2 else 0.013 * 9 ** (1 / 3)
        same(found.eta, eta)
        expected = Parameters(3, 40, found.eta, 3.1, 4.7, 0.29, 0.53, 90)
        assert found == expected
    for rule in (first.hypergradient, storm.hypergradient):
        assert isinstance(rule, Neumann)
        assert (rule.q, float(rule.theta)) == (9, 0.23)


def test_relatives_take_the_letters_in_their_own_names():
    near = algorithm_by(planned(2), FedBiOAcc)
    assert isinstance(near, FedBiOAcc)
    names = ("eta", "gamma", "tau", "c_nu", "c_omega", "c_q")
    found = [float(getattr(near, name)) for name in names]
    assert found == [0.29, 0.53, 0.53, 3.1, 4.7, 4.7]
    assert float(near.a(0)) == 0.013 and near.local_steps == 40
    nest = algorithm_by(planned(1), FedNest)
    assert isinstance(nest, FedNest)
    # A round of it moves as far as 40 local steps do.
    same(float(nest.alpha), 40 * 0.013 * 0.29)
    same(float(nest.beta), 40 * 0.013 * 0.53)
    same(float(nest.ell), 1 / 0.23)
    assert (nest.terms, nest.local_steps, nest.inner_rounds) == (9, 40, 1)
    assert not nest.random_length
    with pytest.raises(InvalidInputError, match="theorem 1 is for `LocalBSGM`"):
        algorithm_by(planned(1), LocalBSGVRM)


def test_which_theorem_an_algorithm_is_about():
    rule, four = Neumann(2, 0.1), (1.0, 2.0, 0.3, 0.4)
    for eta, theorem in ((Constant(0.1), 2), (CubeRootDecay(1, 8), 3)):
        storm = LocalBSGVRM(rule, eta, *four, local_steps=2)
        assert parameters_of(storm, 2)[0] == theorem
    with pytest.raises(InvalidInputError, match="not of `FedAvg`"):
        parameters_of(FedAvg(0.1, local_steps=2), 2)
    other = LocalBSGM(ConjugateGradient(3), 0.1, *four, local_steps=2)
    with pytest.raises(InvalidInputError, match="stochastic Neumann series"):
        parameters_of(other, 2)
