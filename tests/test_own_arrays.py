"""Own rows in arrays are treated as in tables; folders in new folders are made."""

import numpy as np
import pytest

from fedbilevel._files import make_private_folder, write_atomically
from fedbilevel.experiments import Experiment
from fedbilevel.models import Model
from fedbilevel.runtime.client_files import ClientFiles
from fedbilevel.tasks import _rows


def folder_of(path, features):
    path.mkdir()
    np.save(path / "features.npy", features)
    np.save(path / "label.npy", (np.arange(len(features)) % 3).astype(np.int32))
    return path


def test_rows_of_numbers_are_prepared_by_column_and_others_are_not(tmp_path):
    draw = np.random.default_rng(0)
    features = draw.normal(2.0, 3.0, size=(40, 5))
    pool = _rows.load(str(folder_of(tmp_path / "flat", features)), 0, 0, {})
    made = pool.held.preparation
    assert made is not None
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    np.testing.assert_allclose(made.scale(features), scaled, atol=1e-12)
    # A model takes columns; of images of numbers it would not know the shape.
    images = draw.normal(size=(40, 4, 4))
    pool = _rows.load(str(folder_of(tmp_path / "deep", images)), 0, 0, {})
    assert pool.held.preparation is None


@pytest.mark.slow
def test_a_run_on_a_folder_of_arrays_leaves_a_model(tmp_path):
    features = np.random.default_rng(0).normal(size=(60, 5))
    features += 3 * np.eye(5)[np.arange(60) % 3]
    place = folder_of(tmp_path / "arrays", features)
    options = {"data": str(place)}
    chosen = {"clients": 2, "rounds": 2, "batch": 4, "options": options}
    Experiment("regularization", "fedbio-controls", **chosen).run(tmp_path / "run")
    guessed = Model.load(tmp_path / "run").predict(features)
    assert len(guessed) == 60


NESTED = {
    "file": lambda path: write_atomically(path / "file", b"all"),
    "private": make_private_folder,
    "clients": lambda path: ClientFiles(path, {"own": np.zeros(2)}, 3).close(),
}


@pytest.mark.parametrize("kind", NESTED)
def test_a_folder_in_new_folders_is_made(kind, tmp_path):
    for _ in range(2):  # and one that is there stays
        NESTED[kind](tmp_path / "new" / "nested" / "folder")
    assert (tmp_path / "new" / "nested" / "folder").is_dir()
