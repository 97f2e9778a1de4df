"""What the files of a run folder are called, and how a run that is in one goes on."""

import shlex
from pathlib import Path

__all__ = [
    "CHECKPOINT",
    "COLUMNS",
    "COMPARISON",
    "EXPERIMENT",
    "FEDERATION",
    "MODEL",
    "POINT",
    "RESULT",
    "WEIGHTS",
    "how_to_continue",
]

RESULT, COLUMNS, POINT = "result.json", "columns.npz", "point.npz"
MODEL, WEIGHTS = "model.json", "model.safetensors"
CHECKPOINT = "checkpoint.npz"
EXPERIMENT = "experiment.json"  # of `fedbilevel run`
FEDERATION = "federation.json"  # of `fedbilevel serve` and `federate`
COMPARISON = "settings.json"  # of `fedbilevel compare`


def how_to_continue(folder: Path) -> str:
    """Say how the run in a folder goes on, or nothing where there is none.

    What a command began, a command continues; what was begun in Python is made of
    objects that no command can build again.
    """
    if (folder / FEDERATION).exists():
        return "Continue it with the command that began it."
    if (folder / EXPERIMENT).exists():
        return f"Continue it with `fedbilevel resume {shlex.quote(str(folder))}`."
    if (folder / COMPARISON).exists():
        return "Continue it with the command that began it and --resume."
    if (folder / CHECKPOINT).exists() or any(folder.glob(f"*/{CHECKPOINT}")):
        return (
            "It was begun in Python. Continue it there, with the same call and "
            f"`keeping=Keeping({str(folder)!r}, resume=True)`."
        )
    return ""
