"""What commands print and write."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from fedbilevel.result import Result

__all__ = ["print_json", "show_result", "write_json", "write_picture"]


def show_result(result: "Result", folder: Path | None, as_json: bool) -> None:
    """Print what a run found, why it ended, and what it cost."""
    if as_json:
        print_json(result.summary())
        return
    from fedbilevel.report import cost_table, result_table

    console, named = Console(), {result.algorithm: result}
    console.print(result_table(named))
    console.print(cost_table(named))
    if result.ended:
        console.print(f"Ended {result.ended}.", markup=False, highlight=False)
    if folder is not None:
        console.print(f"Saved in {folder}")


def print_json(summary: dict[str, Any]) -> None:
    """Print one JSON object."""
    from fedbilevel.result import to_plain

    print(json.dumps(to_plain(summary), allow_nan=False))


def write_json(path: Path, summary: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    from fedbilevel._files import write_atomically
    from fedbilevel.result import to_plain

    text = json.dumps(to_plain(summary), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_picture(path: Path, picture: bytes) -> None:
    """Write a picture atomically."""
    from fedbilevel._files import write_atomically

    write_atomically(path, lambda file: file.write(picture))
