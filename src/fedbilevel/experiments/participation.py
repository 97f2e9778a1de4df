"""How often the clients of a simulation reply, as a command or a file says it."""

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbilevel._files import naming_damage
from fedbilevel._schema import Settings
from fedbilevel._table_choices import listed_names
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.runtime import Sampling
from fedbilevel.tasks import Task


def read_participation(given: Any) -> str | None:
    """Return chances as one line, 0.9,0.5 or north=0.9,south=0.5; None stays None.

    They may be in such a line, in a file, or numbers in a list or by the names of
    sites.
    """
    if isinstance(given, str | Path) and _is_file(given):
        path, given = given, _of_file(Path(given))
        if given is None:
            raise InvalidInputError(f"{path} holds no chances, but null.")
    if isinstance(given, int | float):
        given = str(given)
    if given is None or isinstance(given, str | Path):
        line = None if given is None else str(given)
    elif isinstance(given, Mapping):
        line = _line(f"{name}={chance}" for name, chance in given.items())
    else:
        line = _line(map(str, given))
    if line is not None:
        _pairs(line)  # or why not
    return line


def drawn(experiment: Settings, task: Task, sampling: Sampling) -> Sampling:
    """Return a sampling with the participants and chances of an experiment."""
    chances = _chances(experiment, task)
    return replace(
        sampling, participants=experiment.participants, participation=chances
    )


def _chances(experiment: Settings, task: Task) -> float | tuple[float, ...] | None:
    """Return the chance of every client to reply; None where all do."""
    if not 0 <= experiment.dropout < 1:
        raise InvalidInputError(
            f"--dropout {experiment.dropout:g}: must be at least 0 and below 1."
        )
    stays = 1 - experiment.dropout
    if experiment.participation is None:
        return stays if experiment.dropout else None
    pairs = _pairs(experiment.participation)
    named = {name: chance for name, chance in pairs if name}
    if not named:
        every = tuple(stays * chance for _, chance in pairs)
        return every[0] if len(every) == 1 else every
    for name in named:
        if name not in task.names:
            raise unknown_name("site in --participation", name, task.names)
    missing = [name for name in task.names if name not in named]
    if missing or len(named) < len(pairs):
        raise InvalidInputError(
            f"--participation gives {len(named)} of {len(task.names)} sites a chance "
            f"by name. Give {missing[0] if missing else 'every site'} one, too."
        )
    return tuple(stays * named[name] for name in task.names)


def _is_file(given: str | Path) -> bool:
    try:
        return Path(given).is_file()
    except (OSError, ValueError):  # a line of many chances is too long for a name
        return False


def _of_file(path: Path) -> Any:
    """Read a list or an object of JSON, or CSV: a column of chances, or names, too."""
    with naming_damage(path):
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            return json.loads(text)
        rows = [
            row for row in csv.reader(io.StringIO(text), skipinitialspace=True) if row
        ]
        if rows and not _is_number(rows[0][-1]):
            rows = rows[1:]  # the names of the columns
        alone = len(rows) == 1 and all(map(_is_number, rows[0]))
        return _line(rows[0] if alone else map("=".join, rows))


def _line(items: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(items)
    return text.getvalue()


def _pairs(line: str) -> list[tuple[str, float]]:
    """Return the chances of a line, each with the name of its site, if it has one."""
    items = [one.rpartition("=") for one in listed_names(line)]
    if not items or not all(_is_number(chance) for *_, chance in items):
        raise InvalidInputError(
            f"--participation {line:.80}: there is no such file. Give a CSV or JSON "
            "file with a chance for each site, or write 0.9,0.5 or north=0.9,south=0.5."
        )
    return [(name.strip(), float(chance)) for name, _, chance in items]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
