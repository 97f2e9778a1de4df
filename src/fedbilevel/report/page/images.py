"""Images in a page: as PNG, in the page itself."""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbilevel.report.page.grid import escaped

__all__ = ["Image", "images_as_html"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GRAY, _COLORS = 0, 2  # kinds of PNG


@dataclass(frozen=True)
class Image:
    """Pixels in bytes, (height, width) or (height, width, 3), and what is below."""

    pixels: np.ndarray
    caption: str

    def as_png(self) -> bytes:
        """Return the image as a file, the same for the same pixels."""
        height, width = self.pixels.shape[:2]
        kind = _GRAY if self.pixels.ndim == 2 else _COLORS
        head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
        # Every line begins with the filter that was used: none.
        lines = b"".join(b"\0" + line.tobytes() for line in self.pixels)
        data = zlib.compress(lines, 9)
        parts = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
        return _SIGNATURE + b"".join(_chunk(*part) for part in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    check = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)


def images_as_html(images: Sequence[Image]) -> str:
    """Return images side by side, in as many lines as there is room for."""
    made = "".join(map(_figure, images))
    return f'<div class="images">{made}</div>' if images else ""


def _figure(one: Image) -> str:
    address = "data:image/png;base64," + base64.b64encode(one.as_png()).decode()
    caption = escaped(one.caption)
    return (
        f'<figure><img src="{address}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
