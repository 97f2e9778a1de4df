"""Sites with rows that can be told from other bytes, and how to find them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import read_arrays
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Site

_DIGITS = re.compile(rb"(?=(\d\.\d{7}))")


class Planted:
    """Numbers to look for: as 8 bytes, as neighbors of 4 bytes, and as digits.

    A number of 4 bytes alone may be there by chance; two that belong together are not.
    """

    def __init__(self, tables: Iterable[np.ndarray]) -> None:
        binary, self.text = [], set()
        for table in tables:
            values = np.asarray(table, np.float64)
            values = values.reshape(len(values), -1)
            drawn = values[values % 1 != 0]
            # The last digit before the point and 7 after it, as the pattern has them.
            self.text |= {f"{value:.9f}"[-11:-2].encode() for value in drawn}
            for order in "<>":
                binary.append(drawn.astype(f"{order}f8").tobytes())
                binary += [_pairs(grid, order) for grid in (values, values.T)]
        self.binary = np.frombuffer(b"".join(binary), np.uint64)

    def found_in(self, content: bytes) -> int:
        """Return how many places look like one of them."""
        places = sum(digits in self.text for digits in _DIGITS.findall(content))
        for start in range(8):
            whole = (len(content) - start) // 8
            if whole > 0:
                words = np.frombuffer(content, np.uint64, whole, start)
                places += int(np.isin(words, self.binary).sum())
        return places

    def found_below(self, folder: Path) -> int:
        """Return how many places there are in all files of a folder."""
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files
        return sum(self.found_in(path.read_bytes()) for path in files)


def _pairs(grid: np.ndarray, order: str) -> bytes:
    drawn = (grid[:, :-1] % 1 != 0) & (grid[:, 1:] % 1 != 0)
    both = np.stack([grid[:, :-1][drawn], grid[:, 1:][drawn]], axis=1)
    return both.astype(f"{order}f4").tobytes()


def plant(folder: Path, client: int) -> tuple[str, np.ndarray]:
    """Write the rows of a site, one as arrays, the other as text; return both."""
    draw = np.random.default_rng(client)
    features = draw.normal(size=(30, 3))
    label = np.where(features[:, 0] > 0, "ill", "well")
    folder = folder / f"rows{client}"
    folder.mkdir(parents=True)
    if client == 0:
        np.save(folder / "features.npy", features)
        np.save(folder / "label.npy", label)
        return str(folder), features
    lines = ["a,b,c,label"]
    for row, one in zip(features.tolist(), label, strict=True):
        lines.append(",".join([*map(repr, row), str(one)]))
    (folder / "rows.csv").write_text("\n".join(lines))
    return str(folder / "rows.csv"), features


def settings(task: str, **options: str) -> Experiment:
    return Experiment(
        task,
        "fedbio",
        clients=2,
        rounds=2,
        local_steps=3,
        batch=4,
        precision="float64",
        options=options,
    )


def sites_with_rows(
    folder: Path, task: str, **options: str
) -> tuple[list[Site], Planted]:
    """Return two sites, and their rows: as stored, and as the losses see them."""
    sites, tables = [], []
    for client in range(2):
        data, features = plant(folder, client)
        site = build_site(
            settings(task, data=data, **options),
            client,
            folder=folder / "state" / str(client),
        )
        tested: Any = site.work.job.metrics
        levels = (site.work.job.data.upper, site.work.job.data.lower)
        seen = [level["features"][0] for level in levels]
        tables += [features, *seen, tested.features]
        sites.append(site)
    return sites, Planted(tables)


def shared_values(folder: Path) -> Planted:
    """Return what does travel: a search that does not find it proves nothing."""
    point = read_arrays(folder / "point.npz")
    return Planted([leaf for name, leaf in point.items() if name.startswith("y")])


def assert_plain_arrays(folder: Path) -> None:
    files = list(folder.rglob("*.npz"))
    assert files
    for file in files:
        assert all(array.dtype.kind in "biuf" for array in read_arrays(file).values())
