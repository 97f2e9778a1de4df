"""Deployed, the exact method gives the model of pooled rows, masked or not."""

from typing import Any

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


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["mean", "secure"])
def test_the_deployed_model_is_that_of_pooled_rows(folder, aggregate):  # noqa: F811
    sites = {
        client: build_site(at_site(folder, name, aggregate=aggregate), client)
        for client, name in enumerate(NAMES)
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
    width = np.sqrt(each[list(lower.model.columns)])
    pooled = LogisticRegression(C=1 / len(a), tol=1e-12, max_iter=10_000)
    pooled.fit(a[:, :-1] / width, label)
    last = np.asarray(result.y)[-1, 0]
    np.testing.assert_allclose(last[:-1], pooled.coef_[0] / width, atol=1e-6)
    np.testing.assert_allclose(last[-1:], pooled.intercept_, atol=1e-6)
