"""How good a model is where rows stay apart: means over rows, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.evaluation import NUMBERS, Judged, Rows, Site, quality, reported, split
from fedbilevel.experiments.agreement import sized_here
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.sites import build_site
from tests.federation import masked_patients
from tests.test_weights_at_sites import (
    SIZES,
    TERMS,
    Loopback,
    at_server,
    folder,
    read_preparation,
)

assert folder  # a fixture


def judged(rows, classes, seed):
    """Make a site's tested rows, a model's predictions of them, and its own rows."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(rows + 80, 2))
    label = features[:, 0] + draw.normal(size=rows + 80)
    score = features[:, 0]
    if classes:
        label = (label > 0).astype(int)
        score = np.stack([1 / (1 + np.exp(score)), 1 / (1 + np.exp(-score))], axis=1)
    kept, tested = slice(rows, None), slice(None, rows)
    asked = Judged(
        Rows(label[tested], classes), score[tested], "no yes".split(), features[tested],
        None, [80],
    )  # fmt: skip
    return asked, Site(f"client {seed}", label[kept], lambda: features[kept])


@pytest.mark.parametrize("classes", [2, 0])
def test_means_are_those_of_all_rows_together(classes):
    sites = [judged(rows, classes, seed) for seed, rows in enumerate((400, 60, 20))]
    numbers = {k: reported(*one) for k, one in enumerate(sites)}
    assert all(set(one) <= set(NUMBERS) for one in numbers.values())
    own, found = split({k: {**one, "other": 1.0} for k, one in numbers.items()})
    assert own == {k: {"other": 1.0} for k in numbers}
    label = np.concatenate([one.rows.label for one, _ in sites])
    predicted = np.concatenate([one.predicted for one, _ in sites])
    features = np.concatenate([np.asarray(one.features) for one, _ in sites])
    pooled = Judged(Rows(label, classes), predicted, "ab", features, None, [240])
    expected = quality(pooled, [site for _, site in sites])
    main = found["metric"]
    assert main == expected["metric"] and found["rows"] == 480
    value, low, high = found["models"][0]["metrics"][main]
    true, *ends = expected["models"][0]["metrics"][main]
    assert value == pytest.approx(true, rel=1e-6)
    # The interval is that of means, and not of drawn rows: nearly as wide.
    assert [low, high] == pytest.approx(ends, rel=0.05)
    # How much more the loss of each alone is than that of the shared model.
    told = [numbers[k]["quality_difference"] for k in numbers]
    apart = {one["kind"]: one["difference"] for one in found["models"]}
    assert apart.pop("each_alone")[0] == pytest.approx(
        np.dot([400, 60, 20], told) / 480
    )
    assert list(apart.values()) == [[0.0, 0.0, 0.0]] * 2
    assert "480 held-out rows of 3 sites" in found["sentence"]
    assert "each site alone" in found["sentence"]


def test_sites_of_a_trial_judge_their_own_part_of_the_rows(tmp_path):
    trial = sized_here(replace(masked_patients(tmp_path), aggregate="mean"))
    assert trial.clients == 3
    tested = trial.build_task()[0].tested
    assert tested is not None
    for client in range(3):
        site = build_site(trial, client, trial=True)
        assert site.conclude is not None
        found = site.conclude(jax.tree.map(jnp.zeros_like, site.work.state))
        assert found["quality_rows"] == (tested.site == client).sum() > 0


def test_what_a_site_cannot_report_is_left_out():
    sites = [judged(rows, 2, seed) for seed, rows in enumerate((400, 60, 20))]
    numbers = {k: reported(*one) for k, one in enumerate(sites)}
    clean = split(numbers)[1]
    assert reported(*judged(9, 2, 5)) == {}  # too few rows say too much
    for change in (
        {"quality_rows": 2**50},  # more than it has
        {"quality_rows": 20.0},
        {"quality_held": -1},
        {"quality_shared_log_loss_low": 9.0},  # an interval without its value
        {"quality_shared_log_loss": -3.0, "quality_shared_log_loss_low": -4.0},
    ):
        spoiled = {**numbers, 3: {**numbers[2], **change}}
        counts = [480, 140, 100, 100]
        assert split(spoiled, counts)[1] == clean
    missing = {k: v for k, v in numbers[2].items() if k != "quality_difference_high"}
    assert split({**numbers, 3: missing})[1] == clean
    assert split({0: {}, 1: {"texts": ["a"]}})[1] == {}


def test_sites_that_are_worse_off_are_named():
    asked, site = judged(400, 2, 0)
    upside_down = Judged(
        asked.rows, asked.predicted[:, ::-1], "ab", asked.features, None, [80]
    )
    found = split({4: reported(upside_down, site), 5: reported(asked, site)})[1]
    assert found["warnings"] == ["worse off with the shared model than alone: client 4"]


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["mean", "secure"])
def test_a_deployed_model_is_judged_where_sites_allow_it(folder, aggregate):
    from tests.test_weights_at_sites import at_site, build_site

    sites = {
        k: build_site(at_site(folder, name, algorithm="fedbio", aggregate=aggregate), k)
        for k, name in enumerate(SIZES)
    }
    made, run = read_preparation(str(folder / "preparation.json")), folder / "run"
    run.mkdir()
    server = at_server(algorithm="fedbio", aggregate=aggregate)
    result = serve(Loopback(sites), server, run, TERMS, preparation=made)
    if aggregate == "secure":  # a site that hides its replies reports nothing
        assert result.quality == {}
        return
    rows = {one["name"]: one["rows"] for one in result.quality["sites"]}
    # A fifth of each is put aside; of 30 rows that is too few to report.
    assert rows == {"client 0": 240, "client 1": 18}
    assert result.quality["sentence"].startswith("Log loss 0.")
    assert not any(name.startswith("quality") for name in result.final)
