"""Contents of run folders: finished runs, unfinished ones, comparisons."""

import csv
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel import _folders
from fedbilevel._files import naming_damage, read_arrays
from fedbilevel._text import without_apostrophe
from fedbilevel.errors import CheckpointError
from fedbilevel.result import Result

_SUSPICIOUS, _PICTURES = "suspicious.csv", "suspicious.npz"
_MOST_PICTURES, _LARGEST_PICTURE = 24, 96  # their number, and the pixels of a side
_LARGEST = 2**28  # bytes of a file that is read whole
_MOST_ROWS = 1_000_000
_DEEPEST = 3  # folders below each other in which runs are looked for


@dataclass(frozen=True)
class Saved:
    """A folder's results by name, one for each seed; and what else it holds.

    `headline` names the column that decides, and `target` the value of it whose cost is
    reported. `equal` says at what equal cost they are ranked. `settings` are those that
    the command line wrote. `diverged` says of algorithms where they failed.
    `unfinished` says what is missing, if anything is. `suspicious` are rows by their
    weights, the smallest first; `pictures` images of some of them, each with its row;
    `features` the names of what the model's columns became.
    """

    name: str
    results: Mapping[str, Sequence[Result]]
    headline: str
    compared: bool = False
    target: float | None = None
    equal: str = "trials"
    settings: Mapping[str, Any] = field(default_factory=dict)
    diverged: Mapping[str, str] = field(default_factory=dict)
    unfinished: str = ""
    suspicious: Sequence[Mapping[str, str]] = ()
    features: Sequence[str] = ()
    pictures: Sequence[tuple[Mapping[str, str], np.ndarray]] = ()

    @property
    def every(self) -> list[Result]:
        """All results, one after the other."""
        return [result for many in self.results.values() for result in many]


def is_saved(folder: Path) -> bool:
    """Say whether a folder looks like that of a run or a comparison."""
    marks = (_folders.RESULT, _folders.COMPARISON)
    marks += (_folders.COMPARED, _folders.EXPERIMENT)
    return any((folder / mark).is_file() for mark in marks) or _is_comparison(folder)


def find_saved(folder: Path) -> dict[str, Path]:
    """Return the folders of runs in this one, by their paths from here.

    Links are not followed: what is found lies in the folder.
    """
    if is_saved(folder):
        return {folder.resolve().name: folder}
    found: dict[str, Path] = {}
    for here, inside, _ in os.walk(folder):
        looked_at = sorted(one for one in inside if _can_be_read(Path(here, one)))
        inside.clear()  # those to be looked into are added again
        for one in looked_at:
            path = Path(here, one)
            name = path.relative_to(folder)
            if is_saved(path):
                found[name.as_posix()] = path
            elif len(name.parts) < _DEEPEST:
                inside.append(one)
    return dict(sorted(found.items()))


def _can_be_read(folder: Path) -> bool:
    """Say whether a folder can be named and looked into, and is no link or hidden."""
    with suppress(UnicodeEncodeError):
        folder.name.encode()
        own = not folder.is_symlink() and not folder.name.startswith(".")
        return own and os.access(folder, os.R_OK | os.X_OK)
    return False


