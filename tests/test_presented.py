"""A comparison as a frame, a LaTeX table, a figure and a page, from made-up results."""

import numpy as np
import pytest

from fedbilevel.errors import CheckpointError, DivergedError
from fedbilevel.studies import Comparison
from tests.reports import made_up


@pytest.fixture
def compared():
    results = {
        name: [made_up(name, seed) for seed in (3, 4)] for name in ("fedbio", "simfbo")
    }
    return Comparison("upper_loss", results, {"broken": DivergedError("in round 2")})


def test_a_frame_has_a_row_for_algorithm_seed_and_round(compared):
    pytest.importorskip("pandas")
    frame = compared.to_pandas()
    assert len(frame) == 2 * 2 * 12
    one = frame[(frame.algorithm == "simfbo") & (frame.seed == 4)]
    expected = compared.results["simfbo"][1].columns["upper_loss"]
    np.testing.assert_array_equal(one.upper_loss, expected)


def test_a_latex_table_ranks_all(compared):
    lines = compared.to_latex().splitlines()
    rows = [line for line in lines if line.rstrip().endswith(r"\\")]
    means = {
        name: np.mean([one.columns["upper_loss"][-1] for one in many])
        for name, many in compared.results.items()
    }
    best, worst = sorted(means, key=lambda name: means[name])
    assert len(rows) == 3 and best in rows[1] and worst in rows[2]


def test_a_figure_has_a_curve_for_each(compared):
    panel = compared.plot(target=1.5).axes[0]
    assert {line.get_label() for line in panel.lines} >= {"fedbio", "simfbo"}
    assert any(np.allclose(line.get_ydata(), 1.5) for line in panel.lines)


def test_a_page_is_one_file_and_a_folder_is_refused(compared, tmp_path):
    written = compared.report(tmp_path / "page.html")
    text = written.read_text()
    assert "2 algorithms compared on numbers" in text and "in round 2" in text
    with pytest.raises(CheckpointError, match="is a folder"):
        compared.report(tmp_path)
