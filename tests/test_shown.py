"""What an editor or a notebook shows of an object tells a person what it is."""

import html
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import wrappers
from fedbilevel.errors import DivergedError
from tests.reports import made_up


def judge(x, y, rows):
    return jnp.mean(rows["t"] - x * y)


def train(x, y, rows):
    return jnp.mean((rows["t"] - y) ** 2) + x * y**2


def site(count: int) -> dict[str, np.ndarray]:
    return {"a": np.ones((count, 5)), "t": np.ones(count)}


def noisy(key, rows):
    return rows


DATA = fb.ClientData.from_clients([site(30), site(50)], [site(20), site(1040)])
METHOD = fb.FedBiO(0.1, 0.2, 0.3, local_steps=5)
SHOWN = "FedBiO(lr_x=0.1, lr_y=0.2, lr_z=0.3, local_steps=5)"


def test_client_data_count_their_rows():
    assert repr(DATA) == (
        "ClientData of 2 clients, weights 1, 1:\n"
        "  upper: 80 rows, 30 to 50 a client; each has a float64[5], t float64\n"
        "  lower: 1,060 rows, 20 to 1,040 a client; each has a float64[5], t float64"
    )
    alone = fb.ClientData.from_clients([jnp.ones((3, 2))], [site(1)], [0.25])
    assert repr(alone) == (
        "ClientData of 1 client, weight 0.25:\n"
        "  upper: 3 rows; each has float64[2]\n"
        "  lower: 1 row; each has a float64[5], t float64"
    )
    many = fb.ClientData.from_clients([site(2)] * 40, [site(2)] * 40)
    assert repr(many).startswith("ClientData of 40 clients, all of weight 1:\n")
    unlike = many.weighing([1, *[3] * 39])
    assert repr(unlike).startswith("ClientData of 40 clients, weights 1 to 3:\n")


def test_pooled_data_say_so():
    assert repr(DATA.pooled()) == f"PooledData, as on one machine, of {DATA!r}"


def test_rows_without_numbers_are_shown_by_their_shapes():
    """Inside a compiled program nobody knows how many rows there are."""
    shapes = []

    def look(data):
        shapes.append(repr(data))
        return 0

    jax.jit(look)(DATA)
    assert "upper_sizes=i32[2]" in shapes[0]
    assert "(2, 52, 5)" in repr(jax.eval_shape(lambda: DATA))


def test_a_problem_names_its_losses():
    assert repr(fb.Problem(judge, train)) == "Problem(upper=judge, lower=train)"
    private = fb.Pair(False, True)
    unnamed = fb.Problem(eqx.Partial(judge), lambda x, y, r: x, private=private)
    assert repr(unnamed) == (
        "Problem(upper=judge, lower=<lambda>, private=Pair(x=False, y=True))"
    )
    frozen = {"w": np.ones((300, 200)), "b": np.ones(200)}
    large = fb.Problem(judge, train, upper_noise=noisy, frozen=frozen, rows_at_once=64)
    assert repr(large) == (
        "Problem(upper=judge, lower=train, upper_noise=noisy, frozen=60,200 numbers, "
        "rows_at_once=64)"
    )


def test_a_method_shows_steps_as_options_write_them():
    assert repr(METHOD) == SHOWN
    measured = fb.FedBiO(local_steps=5)
    assert repr(measured) == "FedBiO(lr_x=auto, lr_y=0.5/L, lr_z=0.5/L, local_steps=5)"
    nested = fb.LocalBSGM(fb.Neumann(20, 0.1), 0.1, 0.2, 0.3, 0.9, 0.9, local_steps=2)
    assert "Neumann(q=20, theta=0.1)" in repr(nested)
    assert "f32[]" not in repr(nested)


def test_a_chain_of_wrappers_is_shown_as_it_is_written():
    chain = wrappers.steady(wrappers.controls(METHOD))
    assert repr(chain) == f"SteadySteps(controls({SHOWN}), safeguard=True)"
    warm = wrappers.warm_start(METHOD, 20)
    assert repr(warm) == f"warm_start({SHOWN}, warm_start=20)"
    boxed = wrappers.box(METHOD, 0.0, 2.0)
    assert repr(boxed) == f"box({SHOWN}, low=0.0, high=2.0, block='x')"
    assert repr(wrappers.average(METHOD)) == f"Average({SHOWN})"


@pytest.fixture
def compared():
    results = {
        name: [made_up(name, seed) for seed in (3, 4)]
        for name in ("fedbio", "<simfbo>")
    }
    return fb.Comparison("upper_loss", results, {"<b>": DivergedError("in round <2>")})


def test_a_comparison_is_a_ranking(compared):
    ends = {
        name: np.mean([one.columns["upper_loss"][-1] for one in many])
        for name, many in compared.results.items()
    }
    best, worst = sorted(ends, key=lambda name: ends[name])
    lines = repr(compared).splitlines()
    assert lines[0] == "Comparison by upper_loss, mean of 2 seeds, lower is better:"
    assert lines[1].split() == [best, f"{ends[best]:.5g}"]
    assert lines[2].split() == [worst, f"{ends[worst]:.5g}"]
    assert lines[3].split() == ["<b>", "diverged:", "in", "round", "<2>"]
    assert len(lines) == 4


def test_a_comparison_in_a_notebook_is_a_table(compared):
    table = compared._repr_html_()
    assert table.count("<tr>") == 3 and "<b>" not in table and "<2>" not in table
    assert html.escape("<simfbo>") in table
    assert "Comparison by upper_loss, mean of 2 seeds, lower is better" in table


def test_an_empty_comparison_is_shown():
    assert repr(fb.Comparison("upper_loss")).startswith("Comparison by upper_loss")


def test_a_result_in_a_notebook_says_first_how_good_the_model_is():
    sentence = "Log loss 0.1 < 0.2 on 120 rows."
    found = replace(made_up("fedbio", 3), quality={"sentence": sentence})
    table = found._repr_html_()
    assert table.index(html.escape(sentence)) < table.index("<tr>")