def read_saved(folder: Path | str) -> Saved:
    """Read all there is, or say in a sentence why there is nothing."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give that of a run.")
    if (folder / _folders.COMPARISON).is_file() or _is_comparison(folder):
        return _comparison(folder)
    if (folder / _folders.RESULT).is_file():
        result = _result(folder)
        settings = _json(folder / _folders.EXPERIMENT)
        rows = _suspicious(folder / _SUSPICIOUS)
        return Saved(
            folder.resolve().name,
            {result.algorithm: [result]},
            _headline(result),
            settings=settings,
            suspicious=sorted(rows, key=lambda row: float(row["weight"])),
            features=_features(folder / _folders.MODEL) or _recorded_features(result),
            pictures=_pictures(folder / _PICTURES, rows),
        )
    if (folder / _folders.EXPERIMENT).is_file():
        return _unfinished(folder)
    raise CheckpointError(
        f"{folder} holds no {_folders.RESULT}, {_folders.COMPARISON} or "
        f"{_folders.EXPERIMENT}: it is not the folder of a run or a comparison."
    )


def _is_comparison(folder: Path) -> bool:
    return next(folder.glob(f"*/seed-*/{_folders.RESULT}"), None) is not None


def _comparison(folder: Path) -> Saved:
    results: dict[str, list[Result]] = {}
    for path in sorted(folder.glob(f"*/seed-*/{_folders.RESULT}"), key=_by_seed):
        results.setdefault(path.parent.parent.name, []).append(_result(path.parent))
    if not results:
        raise CheckpointError(
            f"{folder}: no algorithm of this comparison has finished yet. The same "
            "command with --resume continues it."
        )
    about = _json(folder / _folders.COMPARED)
    first = next(iter(results.values()))[0]
    missing = "" if about else "Not all of its algorithms have finished."
    headline = str(about.get("metric") or _headline(first))
    if any(headline not in one.columns for many in results.values() for one in many):
        raise CheckpointError(f"{folder}: not every result has a column {headline}.")
    target = about.get("target")
    with naming_damage(folder / _folders.COMPARED):
        diverged = dict(about.get("diverged") or {})
    return Saved(
        folder.resolve().name,
        results,
        headline,
        compared=True,
        target=float(target) if isinstance(target, int | float) else None,
        equal=str(about.get("equal") or "trials"),
        settings=_json(folder / _folders.COMPARISON),
        diverged={str(name): str(why) for name, why in diverged.items()},
        unfinished=missing,
        features=_recorded_features(first),
    )


def _by_seed(path: Path) -> tuple[str, int, str]:
    seed = path.parent.name.removeprefix("seed-")
    return path.parent.parent.name, int(seed) if seed.isdecimal() else 0, seed


def _unfinished(folder: Path) -> Saved:
    """Return the columns that the checkpoint of a run has, which has no costs yet."""
    settings = _json(folder / _folders.EXPERIMENT)
    path = folder / _folders.CHECKPOINT
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: the run has begun, but there is no checkpoint yet."
        )
    with naming_damage(path):
        arrays = read_arrays(_unpacks_small(path))
        about = json.loads(arrays["about"].tobytes())
        columns = {
            name.removeprefix("column/"): column
            for name, column in arrays.items()
            if name.startswith("column/")
        }
        seconds = {name: float(value) for name, value in about["seconds"].items()}
        done = int(about["round"])
    _check_columns(columns, path)
    task, algorithm = (str(settings.get(n) or "") for n in ("task", "algorithm"))
    final = {name: float(column[-1]) for name, column in columns.items()}
    name = algorithm or "the task's own algorithm"
    result = Result(
        task, name, dict(settings), {}, columns, {}, final, {}, seconds, ended=""
    )
    missing = f"Not finished: its checkpoint was written after round {done}."
    headline = _headline(result)
    about = {"settings": settings, "unfinished": missing}
    return Saved(folder.resolve().name, {name: [result]}, headline, **about)


def _headline(result: Result) -> str:
    """Return the column that decides: the one that is named, or else a loss."""
    costs = {"round", "exchanges", "bytes", "samples"}
    named = [str(result.config.get("headline")), "upper_loss", *result.columns]
    found = [n for n in named if n in result.columns and n not in costs]
    if not found:
        raise CheckpointError("the columns of a run are damaged: they are costs alone.")
    return found[0]


def _result(folder: Path) -> Result:
    with naming_damage(folder / _folders.RESULT):
        _small(folder / _folders.RESULT)
        _json(folder / _folders.QUALITY)  # or the name of the file that is damaged
        for name in (_folders.COLUMNS, _folders.POINT, _folders.LAST):
            if name != _folders.LAST or (folder / name).exists():
                _unpacks_small(folder / name)
        result = Result.load(folder, with_model=False)
        kinds = (result.config, result.final, result.counts, result.seconds)
        kinds += (result.start,)
        if not all(isinstance(one, dict) for one in kinds):
            raise TypeError("settings, costs, seconds or start are no objects")
        if not isinstance(result.algorithm, str) or not isinstance(result.task, str):
            raise TypeError("task and algorithm are no names")
        float(result.seconds["run"])
        np.asarray(list(result.start.values()), float)
    if result.quality:
        with naming_damage(folder / _folders.QUALITY):
            _check_quality(result.quality)
    _check_columns(result.columns, folder / _folders.COLUMNS)
    return result


def _check_quality(quality: Any) -> None:
    """Raise unless it holds what pages show of it, each of the right kind."""
    texts = [quality["sentence"], quality["metric"], *quality["warnings"]]
    counts, found = [quality["rows"]], []
    for one in quality["models"]:
        texts += [one["name"], one["kind"]]
        found.append(one["metrics"])
    for one in quality["sites"]:
        texts += [one["name"], one["note"]]
        counts += [one["rows"], one["held"]]
        found += one["metrics"].values()
    triples = [three for one in found for three in one.values() if three is not None]
    if not all(set(one) == set(found[0]) and quality["metric"] in one for one in found):
        raise KeyError("not every model has the same metrics")
    for one in (quality["calibration"] or {"bins": ()})["bins"]:
        triples.append([one["predicted"], one["observed"], one["rows"]])
        triples.append([*one["interval"], 0])
    right = all(isinstance(text, str) for text in texts)
    right = right and all(isinstance(count, int) for count in counts)
    if not right or any(len(three) != 3 for three in triples):
        raise TypeError("its metrics are no numbers with intervals")
    np.asarray(triples, float)


def _check_columns(columns: Mapping[str, np.ndarray], path: Path) -> None:
    """Raise unless there is at least one measurement of numbers, by rounds."""
    shapes = {column.shape for column in columns.values()}
    numbers = all(column.dtype.kind in "iufb" for column in columns.values())
    right = len(shapes) == 1 and len(next(iter(shapes))) == 1 and numbers
    right = right and bool(np.isfinite(columns.get("round", np.nan)).all())
    if not right or len(columns) < 2:
        raise CheckpointError(f"{path} is damaged: its columns are not measurements.")
    if not len(columns["round"]):
        raise CheckpointError(f"{path}: no round was measured yet.")


def _small(path: Path) -> Path:
    if path.stat().st_size > _LARGEST:
        raise CheckpointError(f"{path} is too large: above {_LARGEST:,} bytes.")
    return path


def _unpacks_small(path: Path) -> Path:
    """Return the path of an archive that does not grow when it is read."""
    with zipfile.ZipFile(_small(path)) as archive:
        if sum(one.file_size for one in archive.infolist()) > _LARGEST:
            raise CheckpointError(f"{path} unpacks to more than {_LARGEST:,} bytes.")
    return path


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    with naming_damage(path):
        found = json.loads(_small(path).read_text())
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object.")
    return found


def _suspicious(path: Path) -> list[dict[str, str]]:
    """Return the rows of a cleaning run; none where there is no file."""
    if not path.is_file():
        return []
    with naming_damage(path), _small(path).open(newline="") as file:
        rows = [
            {str(name): without_apostrophe(str(cell)) for name, cell in row.items()}
            for row in islice(csv.DictReader(file), _MOST_ROWS)
        ]
        for row in rows:
            float(row["weight"])
    return rows


def _pictures(
    path: Path, rows: Sequence[dict[str, str]]
) -> list[tuple[dict[str, str], np.ndarray]]:
    """Return the images of the first rows of a file, each with its row."""
    if not path.is_file():
        return []
    with naming_damage(path):
        images = read_arrays(_unpacks_small(path))["pictures"]
    sides, channels = images.shape[1:3], images.shape[3:]
    small = len(sides) == 2 and all(1 <= side <= _LARGEST_PICTURE for side in sides)
    right = small and images.dtype == np.uint8 and channels in ((), (3,))
    if not right or len(images) > min(_MOST_PICTURES, len(rows)):
        raise CheckpointError(f"{path} is damaged: it holds no pictures of rows.")
    return list(zip(rows, images, strict=False))


def _features(path: Path) -> list[str]:
    """Return the names of features: one for numbers, for texts one of each value."""
    about = _json(path).get("preparation")
    with naming_damage(path):
        columns = about["columns"] if about else ()
        return _names((str(one["name"]), one.get("values")) for one in columns)


def _recorded_features(result: Result) -> list[str]:
    """Return the same of a run without a model, as it recorded its table."""
    given = result.config.get("data")
    about = given if isinstance(given, dict) else {}
    learned, encoded = about.get("learned"), about.get("encoded")
    columns = map(str, learned if isinstance(learned, list) else ())
    held = encoded if isinstance(encoded, dict) else {}
    lists = {name: one for name, one in held.items() if isinstance(one, list)}
    return _names((name, lists.get(name)) for name in columns)


def _names(columns: Iterable[tuple[str, Any]]) -> list[str]:
    names: list[str] = []
    for name, values in columns:
        names += [name] if values is None else [f"{name}={one}" for one in values]
    return names
