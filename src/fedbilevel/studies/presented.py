"""The findings of a comparison: a frame, a LaTeX table, a figure, a page.

The drawing and the tables are those of `fedbilevel compare`; they need extras.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import write_atomically
from fedbilevel._folders import check_file
from fedbilevel.errors import CheckpointError, DivergedError, needed
from fedbilevel.result import Result, as_html, short
from fedbilevel.saved import Saved, read_saved
from fedbilevel.standings import cost_said, default_target, ranking, tuning_said
from fedbilevel.studies.budgets import TRIALS
from fedbilevel.studies.tuning import Tuned

_EXTRA = "tables, figures and pages need more packages: install fedbilevel[report]."


@dataclass(frozen=True, repr=False)
class Comparison:
    """Results of several algorithms, by name.

    `results` has one per seed for each algorithm, `diverged` where others failed, and
    `tuned` what came of tuning. A lower `headline` is better. With `equal` "samples",
    "bytes" or "seconds" algorithms are ranked at what all of them took.
    """

    headline: str
    results: dict[str, list[Result]] = field(default_factory=dict)
    diverged: dict[str, DivergedError] = field(default_factory=dict)
    tuned: dict[str, Tuned] = field(default_factory=dict)
    equal: str = TRIALS

    @staticmethod
    def load(folder: Path | str) -> "Comparison":
        """Read a finished comparison from its folder; what was tuned stays there."""
        saved = read_saved(folder)
        if not saved.compared or saved.unfinished:
            why = saved.unfinished or "It is one run, which `Result.load` reads."
            raise CheckpointError(f"{folder} holds no finished comparison. {why}")
        failed = {name: DivergedError(text) for name, text in saved.diverged.items()}
        results = {name: list(many) for name, many in saved.results.items()}
        return Comparison(saved.headline, results, failed, equal=saved.equal)

    def __repr__(self) -> str:
        """Rank what was compared, best first."""
        places = self._places()
        width = max((len(name) for name, _ in places), default=0)
        lines = (f"\n  {name:<{width}}  {text}" for name, text in places)
        return f"{self._heading()}:{''.join(lines)}"

    def _repr_html_(self) -> str:
        return as_html(self._heading(), self._places())

    def to_pandas(self) -> Any:
        """Return all columns as one frame: a row per algorithm, seed and round."""
        frames = []
        for name, many in self.results.items():
            for result in many:
                frame = result.to_pandas()
                frame.insert(0, "algorithm", name)
                frame.insert(1, "seed", result.config.get("seed"))
                frames.append(frame)
        pandas = needed("pandas", "frames are made by pandas: install it.")
        return pandas.concat(frames, ignore_index=True)

    def to_latex(self, target: float | None = None) -> str:
        """Return the ranking as a LaTeX table; costs are those of reaching `target`.

        Without one it is the best end plus a tenth of its distance to the worst
        beginning, here as in `plot` and `report`.
        """
        needed("rich", _EXTRA)
        from fedbilevel.report.page.sections import ranking_grid, standings_of

        saved = self._saved(target)
        return ranking_grid(saved, *standings_of(saved)).as_latex()

    def plot(self, target: float | None = None) -> Any:
        """Return matplotlib's figure of the headline, a panel for each kind of cost."""
        needed("rich", _EXTRA)
        from fedbilevel.report.drawing import curves_figure

        shown = (self.results, self.headline)
        aim = default_target(*shown) if target is None else target
        return curves_figure(*shown, aim)

    def report(self, path: Path | str, target: float | None = None) -> Path:
        """Write the page of `fedbilevel report` to a file, and return its path."""
        needed("rich", _EXTRA)
        from fedbilevel.report.page import write_page

        place = Path(path)
        check_file(place)
        write_atomically(place, write_page(self._saved(target)))
        return place

    def _heading(self) -> str:
        seeds = max(map(len, self.results.values()), default=0)
        mean = f", mean of {seeds} seeds" if seeds > 1 else ""
        at = f" {cost_said(self.results, self.equal)}".rstrip()
        return f"Comparison by {self.headline}{at}{mean}, lower is better"

    def _places(self) -> list[tuple[str, str]]:
        """Return what each came to, the lowest first, then what diverged."""
        places = []
        for one in ranking(self.results, self.headline, np.nan, self.equal):
            tuned = tuning_said(self.results[one.algorithm][0].config.get("tuning"))
            text = short(one.mean) + (f" (tuned in {tuned})" if tuned else "")
            places.append((one.algorithm, text))
        failed = [(name, f"diverged: {why}") for name, why in self.diverged.items()]
        return [*places, *failed]

    def _saved(self, target: float | None) -> Saved:
        """Return what a folder of the same results would hold."""
        failed = {name: str(error) for name, error in self.diverged.items()}
        about = {"target": target, "equal": self.equal, "diverged": failed}
        return Saved("comparison", self.results, self.headline, compared=True, **about)
