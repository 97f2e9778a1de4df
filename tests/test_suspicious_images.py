"""Cleaning of images: the list names their files, and the page shows their pixels."""

import base64
import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbilevel import tasks
from fedbilevel._files import write_arrays
from fedbilevel.cli.output import write_report
from fedbilevel.errors import CheckpointError
from fedbilevel.experiments import Experiment
from fedbilevel.saved import read_saved
from fedbilevel.tasks.cleaning import suspicious_rows
from tests.browser import needs_chromium, opened
from tests.reports import Read, made_up, save_run


def image_of(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return an image that is like no other, darker in one class."""
    draw = np.random.default_rng(number)
    return draw.integers(0, 128 + 127 * (number % 2), shape, dtype=np.uint8)


def write_images(folder: Path, count: int, shape: tuple[int, ...]) -> str:
    for number in range(count):
        place = folder / ("north", "south")[number // 2 % 2] / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image_of(number, shape)).save(place / f"{number:03d}.png")
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of a run on images in colors, of two sites."""
    home = tmp_path_factory.mktemp("images")
    data = write_images(home / "scans", 64, (6, 5, 3))
    options = {"data": data}
    own = Experiment("cleaning", "fedbio", rounds=2, options=options)
    own.run(home / "run")
    write_report(home / "run")
    return home / "run"


def test_folders_of_sites_are_the_clients(tmp_path):
    data = write_images(tmp_path / "scans", 64, (6, 5))
    task = tasks.find("cleaning")(data=data)
    assert task.names == ("north", "south")
    rows = suspicious_rows(task, {"x": np.zeros(task.data.lower["label"].shape)}).rows
    assert {(row[2], Path(row[0]).parts[-3]) for row in rows} == {
        ("north", "north"),
        ("south", "south"),
    }
    # Who asks for a number of clients has it, and is told.
    asked = tasks.find("cleaning")(4, data=data)
    assert asked.data.clients == 4 and asked.names == ()
    assert "folders of sites are not the clients" in asked.origin.summary["remarks"][-1]


def listed_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "suspicious.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def number_of(row: dict[str, str]) -> int:
    return int(Path(row["file"]).stem)


@pytest.mark.slow
def test_the_list_has_the_file_of_every_image(folder):
    rows = listed_in(folder)
    assert 30 < len(rows) < 64  # three fifths train
    for row in rows:
        with Image.open(row["file"]) as image:
            expected = image_of(number_of(row), (6, 5, 3))
            np.testing.assert_array_equal(np.asarray(image), expected)
        site, label, _ = Path(row["file"]).parts[-3:]
        assert (row["site"], row["label"]) == (site, label)
    assert len({row["file"] for row in rows}) == len(rows)


@pytest.mark.slow
def test_the_page_shows_the_pixels_of_the_first_rows(folder):
    page = Read(page=(folder / "report.html").read_text())
    shown = [about for tag, about in page.elements if tag == "img"]
    rows = listed_in(folder)
    assert len(shown) == 24
    for about, row in zip(shown, rows, strict=False):
        kind, _, data = str(about["src"]).partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data)), formats=["PNG"]) as image:
            expected = image_of(number_of(row), (6, 5, 3))
            np.testing.assert_array_equal(np.asarray(image), expected)
        told = str(about["alt"])
        assert f"{number_of(row):03d}.png" in told and told.startswith(row["label"])
        assert f"weight {float(row['weight']):.3g}" in told


@pytest.mark.slow
def test_large_images_are_shown_small_and_whole(tmp_path):
    data = write_images(tmp_path / "scans", 16, (300, 150))
    task = tasks.find("cleaning")(1, data=data)
    x = np.zeros(task.data.lower["label"].shape)
    pictures = suspicious_rows(task, {"x": x}).pictures
    assert pictures is not None and pictures.dtype == np.uint8
    assert pictures.shape[1:] == (96, 48)
    # As bright as the image: nothing is cut off.
    first = Path(suspicious_rows(task, {"x": x}).rows[0][0])
    whole = image_of(int(first.stem), (300, 150)).mean()
    assert pictures[0].mean() == pytest.approx(whole, abs=0.5)


def test_rows_of_a_table_have_no_pictures_and_no_file_of_their_own(tmp_path):
    table = tmp_path / "a.csv"
    lines = [f"{k % 7},img{k % 9}.png,{'xy'[k % 2]}" for k in range(40)]
    table.write_text("\n".join(["a,image,label", *lines]))
    task = tasks.find("cleaning")(2, data=str(table))
    listed = suspicious_rows(task, {"x": np.zeros(task.data.lower["label"].shape)})
    assert listed.pictures is None
    assert {row[0] for row in listed.rows} == {str(table)}


@pytest.mark.parametrize(
    "pictures",
    [
        np.zeros((2, 4, 4)),
        np.zeros((2, 4, 4, 2), np.uint8),
        np.zeros((2, 4), np.uint8),
        np.zeros((2, 97, 4), np.uint8),
        np.zeros((2, 0, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((25, 4, 4), np.uint8),
    ],
    ids=["float", "channels", "flat", "large", "empty", "more than rows", "many"],
)
def test_pictures_of_others_are_refused(pictures, tmp_path):
    rows = 3 if len(pictures) < 25 else 30
    lines = "".join(f"a,{k},{k / 40}\n" for k in range(rows))
    (tmp_path / "suspicious.csv").write_text(f"file,row,weight\n{lines}")
    write_arrays(tmp_path / "suspicious.npz", {"pictures": pictures})
    save_run(tmp_path, made_up("one"))
    with pytest.raises(CheckpointError, match="suspicious.npz is damaged"):
        read_saved(tmp_path)


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_them_and_nothing_overflows(folder):
    with opened() as page:
        page.open((folder / "report.html").as_uri(), width=400)
        page.wait_for("document.documentElement.dataset.drawn === 'yes'")
        assert page.complaints == []
        size = (
            "[...document.images].map(i => [i.naturalWidth, i.naturalHeight, i.width])"
        )
        shown = page.evaluate(size)
        assert len(shown) == 24 and all(one[:2] == [5, 6] for one in shown)
        assert all(80 <= width <= 200 for _, _, width in shown)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
