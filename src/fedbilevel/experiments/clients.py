"""Clients of an experiment: their weights, how often they reply, and their channel.

Weights are by the rows of sites, alike, or as given. The objective on a data set is the
mean over all of its rows, so its sites count by their rows. Where a task has no such
rows, a closed form for one, the mean is that of the paper, 1/K. Clip, noise and robust
reductions count sites in what they promise.

A channel is what replies go through, as the command line and experiments write it.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fedbilevel import channels, tasks
from fedbilevel._files import naming_damage
from fedbilevel._schema import WEIGHTS, Settings
from fedbilevel._table_choices import listed_names
from fedbilevel.datasets import Preparation
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.experiments.built import weighing
from fedbilevel.runtime import Job, Sampling
from fedbilevel.runtime.privacy import noise_forecast
from fedbilevel.tasks import Task
from fedbilevel.tasks._rows import untested

Weights = tuple[float, ...] | None  # None leaves those of the task's data
Chosen = TypeVar("Chosen", bound=Settings)
_MOST_LISTED = 10  # sites in a sentence
QUANTILE = "quantile"
CHANNEL = ("clip", "noise", "compress", "compress_down", "aggregate")

Part = TypeVar("Part", channels.AbstractCoder, channels.AbstractReduction)
# A name's class, an example, and the reader of its number, if it has one.
Known = Mapping[str, tuple[Callable[..., Part], str, Callable[[str], Any] | None]]

_COMPRESSIONS: Known[channels.AbstractCoder] = {
    "topk": (channels.TopK, "topk:0.1", float),
    "quantize": (channels.Quantize, "quantize:8", int),
    "bfloat16": (channels.BFloat16, "bfloat16", None),
}
# The server sends a point, of which no entry may be missing.
_COMPRESSIONS_DOWN: Known[channels.AbstractCoder] = {
    "bfloat16": _COMPRESSIONS["bfloat16"]
}
_REDUCTIONS: Known[channels.AbstractReduction] = {
    "mean": (channels.Mean, "mean", None),
    "median": (channels.Median, "median", None),
    "trimmed-mean": (channels.TrimmedMean, "trimmed-mean:0.1", float),
    "geometric-median": (channels.GeometricMedian, "geometric-median", None),
    "krum": (channels.Krum, "krum:1", int),
    "secure": (channels.SecureMean, "secure", None),
}


def read_weights(given: Any) -> tuple[float, ...] | str | None:
    """Return weights as a run has them; none, in folders of before, were the task's."""
    if isinstance(given, str) and given not in WEIGHTS:
        raise unknown_name("value of weights", given, WEIGHTS)
    if given is None or isinstance(given, str):
        return given
    return tuple(given) or "task"


def rows_of(task: Task) -> tuple[int, ...] | None:
    """Return how many rows each client has; None where clients do not count by rows."""
    if task.origin is None or not task.origin.by_rows:
        return None
    return tuple(
        site.get("rows", site["training"] + site["validation"])
        for site in task.origin.summary["sites"]
    )


def weighed(experiment: Settings, task: Task) -> Task:
    """Return a task whose clients count as an experiment says; its summary says how."""
    weights, words = decided(experiment, rows_of(task), task.data.clients)
    if weights is not None:
        task = weighing(task, weights)
    if task.origin is None or not words or task.data.clients == 1:
        return task
    known = task.origin.summary
    summary = {**known, "remarks": [*known["remarks"], words]}
    return replace(task, origin=replace(task.origin, summary=summary))


