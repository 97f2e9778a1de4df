"""Output of commands."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.cli.console import Console

if TYPE_CHECKING:
    from fedbilevel.result import Result
    from fedbilevel.tasks import Task


def show_data(task: "Task") -> None:
    """Print on stderr each client's rows, and the preparation of a table's columns."""
    if task.origin is None:
        return
    from fedbilevel.report import holdings_notes, holdings_table

    console, held = Console(stderr=True), task.origin.summary
    for number, line in enumerate(holdings_notes(held)):
        console.print(line, markup=False, highlight=False)
        if number == 0 and held["own"]:
            console.print(holdings_table(held))


def show_result(result: "Result", folder: Path | None, as_json: bool) -> None:
    """Print what a run found, why it ended, and what it cost; write its report."""
    from fedbilevel.cli.reporting import write_report

    if folder is not None:
        write_report(folder)
    if as_json:
        print_json(result.summary())
        return
    from fedbilevel.report import cost_table, quality_tables, result_table

    console, named = Console(), {result.algorithm: result}
    if result.quality:
        console.print(result.quality["sentence"], markup=False, highlight=False)
        for table in quality_tables(result.quality):
            console.print(table)
    console.print(result_table(named))
    console.print(cost_table(named))
    for event in result.events:
        console.print(f"Note: {event}.", markup=False, highlight=False)
    if result.ended:
        console.print(f"Ended {result.ended}.", markup=False, highlight=False)
    if folder is not None:
        console.print(f"Saved in {folder}")


def print_json(summary: dict[str, Any]) -> None:
    """Print one JSON object."""
    from fedbilevel.result import to_plain

    print(json.dumps(to_plain(summary), allow_nan=False))
