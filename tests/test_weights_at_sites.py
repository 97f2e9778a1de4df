"""What sites of a federation count: by the rows on which they agreed beforehand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.datasets import Preparation, Sums
from fedbilevel.datasets.encoding import read_preparation
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import shared_settings
from fedbilevel.experiments.clients import counted
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.runtime.traced_calls import SAMPLES
from fedbilevel.tasks.regularization import strengths
from tests.federation import Loopback
from tests.test_weights import table_of

TERMS = Terms(patience=1, deadline=60.0)
SIZES = {"North": 1200, "South": 90, "West": 30}  # one of them has many rows


def typed(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def folder(tmp_path):
    """Make tables of three unlike sites, and prepare them as their operators would."""
    columns = ("--label", "ill", "--ignore", "site")
    sums = []
    for seed, (name, count) in enumerate(SIZES.items()):
        table = table_of(tmp_path / f"{name}.csv", {name: count}, seed)
        sums.append(tmp_path / f"{name}.json")
        typed("prepare", table, *columns, "--sums", sums[-1])
    typed("prepare", *sums, "--out", tmp_path / "preparation.json")
    return tmp_path


def at_site(folder: Path, name: str, **more) -> Experiment:
    options = {"label": "ill", "ignore": "site", "data": str(folder / f"{name}.csv")}
    options["preparation"] = str(folder / "preparation.json")
    chosen = {"aggregate": "secure", **more}
    return Experiment("regularization", clients=3, options=options, **chosen)


def at_server(**more) -> Experiment:
    chosen = {"aggregate": "secure", **more}
    return Experiment("regularization", clients=3, rounds=1, **chosen)


def every_site(folder, **options):
    made = {}
    for client, name in enumerate(SIZES):
        experiment = at_site(folder, name)
        chosen = {**experiment.options, **options}
        made[client] = build_site(replace(experiment, options=chosen), client)
    return made


def test_prepare_counts_the_rows_of_every_site(folder):
    made = read_preparation(str(folder / "preparation.json"))
    assert made.sites == tuple(SIZES.values())
    assert Preparation.from_json(made.to_json()) == made
    merged = Sums.from_json((folder / "West.json").read_text())
    assert merged.sites == (30,)
    older = replace(merged, sites=())
    assert Sums.merged([merged, older]).sites == ()


def test_unlike_sites_take_the_settings_of_the_largest(folder):
    """Each would be recommended other steps by its own rows."""
    sites = every_site(folder, folds="1").values()
    weights = [float(one.work.job.data.weights[0]) for one in sites]
    # A fifth of the rows of each is put aside.
    assert weights == [960, 72, 24]
    first, *others = (one.facts["recommended"] for one in sites)
    assert others == [first, first]
    alone = replace(at_site(folder, "West"), clients=1, weights="task")
    alone = replace(alone, options={**alone.options, "folds": "1"})
    assert alone.build_task()[0].recommended["upper_step"] != first["upper_step"]


@pytest.mark.slow
def test_unlike_sites_are_deployed(folder):
    sites, said = every_site(folder), []
    made = read_preparation(str(folder / "preparation.json"))
    run = folder / "run"
    run.mkdir()
    result = serve(
        Loopback(sites), at_server(), run, TERMS, report=said.append, preparation=made
    )
    words = "sites count by their rows: 960, 72, 24"
    assert result.config["data"]["remarks"] == [words]
    assert result.model is not None and result.model.preparation is not None
    assert result.model.preparation.sites == ()  # whoever predicts need not know them
    assert np.isfinite(result.y).all()
    # A server, which has no rows, counts one for each site.
    assert result.counts["bounds"] == dict.fromkeys(SAMPLES, "at least")


def test_a_site_whose_rows_were_not_counted_refuses_and_keeps_its_number(folder):
    table_of(folder / "West.csv", {"West": 31}, seed=2)
    with pytest.raises(InvalidInputError, match="counts 30 rows for client 2") as error:
        build_site(at_site(folder, "West"), 2)
    assert "31" not in str(error.value)
    with pytest.raises(InvalidInputError, match="counts 90 rows for client 1"):
        build_site(at_site(folder, "North"), 1)


@pytest.mark.slow
def test_a_server_with_other_counts_is_refused(folder):
    made, told = read_preparation(str(folder / "preparation.json")), []
    other = replace(made, sites=(1200, 90, 3000))
    run = folder / "run"
    run.mkdir()
    with pytest.raises(FedbilevelError, match="did not come"):
        serve(
            Loopback(every_site(folder)),
            at_server(),
            run,
            TERMS,
            report=told.append,
            preparation=other,
        )
    assert any("not taken: settings" in line for line in told)


def test_without_counts_sites_count_alike_and_it_is_said(folder):
    made = read_preparation(str(folder / "preparation.json"))
    (folder / "preparation.json").write_text(replace(made, sites=()).to_json())
    older = read_preparation(str(folder / "preparation.json"))
    server, words = counted(at_server(), older)
    assert words == "sites count alike: the preparation counts no rows"
    site, _ = counted(at_site(folder, "West"), older)
    assert shared_settings(server)["weights"] == shared_settings(site)["weights"]
    assert float(build_site(site, 2).work.job.data.weights[0]) == 1
    _, words = counted(at_server(), replace(made, sites=(5, 6)))
    assert words.endswith("counts the rows of 2, not of 3")
    for known in (None, older):
        with pytest.raises(InvalidInputError, match="--weights rows: no preparation"):
            counted(at_server(weights="rows"), known)


def test_what_the_operator_gives_comes_before_what_was_counted(folder):
    made = read_preparation(str(folder / "preparation.json"))
    assert counted(at_server(weights=(1, 2, 3)), made)[0].weights == (1, 2, 3)
    assert counted(at_server(weights="equal"), made)[0].weights == (1, 1, 1)
    noisy, words = counted(at_server(clip=1.0, noise=1.0, aggregate="mean"), made)
    assert noisy.weights == "task" and "clip and noise" in words


# The exact method at sites


def deployed(folder, run, sites, **more):
    run.mkdir()
    made = read_preparation(str(folder / "preparation.json"))
    server = Experiment("regularization", clients=3, **more)
    return serve(Loopback(sites), server, run, TERMS, preparation=made)


def test_sums_of_few_rows_need_the_secure_mean(folder):
    """With 3 parameters and 5 folds, 5 * 60 * (3 + 3)/2 rows."""
    build_site(at_site(folder, "North", aggregate="mean"), 0)
    with pytest.raises(InvalidInputError, match="with fewer than 900 could be found"):
        build_site(at_site(folder, "South", aggregate="mean"), 1)
    build_site(at_site(folder, "South", aggregate="secure"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["mean", "secure"])
def test_the_deployed_model_is_that_of_pooled_rows(folder, aggregate, monkeypatch):
    monkeypatch.setattr("fedbilevel.experiments.sites._EXCHANGES", 1)
    sites = {
        client: build_site(at_site(folder, name, aggregate=aggregate), client)
        for client, name in enumerate(SIZES)
    }
    result = deployed(folder, folder / "run", sites, aggregate=aggregate)
    assert "reached its own tolerance" in result.ended
    assert result.columns["exchanges"][-1] <= 60
    # scikit-learn on the rows of all sites, in columns scaled for the strengths.
    rows = [one.work.job.data.lower for one in sites.values()]
    sizes = [int(one.work.job.data.lower_sizes[0]) for one in sites.values()]
    a, label = (
        np.concatenate(
            [np.asarray(row[name])[0, :n] for row, n in zip(rows, sizes, strict=True)]
        )
        for name in ("features", "label")
    )
    each = strengths(result.x)
    lower: Any = sites[0].work.job.problem.lower
    width = np.sqrt(each[list(lower.__self__.columns)])
    pooled = LogisticRegression(C=1 / len(a), tol=1e-12, max_iter=10_000)
    pooled.fit(a[:, :-1] / width, label)
    last = np.asarray(result.y)[-1, 0]
    np.testing.assert_allclose(last[:-1], pooled.coef_[0] / width, atol=1e-6)
    np.testing.assert_allclose(last[-1:], pooled.intercept_, atol=1e-6)
