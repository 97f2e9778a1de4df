"""Pictures by matplotlib, which is needed only where one is drawn."""

import io
from typing import Any

from fedbilevel.errors import FedbilevelError

__all__ = ["as_png", "new_figure"]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FedbilevelError(
            "pictures are drawn by matplotlib: install fedbilevel[report]."
        ) from None
    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def as_png(figure: Any) -> bytes:
    """Return the figure as the content of a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
