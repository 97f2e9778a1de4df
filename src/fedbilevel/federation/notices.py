"""How a site takes notices: the server does not take it, or the federation is over.

A notice is a packet like others, sealed and numbered, so that nobody else can end a
node, nor with an old one. It needs no answer, and changes nothing that a site keeps.
"""

import time
from collections.abc import Callable

from fedbilevel.federation.foreign import shown
from fedbilevel.federation.site import Site
from fedbilevel.federation.wire import (
    NOTICE,
    Carried,
    Header,
    RefusedError,
    refusal_of,
    unpack,
)

_MARK = b'"kind":"notice"'
_LARGEST = 1 << 13  # bytes; whatever is longer is no notice, and not looked at twice
_AGAIN = 60.0  # seconds after which the same is said again


class Sparing:
    """Says a thing once, and again only after a while."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say, self.clock = say, clock
        self._said: dict[str, float] = {}

    def __call__(self, text: str) -> None:
        """Say something, unless it was said just now."""
        now = self.clock()
        self._said = {one: at for one, at in self._said.items() if now - at < _AGAIN}
        if text not in self._said:
            self._said[text] = now
            self.say(text)


class Attentive:
    """A site that heeds notices; `is_over` once its federation is."""

    def __init__(self, site: Site) -> None:
        self.site, self.is_over = site, False

    def handle(self, packet: Carried) -> bytes:
        """Answer a packet; of a notice, tell the operator what it says."""
        whole = not isinstance(packet, RefusedError)
        if whole and len(packet) <= _LARGEST and _MARK in packet:
            try:
                header, _, _ = unpack(packet, _LARGEST, self.site.seal)
                if header.kind == NOTICE:
                    self._heed(header)
                    return b""
            except Exception as error:  # whatever it holds, it ends no node
                self.site.report(f"notice refused: {refusal_of(error)}")
                return b""
        return self.site.handle(packet)

    def _heed(self, header: Header) -> None:
        self._check(header)
        info = header.info or {}
        if info.get("over") is True:
            self.is_over = True
            return
        reason = ": ".join(shown(str(info.get(n))) for n in ("reason", "detail"))
        self.site.report(f"the server does not take this node: {reason}")

    def _check(self, header: Header) -> None:
        held = self.site.checkpoints.get(header.federation)
        if held is None:
            raise RefusedError("federation", "it said no hello")
        held.newest.check(header)
        held.answered(header)