def decided(
    experiment: Settings, rows: Sequence[int] | None, clients: int
) -> tuple[Weights, str]:
    """Return what so many clients with so many rows count, and how to say it."""
    chosen, alike = experiment.weights, "sites count alike"
    if isinstance(chosen, tuple):
        whose = "by their rows: " if rows is not None and chosen == tuple(rows) else ""
        return chosen, f"sites count {whose}{listed(chosen)}"
    if chosen == "task" or (chosen is None and rows is None):
        return None, alike
    if chosen == "equal":
        return (1.0,) * clients, alike
    if rows is None:
        raise InvalidInputError(
            f"--weights rows: task '{tasks.label(experiment.task)}' has no rows of a "
            "data set that its clients could count by. Leave it out, or give a number "
            "for each client."
        )
    why = _counts_sites(experiment)
    if why and chosen is None:
        return None, f"{alike}: {why}"
    if why and channel_of(experiment).privacy is None:
        raise InvalidInputError(f"--weights rows: {why}. Leave one of them out.")
    if len(set(rows)) == 1:
        return None, f"sites count by their rows: {rows[0]} each"
    return tuple(map(float, rows)), f"sites count by their rows: {listed(rows)}"


def counted(experiment: Chosen, preparation: Preparation | None) -> tuple[Chosen, str]:
    """Return an experiment of sites with what they count, and how to say it.

    Their rows are those that the preparation has, on which all agreed beforehand, less
    those that each puts aside for testing: what a site says of itself while a run goes
    on counts for nothing.
    """
    clients, held = experiment.clients or 0, preparation.sites if preparation else ()
    rows = tuple(map(untested, held)) if len(held) == clients else None
    if rows is None and experiment.weights == "rows":
        raise InvalidInputError(
            f"--weights rows: no preparation says how many rows each of {clients} "
            "sites has. Give --preparation, made by `fedbilevel prepare` of the sums "
            "of all sites in their order, or give a number for each site."
        )
    weights, words = decided(experiment, rows, clients)
    if experiment.weights is None and rows is None and preparation:
        why = f"counts the rows of {len(held)}, not of {clients}"
        words += f": the preparation {why if held else 'counts no rows'}"
    return replace(experiment, weights=weights or agreed(experiment)), words


def agreed(experiment: Settings) -> tuple[float, ...] | str:
    """Return the weights of sites; without counted rows, those of the task."""
    chosen = experiment.weights
    return "task" if chosen in (None, "rows") else chosen


def _counts_sites(experiment: Settings) -> str:
    """Say why sites count alike in what messages go through; nothing if by weight."""
    channel = channel_of(experiment)
    if channel.privacy is not None:
        return "clip and noise protect sites of equal weight"
    if not isinstance(channel.reduction, channels.Mean):
        return f"--aggregate {experiment.aggregate} withstands faulty sites by number"
    return ""


def listed(numbers: Sequence[float]) -> str:
    """Return what sites count, as text, and the range of many."""
    shown = ", ".join(f"{one:.12g}" for one in numbers[:_MOST_LISTED])
    if len(numbers) <= _MOST_LISTED:
        return shown
    least, most = min(numbers), max(numbers)
    return f"{shown}, ... ({len(numbers)} sites, {least:.12g} to {most:.12g})"


def read_participation(given: Any) -> str | None:
    """Return chances as one line, 0.9,0.5 or north=0.9,south=0.5; None stays None.

    They may be in such a line, in a file, or numbers in a list or by the names of
    sites.
    """
    if given is None:
        return None
    if isinstance(given, str | Path) and _is_file(given):
        path, given = given, _of_file(Path(given))
        if given is None:
            raise InvalidInputError(f"{path} holds no chances, but null.")
    if isinstance(given, Mapping):
        given = [f"{name}={chance}" for name, chance in given.items()]
    alone = isinstance(given, str | Path | int | float)
    line = str(given) if alone else _line(map(str, given))
    _pairs(line)  # or why not
    return line


def drawn(experiment: Settings, task: Task, sampling: Sampling) -> Sampling:
    """Return a sampling with the participants and chances of an experiment."""
    some, chances = experiment.participants, _chances(experiment, task)
    return replace(sampling, participants=some, participation=chances)


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


