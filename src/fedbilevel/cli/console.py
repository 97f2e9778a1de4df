"""The terminal: whatever is printed may hold names that files and peers chose."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from fedbilevel._text import for_terminal


class Console(rich.console.Console):
    """Prints text as text: a column may be named by an escape sequence.

    Styles and cursors are Rich's own; they are added to what is rendered here.
    """

    def render(self, *given: Any, **options: Any) -> Iterable[Segment]:
        """Render something, with control characters spelled out."""
        for one in super().render(*given, **options):
            harmless = one.control or one.text.isprintable()
            yield one if harmless else one._replace(text=for_terminal(one.text))
