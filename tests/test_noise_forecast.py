"""What noise leaves of a run, said before it, and refused where that is nothing."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.clients import require_signal
from fedbilevel.runtime import Ledger
from fedbilevel.runtime.privacy import noise_forecast

NOISY = Experiment(
    "quadratic", "fedbio", clients=4, rounds=9, clip=1.0, noise=1.0, safeguard=False
)


def forecast(experiment):
    built = experiment.build()
    job = built.job()
    return job, noise_forecast(job, built.rounds)


def test_the_ratio_is_that_of_the_largest_block():
    job, found = forecast(NOISY)
    size = max(np.size(job.x), np.size(job.y))
    assert found is not None and found.size == size
    assert found.each == pytest.approx(4 / math.sqrt(size))
    assert found.whole == pytest.approx(found.each * math.sqrt(found.exchanges))
    assert found.exchanges == int(Ledger(job).summary(job.key, 9)["exchanges"])
    assert forecast(replace(NOISY, noise=0.0, clip=None))[1] is None


def test_noise_of_the_mean_is_as_large_as_is_forecast():
    """Of clients that send nothing, what arrives is the noise alone."""
    job, found = forecast(NOISY)
    assert found is not None
    privacy = job.channel.privacy
    assert privacy is not None
    keys = jr.split(jr.key(0), (500, found.participants))
    nothing = jnp.zeros(found.size)
    sent = jax.vmap(jax.vmap(lambda key: privacy.encode(nothing, None, key)[0]))(keys)
    noise = np.sqrt(np.mean(np.sum(np.mean(sent, axis=1) ** 2, axis=1)))
    assert float(privacy.clip) / noise == pytest.approx(found.each, rel=0.03)


def test_a_run_whose_noise_hides_everything_needs_force():
    hopeless, said = replace(NOISY, noise=100.0), []
    with pytest.raises(InvalidInputError, match="hides whatever.*at most.*--force"):
        hopeless.run()
    job, _ = forecast(hopeless)
    require_signal(replace(hopeless, force=True), job, 9, said.append)
    assert said[0].startswith("Noise: the signal of 4 sites is at most 0.0")
