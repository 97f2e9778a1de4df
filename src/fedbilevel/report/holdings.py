"""Who holds what before a run, and what was done to the columns of a table."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedbilevel.report.tables import show

__all__ = ["holdings_notes", "holdings_table"]

_MOST_SITES = 20
_MOST_CLASSES = 8


def holdings_table(summary: Mapping[str, Any]) -> Table:
    """Return the rows for training and validation, and the classes, of each site."""
    sites = summary["sites"]
    table = Table()
    table.add_column("site" if summary["site_column"] else "client")
    table.add_column("training", justify="right")
    table.add_column("validation", justify="right")
    classes = list(sites[0]["classes"])
    few = 0 < len(classes) <= _MOST_CLASSES
    for name in classes if few else ["classes"] if classes else []:
        table.add_column(escape(name), justify="right")
    for site in sites[:_MOST_SITES]:
        counts = [site["classes"][name] for name in classes]
        held = [sum(count > 0 for count in counts)] if classes else []
        cells = [site["training"], site["validation"], *(counts if few else held)]
        table.add_row(escape(site["name"]), *(show(cell) for cell in cells))
    if len(sites) > _MOST_SITES:
        table.caption = f"and {len(sites) - _MOST_SITES} more"
    return table


def holdings_notes(summary: Mapping[str, Any]) -> list[str]:
    """Say what was encoded, left out, filled, dropped or changed, a line for each."""
    predicted = f", label '{summary['label']}'" if "label" in summary else ""
    told = f"{summary['rows']} rows and {summary['tested']} for testing{predicted}"
    lines = [f"{summary['source']}: {told}."] if summary["own"] else []
    if "layout" in summary:
        lines.append(f"Images were understood as {summary['layout']}.")
    if summary.get("numbers"):
        lines.append(f"Numbers: {', '.join(summary['numbers'])}.")
    for name, values in summary.get("encoded", {}).items():
        lines.append(f"Text '{name}' became 0 and 1 for each of {', '.join(values)}.")
    for name, why in summary.get("left_out", {}).items():
        lines.append(f"Not learned from: '{name}' ({why}).")
    for name, count in summary.get("filled", {}).items():
        lines.append(f"Filled in: {count} missing values of '{name}'.")
    if summary.get("dropped_rows"):
        lines.append(f"Dropped: {summary['dropped_rows']} rows with missing values.")
    return [*lines, *(f"{one[0].upper()}{one[1:]}." for one in summary["remarks"])]
