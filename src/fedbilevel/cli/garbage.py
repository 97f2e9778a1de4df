"""When Python looks for garbage: seldom while a command starts, then as usual.

Imports and traced programs are many objects that stay. By the usual 700 new ones
before a look, a command with all programs compiled spent a fifth of its time on looking
through them. What works on long messages leaves some in circles, which must go: a node
that seldom looked held ten lengths of a message in the place of five.
"""

import gc

__all__ = ["look_as_usual", "look_seldom"]

_USUAL = gc.get_threshold()
_SELDOM = (50_000, 20, 100)  # new objects before a look, and how often for older ones


def look_seldom() -> None:
    """Begin a command: hardly anything of what it makes will be garbage."""
    gc.set_threshold(*_SELDOM)


def look_as_usual() -> None:
    """Go on with rounds or messages, once all is set up."""
    gc.set_threshold(*_USUAL)
