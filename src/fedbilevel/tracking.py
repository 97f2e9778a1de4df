"""Writes every measured round where experiments are tracked.

A tracker is an `on_round` callback:

    with tracker("jsonl:rounds.jsonl") as track:
        run(..., on_round=track)

`jsonl:FILE` is a text file with one JSON object per round, in order. The others need a
further package, and write into a folder; nothing is sent anywhere:
`tensorboard:FOLDER`, `mlflow:FOLDER`, `wandb:FOLDER` (offline).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedbilevel._folders import check_place
from fedbilevel.errors import CheckpointError, InvalidInputError, needed, unknown_name
from fedbilevel.runtime import Event, OnRound

_LARGEST = 2**30  # bytes of a file of lines that is continued
_NAME = re.compile(r"[^A-Za-z0-9_\-./ ]")  # characters that no tracker takes in a name


def check_tracking(text: str, *, resume: bool = False) -> None:
    """Raise unless a tracker can be started, before anything is computed."""
    kind, place = _read(text)
    if place.exists() and kind == "jsonl" and not resume:
        raise CheckpointError(
            f"{place} exists: the rounds of two runs would be mixed. Choose another "
            "file, or remove it."
        )
    check_place(place.parent if kind == "jsonl" else place)
    if kind in _PACKAGES:
        _imported(kind)


def from_anywhere(text: str) -> str:
    """Return KIND:PLACE for a process that is in another folder."""
    kind, place = _read(text)
    return f"{kind}:{place.resolve()}"


@contextmanager
def tracker(
    text: str, *, about: Mapping[str, Any] | None = None, resume: bool = False
) -> Iterator[OnRound]:
    """Open what KIND:PLACE names; yield the callback that writes a round.

    `about` are names and numbers to file the run under. With `resume` a file of lines
    continues where the run does: rounds that it made again replace those of the file.
    """
    check_tracking(text, resume=resume)
    kind, place = _read(text)
    known = {"resume": resume} if kind == "jsonl" else {"about": dict(about or {})}
    with _KINDS[kind](place, **known) as write:
        yield write


def _read(text: str) -> tuple[str, Path]:
    kind, colon, place = text.partition(":")
    if kind not in _KINDS:
        raise unknown_name("tracker", kind, _KINDS)
    if not (colon and place):
        raise InvalidInputError(f"{text}: write {kind}:PLACE, the file or folder.")
    return kind, Path(place).expanduser()


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {n: v if math.isfinite(v) else None for n, v in values.items()}


@contextmanager
def _json_lines(place: Path, resume: bool) -> Iterator[OnRound]:
    """Append a line for each round."""
    place.parent.mkdir(parents=True, exist_ok=True)
    begun: list[bool] = []
    with place.open("a", encoding="utf-8") as file:

        def write(event: Event) -> None:
            if resume and not begun:
                file.truncate(_end_before(place, event.round))
            begun.append(True)
            line = {
                "round": event.round,
                "rounds": event.rounds,
                "seconds": event.seconds,
                **_finite(event.values),
            }
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()

        yield write


def _end_before(place: Path, number: int) -> int:
    """Return where a file has to be cut so that it ends before a round."""
    if place.stat().st_size > _LARGEST:
        raise CheckpointError(f"{place} is too large to be continued.")
    length = 0
    for line in place.read_bytes().splitlines(keepends=True):
        try:
            held = json.loads(line)["round"] if line.endswith(b"\n") else number
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(
                f"{place} holds lines that are not those of a run. Choose another file."
            ) from None
        if not isinstance(held, int) or held >= number:
            break
        length += len(line)
    return length


@contextmanager
def _tensorboard(place: Path, about: Mapping[str, Any]) -> Iterator[OnRound]:
    with closing(_imported("tensorboard").SummaryWriter(str(place))) as writer:
        writer.add_text("about", json.dumps(about, default=str))

        def write(event: Event) -> None:
            for name, value in event.values.items():
                writer.add_scalar(name, value, event.round)

        yield write


@contextmanager
def _mlflow(place: Path, about: Mapping[str, Any]) -> Iterator[OnRound]:
    mlflow = _imported("mlflow")
    place.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{place.resolve() / 'mlflow.db'}")
    mlflow.set_experiment("fedbilevel")
    with mlflow.start_run():
        mlflow.log_params({_plain(n): str(v)[:500] for n, v in about.items()})

        def write(event: Event) -> None:
            values = {_plain(n): v for n, v in _finite(event.values).items()}
            known = {n: v for n, v in values.items() if v is not None}
            mlflow.log_metrics(known, step=event.round)

        yield write


@contextmanager
def _wandb(place: Path, about: Mapping[str, Any]) -> Iterator[OnRound]:
    wandb = _imported("wandb")
    place.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project="fedbilevel", dir=str(place), mode="offline", config=dict(about)
    )
    try:
        yield lambda event: run.log(dict(event.values), step=event.round)
    finally:
        run.finish()


def _plain(name: str) -> str:
    return _NAME.sub("_", name)


def _imported(kind: str) -> Any:
    what, package = _PACKAGES[kind]
    return needed(
        package,
        f"{what} is written by the package {package}, which is not installed: `pip "
        f"install {package}`, or track into a file, jsonl:FILE, which needs none.",
    )


_PACKAGES = {
    "tensorboard": ("TensorBoard", "tensorboardX"),
    "mlflow": ("MLflow", "mlflow"),
    "wandb": ("Weights & Biases", "wandb"),
}
_KINDS: dict[str, Any] = {
    "jsonl": _json_lines,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
