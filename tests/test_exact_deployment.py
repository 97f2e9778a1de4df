"""Deployed, the exact method gives the model of pooled rows, masked or not."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fedbilevel.datasets.encoding import read_preparation
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.tasks._folds import strengths
from tests.federation import Loopback
from tests.test_weights_at_sites import at_site, folder  # noqa: F401

TERMS = Terms(patience=1, deadline=60.0)
NAMES = ("North", "South", "West")


def deployed(folder, run, sites, **more):  # noqa: F811
    run.mkdir()
    made = read_preparation(str(folder / "preparation.json"))
    server = Experiment("regularization", clients=3, **more)
    return serve(Loopback(sites), server, run, TERMS, preparation=made)


@pytest.fixture
def sites(folder):  # noqa: F811
    return {k: build_site(at_site(folder, name), k) for k, name in enumerate(NAMES)}


@pytest.mark.slow
def test_the_deployed_model_is_that_of_pooled_rows(folder, sites):  # noqa: F811
    result = deployed(folder, folder / "run", sites)
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
    (job,) = (one.work.job for one in list(sites.values())[:1])
    width = np.sqrt(each[list(job.problem.lower.model.columns)])
    pooled = LogisticRegression(C=1 / len(a), tol=1e-12, max_iter=10_000)
    pooled.fit(a[:, :-1] / width, label)
    last = np.asarray(result.y)[-1, 0]
    np.testing.assert_allclose(last[:-1], pooled.coef_[0] / width, atol=1e-6)
    np.testing.assert_allclose(last[-1:], pooled.intercept_, atol=1e-6)
