"""Which classes each client holds, as a table and as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedbilevel.report._picture import as_png, new_figure
from fedbilevel.report.tables import show

__all__ = ["draw_label_counts", "label_counts_table"]

_MOST_COLUMNS = 12
_MOST_NAMED = 20
_MOST_NUMBERED = 100
_TALLEST = 24.0  # inches


def label_counts_table(
    counts: np.ndarray,
    class_names: Sequence[str],
    title: str = "Rows by class",
    client_names: Sequence[str] = (),
) -> Table:
    """Return the rows per client and class, with totals; clients may have names.

    Where the classes are too many for a terminal, it says how many a client holds.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("site" if client_names else "client")
    names = client_names or [str(client) for client in range(len(counts))]
    if len(class_names) > _MOST_COLUMNS:
        headings = ("classes held", "rows of the largest")
        cells = np.stack([(counts > 0).sum(axis=1), counts.max(axis=1)], axis=1)
        everyone = counts.sum(axis=0)
        last = [(everyone > 0).sum(), everyone.max()]
    else:
        headings = [escape(name) for name in class_names]
        cells, last = counts, counts.sum(axis=0)
    for heading in (*headings, "rows"):
        table.add_column(heading, justify="right")
    for name, row, size in zip(names, cells, counts.sum(axis=1), strict=True):
        table.add_row(escape(name), *(show(int(cell)) for cell in (*row, size)))
    table.add_section()
    table.add_row("all", *(show(int(cell)) for cell in (*last, counts.sum())))
    return table


def draw_label_counts(
    levels: Mapping[str, np.ndarray],
    class_names: Sequence[str],
    client_names: Sequence[str] = (),
) -> bytes:
    """Return a PNG with a panel for each level: a bar per client, stacked by class.

    More classes than a legend can tell apart are colored along a scale.
    """
    clients, classes = next(iter(levels.values())).shape
    figure = new_figure(10, min(1.2 + 0.16 * max(clients, 10), _TALLEST))
    import matplotlib
    from matplotlib.patches import Patch

    scale = "tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo"
    colors = matplotlib.colormaps[scale].resampled(classes)(range(classes))
    panels = figure.subplots(1, len(levels), sharey=True, squeeze=False)[0]
    for panel, (name, counts) in zip(panels, levels.items(), strict=True):
        _draw_bars(panel, counts, colors)
        panel.set_title(name)
    panels[0].set_ylabel("site" if client_names else "client")
    panels[0].set_ylim(clients - 0.4, -0.6)
    ticks = range(0, clients, 1 + (clients - 1) // _MOST_NUMBERED)
    names = [client_names[tick] for tick in ticks] if client_names else None
    panels[0].set_yticks(ticks, names)
    if classes <= _MOST_NAMED:
        handles = [Patch(color=color) for color in colors]
        figure.legend(handles, class_names, loc="outside right upper", frameon=False)
    else:
        figure.suptitle(f"{classes} classes")
    return as_png(figure)


def _draw_bars(panel: Any, counts: np.ndarray, colors: np.ndarray) -> None:
    from matplotlib.collections import PolyCollection

    # One collection of bars: thousands of single ones take seconds to draw.
    corners, shades = list(_corners(counts)), colors[np.nonzero(counts)[1]]
    panel.add_collection(PolyCollection(corners, facecolors=shades))
    panel.set_xlim(0, 1.05 * max(counts.sum(axis=1).max(), 1))
    panel.tick_params(axis="y", labelsize=7)
    panel.set_xlabel("rows")
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def _corners(counts: np.ndarray) -> np.ndarray:
    """Return the corners of the bar of each client and class with rows."""
    client, number = np.nonzero(counts)
    right = np.cumsum(counts, axis=1)[client, number]
    left = right - counts[client, number]
    top, bottom = client - 0.4, client + 0.4
    along = np.stack([left, right, right, left], axis=1)
    down = np.stack([top, top, bottom, bottom], axis=1)
    return np.stack([along, down], axis=2)
