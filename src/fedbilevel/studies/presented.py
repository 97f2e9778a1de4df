"""A comparison for people: as a frame, a LaTeX table, a figure, and a page.

The drawing and the tables are those of `fedbilevel compare`; they need extras.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import write_atomically
from fedbilevel._folders import check_file
from fedbilevel.errors import needed
from fedbilevel.result import Result, as_html, short
from fedbilevel.saved import Saved
from fedbilevel.standings import cost_said, default_target, ranking, tuning_said

_EXTRA = "tables, figures and pages need more packages: install fedbilevel[report]."


class Presented:
    """Views of results by name, one for each seed."""

    headline: str
    results: dict[str, list[Result]]
    diverged: Any
    equal: str

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
        results: Mapping[str, Sequence[Result]] = self.results
        failed = {name: str(error) for name, error in self.diverged.items()}
        about = {"target": target, "equal": self.equal, "diverged": failed}
        return Saved("comparison", results, self.headline, compared=True, **about)