def read_quantile(clip: float | str | None) -> float | None:
    """Return the quantile that changes are cut to; None where no text asks for one."""
    name, colon, share = str(clip).partition(":")
    if name != QUANTILE:
        return None
    try:
        quantile = float(share) if colon else 0.5
    except ValueError:
        quantile = math.nan
    if not 0 < quantile < 1:
        raise InvalidInputError(
            f"clip='{clip}': write it like {QUANTILE}:0.9, with a share between 0 and "
            "1 of the changes that are not to be cut."
        )
    return quantile


def as_clip(given: Any) -> Any:
    """Return a number that comes as text, from a command line, as a number."""
    try:
        return float(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _bound(clip: float | str) -> float:
    try:
        return float(clip)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"clip='{clip}' is neither a number, the norm that every block of a change "
            f"is cut down to, nor {QUANTILE} or {QUANTILE}:SHARE."
        ) from None


def channel_of(settings: Settings) -> channels.Channel:
    """Return what the replies of a run go through."""
    given = {name: getattr(settings, name) for name in CHANNEL}
    return read_channel(**given, delta=settings.delta)


def read_channel(
    clip: float | str | None = None,
    noise: float = 0.0,
    compress: str | None = None,
    aggregate: str = Settings.aggregate,
    delta: float = Settings.delta,
    compress_down: str | None = None,
) -> channels.Channel:
    """Read a channel.

    `clip` is a number, or quantile:SHARE, which is no part of the channel but of the
    algorithm, and checked alone. `compress` is topk:FRACTION, quantize:BITS or
    bfloat16, and `compress_down` bfloat16; `aggregate` is mean, secure, median,
    trimmed-mean:FRACTION, geometric-median or krum:FAULTY.
    """
    coders: list[channels.AbstractCoder] = []
    quantile = read_quantile(clip)
    if quantile is not None:
        _check_alone(clip, noise, compress)
    elif clip is not None:
        coders.append(channels.Privacy(_bound(clip), noise, delta=delta))
    elif noise:
        raise InvalidInputError(
            f"noise={noise:g} without a clip protects no one: a change may be of any "
            "size. Give clip, the norm that every block of a change is cut down to."
        )
    if compress is not None:
        coders.append(_part("compress", compress, _COMPRESSIONS))
    down: Any = None
    if compress_down is not None:
        down = _part("compress_down", compress_down, _COMPRESSIONS_DOWN)
    return channels.Channel(
        tuple(coders), _part("aggregate", aggregate, _REDUCTIONS), down
    )


def _check_alone(clip: float | str | None, noise: float, compress: str | None) -> None:
    """Raise for what does not go with a running quantile."""
    if noise:
        raise InvalidInputError(
            f"clip={clip} and noise={noise:g}: a bound that follows the norms of the "
            "changes reveals them, and no epsilon counts that. Give clip as a number."
        )
    if compress is not None:
        raise InvalidInputError(
            f"clip={clip} and compress={compress}: what clients report of their norms "
            "would be thinned out or rounded with the rest. Leave out one of the two."
        )


def _part(option: str, text: str, known: Known[Part]) -> Part:
    name, colon, number = text.partition(":")
    if name not in known:
        raise unknown_name(f"value of {option}", name, known)
    make, example, convert = known[name]
    try:
        values = [] if convert is None else [convert(number)]
    except ValueError:
        values = None
    if values is None or (colon and not values):
        raise InvalidInputError(f"{option}='{text}': write it like {example}.")
    return make(*values)


def require_signal(
    settings: Settings, job: Job, rounds: int, say: Callable[[str], None]
) -> None:
    """Say what noise leaves of a run; raise where that is nothing, if not forced."""
    found = noise_forecast(job, rounds)
    if found is None:
        return
    if found.whole < 1 and not settings.force:
        raise InvalidInputError(
            f"--noise {settings.noise:g} hides whatever the sites find: {found}. Let "
            "more sites take part, train fewer parameters, ask for less noise or for "
            "more --rounds, or give --force."
        )
    say(f"Noise: {found}.")
