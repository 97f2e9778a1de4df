"""What a run leaves behind. Saved as JSON and npz: NumPy alone reads it back."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import read_arrays, write_arrays, write_atomically
from fedbilevel.errors import CheckpointError

__all__ = ["Result", "to_plain"]

_ABOUT, _COLUMNS, _POINT = "result.json", "columns.npz", "point.npz"


@dataclass(frozen=True)
class Result:
    """Columns per measured round, the final point, costs, and where it all came from.

    `columns` has one entry per measured round, `round` among them, and the `exchanges`
    with clients, `bytes` sent and `samples` drawn in all until then; `point` the leaves
    of x and y by name; `final` the last value of every column; `counts` the exact
    costs; `seconds` compiling apart from running; `config` and `versions` what to
    repeat it with; `ended` why there were no more rounds.
    """

    task: str
    algorithm: str
    config: dict[str, Any]
    versions: dict[str, str]
    columns: dict[str, np.ndarray]
    point: dict[str, np.ndarray]
    final: dict[str, Any]
    counts: dict[str, Any]
    seconds: dict[str, float]
    ended: str = ""

    def summary(self) -> dict[str, Any]:
        """Return the run as one JSON object."""
        names = ("task", "algorithm", "config", "final", "counts", "seconds", "ended")
        return {name: to_plain(getattr(self, name)) for name in names}

    def save(self, folder: Path | str) -> Path:
        """Write the result into a folder, each file atomically."""
        place = Path(folder)
        about = {**self.summary(), "versions": self.versions}
        text = json.dumps(about, indent=2, allow_nan=False) + "\n"
        write_arrays(place / _COLUMNS, self.columns)
        write_arrays(place / _POINT, self.point)
        write_atomically(place / _ABOUT, lambda file: file.write(text.encode()))
        return place

    @staticmethod
    def load(folder: Path | str) -> "Result":
        """Read a saved result."""
        place = Path(folder)
        if not (place / _ABOUT).exists():
            raise CheckpointError(
                f"{place} holds no {_ABOUT}: the run has not finished, or this is not "
                "a run folder. `fedbilevel resume` finishes an interrupted run."
            )
        about = json.loads((place / _ABOUT).read_text())
        columns, point = read_arrays(place / _COLUMNS), read_arrays(place / _POINT)
        return Result(**about, columns=columns, point=point)


def to_plain(value: Any) -> Any:
    """Turn numbers of any kind into JSON's; what JSON cannot write becomes null."""
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's and JAX's
        return to_plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
