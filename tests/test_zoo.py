"""The zoo of benchmarks: every problem is made, and its losses have gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.zoo.cases import CATALOG, PARTITIONS, SUMMARIES, split
from benchmarks.zoo.running import verdicts
from benchmarks.zoo.scales import judged, upper_loss

CHEAP = ("ridge", "group_norms", "separable", "minimax", "one_row_sites")


def one_row(rows):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0, :1]), rows)


def gradients(case):
    """Return both losses on a row, and their gradients in x and y."""
    numbers, rest = eqx.partition(case.start, eqx.is_inexact_array)

    def scored(loss, rows):
        def of_numbers(numbers):
            return loss(*eqx.combine(numbers, rest), rows)

        return jax.value_and_grad(of_numbers)(numbers)

    problem, data = case.problem, case.data
    upper = scored(problem.upper, one_row(data.upper))
    return upper, scored(problem.lower, one_row(data.lower))


def test_thirty_problems_or_more_are_listed_with_a_summary():
    assert len(CATALOG) >= 30
    assert all(SUMMARIES[name].endswith(".") for name in CATALOG)


@pytest.mark.parametrize("name", CATALOG)
def test_losses_of_every_problem_are_numbers_on_every_partition(name):
    cases = [CATALOG[name](0, partition) for partition in PARTITIONS]
    sizes = [case.data.lower_sizes for case in cases]
    np.testing.assert_array_equal(sizes[0], sizes[1])
    assert np.min(sizes[2]) == 1
    for value, slope in jax.eval_shape(lambda: gradients(cases[0])):
        assert value.shape == ()
        start = eqx.filter(cases[0].start, eqx.is_inexact_array)
        assert jax.tree.structure(slope) == jax.tree.structure(start)


@pytest.mark.parametrize("name", CHEAP)
def test_losses_and_gradients_are_finite_at_the_start(name):
    case = CATALOG[name](0, "unequal")
    leaves = jax.tree.leaves(jax.jit(lambda: gradients(case))())
    assert all(np.isfinite(leaf).all() for leaf in leaves)


def test_clients_of_the_label_partition_have_few_labels():
    draw = np.random.default_rng(0)
    labels = draw.integers(10, size=1000)
    levels = ({"t": labels}, {"t": labels})
    mixed = {
        partition: np.mean(
            [
                np.bincount(rows["t"]).max() / len(rows["t"])
                for rows in split(levels, partition, draw)[0]
            ]
        )
        for partition in PARTITIONS
    }
    assert mixed["label"] > 0.5 > 2 * mixed["iid"]


def test_the_upper_loss_leaves_padding_out():
    case = CATALOG["ridge"](0, "unequal")
    rows, sizes = case.data.upper, case.data.upper_sizes
    x, y = case.start[0], case.start[1] + 1
    errors = np.asarray(rows["a"]) @ np.asarray(y) - np.asarray(rows["t"])
    of_clients = [np.mean(own[:n] ** 2) for own, n in zip(errors, sizes, strict=True)]
    np.testing.assert_allclose(
        upper_loss(case.problem, case.data, x, y), np.mean(of_clients), rtol=1e-5
    )


def test_a_minimax_problem_is_judged_at_the_answer_of_its_lower_level():
    """Its upper loss is minus the lower one, and falls without end in y."""
    case = CATALOG["minimax"](0, "iid")
    x, y = case.start
    assert upper_loss(case.problem, case.data, x, y + 9.0) < judged(case, x, y) - 1.0
    np.testing.assert_allclose(judged(case, x, y + 9.0), judged(case, x, y), rtol=1e-4)


@pytest.mark.parametrize(
    ("start", "final", "best", "within", "worse"),
    [
        (2.0, 1.09, 1.0, True, 0),
        (2.0, 1.12, 1.0, False, 0),
        (2.0, 2.1, 1.0, False, 1),
        (2.0, float("nan"), 1.0, False, 1),
        (1.0, 0.01, 0.001, True, 0),  # tends to 0: nine tenths of the descent
        (1.0, -0.7, -1.0, False, 0),
        (1.0, -0.9, -1.0, True, 0),
        (1.0, 1.0, 1.5, True, 0),  # the grid itself is worse than the start
    ],
)
def test_verdicts(start, final, best, within, worse):
    run = {"start": start, "final": final, "events": []}
    found = verdicts([run], {"best": best})
    assert (found["within"], found["worse"]) == (within, worse)


def test_a_run_that_ends_with_an_error_is_no_silent_failure():
    found = verdicts([{"start": 1.0, "error": "NonFiniteError"}], {"best": 0.5})
    assert (found["errors"], found["worse"], found["within"]) == (1, 0, False)
