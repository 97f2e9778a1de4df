"""Pictures by matplotlib and Pillow, which are needed only where one is drawn."""

import base64
import io
from typing import Any

import numpy as np

from fedbilevel.errors import FedbilevelError

__all__ = ["as_png", "new_figure", "png_address"]


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


def png_address(pixels: np.ndarray) -> str:
    """Return an image as an address that holds it; the same for the same pixels.

    Pixels are bytes, (height, width) or (height, width, 3).
    """
    try:
        from PIL import Image
    except ImportError:
        raise FedbilevelError(
            "images are written by Pillow: install fedbilevel[report]."
        ) from None
    picture = io.BytesIO()
    Image.fromarray(pixels).save(picture, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
