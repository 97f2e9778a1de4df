"""Which requests a site still answers: none twice, and none from beyond reach.

Whoever carries packets could record a request and send it again, and a server that lost
its way could send a counter so large that everything after it looks old. A site keeps
the newest request it answered, on disk with its checkpoints, and refuses both.
"""

from dataclasses import asdict, dataclass
from typing import Any

from fedbilevel.federation.wire import Header, RefusedError

# A server that fails and is started again every half minute needs three days for these.
_MOST_ATTEMPTS = 10_000
# At twenty exchanges a second a site would have missed five months of them.
_MOST_STEPS = 2**28
_COUNTERS = ("number", "exchange", "round", "index")


@dataclass(frozen=True)
class Newest:
    """The newest request that was answered, and the largest counters that were seen.

    Requests are ordered by `attempt` and `number`; the others may fall back when the
    server does, to its last checkpoint.
    """

    attempt: int = 0
    number: int = 0
    exchange: int = 0
    round: int = 0
    index: int = 0

    @staticmethod
    def read(about: dict[str, Any]) -> "Newest":
        """Return what was written by `as_dict`; raise if it was not."""
        return Newest(**{name: int(about[name]) for name in Newest().as_dict()})

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        return asdict(self)

    def check(self, header: Header) -> None:
        """Refuse a request that is not newer, or too new to be true."""
        if header.attempt < self.attempt:
            raise RefusedError("attempt", "from a server that was replaced since")
        again = header.attempt == self.attempt
        if again and header.number <= self.number:
            raise RefusedError(
                "replayed",
                f"request {header.number} of attempt {header.attempt}, after "
                f"{self.number} was answered",
            )
        if header.attempt > self.attempt + _MOST_ATTEMPTS:
            raise RefusedError("jump", self._too_far("attempt", header.attempt))
        for name in _COUNTERS:
            # Of a new attempt the requests are counted anew.
            start = 0 if name == "number" and not again else getattr(self, name)
            if getattr(header, name) > start + _MOST_STEPS:
                raise RefusedError("jump", self._too_far(name, getattr(header, name)))
        _check_order(header)

    def after(self, header: Header) -> "Newest":
        """Return what is newest after a request was answered."""
        return Newest(
            header.attempt,
            header.number,
            max(self.exchange, header.exchange),
            max(self.round, header.round),
            max(self.index, header.index),
        )

    def _too_far(self, name: str, value: int) -> str:
        return f"{name} {value} cannot be reached from {getattr(self, name)}"


def _check_order(header: Header) -> None:
    """Refuse a client that stands after what is asked of it."""
    asks = header.kind == "exchange"
    if not header.kept <= header.accepted <= header.exchange - asks:
        raise RefusedError(
            "jump",
            f"exchange {header.exchange} after {header.accepted} was accepted and "
            f"{header.kept} kept",
        )
