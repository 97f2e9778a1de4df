"""Rows that stay in files give the same runs, and only drawn ones are read."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import ClientData, Keeping, Problem, Sampling, run
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem.stored_rows import Source, stored
from fedbilevel.runtime import Job, count

pytestmark = pytest.mark.two_devices

PARTS = [np.arange(0, 30), np.arange(30, 75), np.arange(75, 80)]


def _loss(x, y, rows):
    error = rows["image"].astype(y.dtype) @ y / 255 - rows["target"]
    return jnp.mean(error**2) + jnp.sum(jnp.exp(x) * y**2)


PROBLEM = Problem(_loss, _loss)


@pytest.fixture
def images(tmp_path):
    draw = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", draw.integers(0, 256, (80, 6), dtype=np.uint8))
    return np.load(tmp_path / "images.npy", mmap_mode="r")


def _data(images, in_file: bool) -> ClientData:
    target = np.random.default_rng(1).standard_normal(80)
    pixels = stored(images, PARTS) if in_file else [images[part] for part in PARTS]
    rows = [
        {"image": one, "target": target[part]}
        for one, part in zip(pixels, PARTS, strict=True)
    ]
    return ClientData.from_clients(rows, rows)


def _algorithm() -> LocalBSGVRM:
    rule = Neumann(q=2, theta=0.1)
    return LocalBSGVRM(
        rule, eta=1.0, alpha=0.2, beta=0.2, rho1=0.1, rho2=0.1, local_steps=2
    )


def _start():
    return jnp.zeros(6), jnp.zeros(6)


@pytest.mark.slow
def test_stored_rows_give_the_same_run(images):
    options: Any = {"rounds": 3, "sampling": Sampling(4, participants=2)}
    plain, from_file = (
        run(PROBLEM, _data(images, kind), _start(), _algorithm(), **options)
        for kind in (False, True)
    )
    # Two programs, which XLA may fuse differently around rows that come from outside.
    for name, leaf in plain.point.items():
        np.testing.assert_allclose(leaf, from_file.point[name], rtol=1e-14)
    for name, column in plain.columns.items():
        np.testing.assert_allclose(column, from_file.columns[name], rtol=1e-14)
    assert plain.counts == from_file.counts


def test_only_drawn_rows_are_read(images, monkeypatch):
    read = []
    plain = Source.read

    def watched(self, numbers):
        read.append(np.asarray(numbers).size)
        return plain(self, numbers)

    data = _data(images, True)
    drawing = Sampling(4)
    job = Job.of(_algorithm(), PROBLEM, data, *_start(), sampling=drawing)
    monkeypatch.setattr(Source, "read", watched)
    options: Any = {"rounds": 8, "sampling": drawing, "measure_every": 8}
    run(PROBLEM, data, _start(), _algorithm(), **options)
    drawn = sum(count(job, 8)["samples"].values())
    # The checks before and the one measurement look at all rows of both levels.
    assert drawn <= sum(read) <= drawn + 4 * 2 * 3 * 45


@pytest.mark.slow
def test_a_changed_file_is_another_configuration(images, tmp_path):
    kept = tmp_path / "run"
    options: Any = {"rounds": 2, "sampling": Sampling(4), "keeping": Keeping(kept)}
    run(PROBLEM, _data(images, True), _start(), _algorithm(), **options)
    changed = np.array(images)
    changed[0] += 1
    np.save(tmp_path / "images.npy", changed)
    again = np.load(tmp_path / "images.npy", mmap_mode="r")
    with pytest.raises(Exception, match="another configuration"):
        options["keeping"] = Keeping(kept, resume=True)
        run(PROBLEM, _data(again, True), _start(), _algorithm(), **options)
