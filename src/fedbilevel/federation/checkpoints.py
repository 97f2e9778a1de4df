"""Checkpoints of a site after each exchange that may still matter.

A reply that was computed may never be taken in: it came late, or the server fell back
to its last checkpoint. The server therefore says, with every message, after which
exchange this client stands (`accepted`), and which one no restart can undo (`kept`).
From `kept` on a site holds a checkpoint of every exchange, and continues from the one
that the server names.

A carrier of packets could record a request and send it again, and a faulty server could
send a counter so large that everything after it looks old. A site keeps the newest
request it answered with its checkpoints, and refuses both.
"""

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

from fedbilevel import _tree
from fedbilevel._files import DAMAGED, make_private_folder, read_arrays, write_arrays
from fedbilevel.errors import DamagedFileWarning
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import PROTOCOL, Header
from fedbilevel.runtime.job import Kept

START = 0  # the exchange after which a client stands before any
# How far a counter goes at once. A server that fails and is started again every half
# minute needs three days for the attempts. At twenty exchanges a second a site would
# have missed five months of them.
_MOST = {"attempt": 10_000}
_MOST |= dict.fromkeys(("number", "exchange", "round", "index"), 2**28)


def put_aside(path: Path, error: Exception) -> None:
    """Keep a damaged file under another name, for a person to look at, and say so."""
    aside = path.with_suffix(".damaged")
    path.replace(aside)
    warnings.warn(
        f"{path} is damaged ({error}). It was put aside as {aside.name}, and this site "
        "begins anew without it.",
        DamagedFileWarning,
        stacklevel=2,
    )


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
        for name, most in _MOST.items():
            held, value = getattr(self, name), getattr(header, name)
            # Of a new attempt the requests are counted anew.
            start = 0 if name == "number" and not again else held
            if value > start + most:
                text = f"{name} {value} cannot be reached from {held}"
                raise RefusedError("jump", text)
        # A client does not stand after what is asked of it.
        asks = header.kind == "exchange"
        if not header.kept <= header.accepted <= header.exchange - asks:
            raise RefusedError(
                "jump",
                f"exchange {header.exchange} after {header.accepted} was accepted and "
                f"{header.kept} kept",
            )

    def after(self, header: Header) -> "Newest":
        """Return what is newest after a request was answered."""
        names = ("exchange", "round", "index")
        largest = [max(getattr(self, name), getattr(header, name)) for name in names]
        return Newest(header.attempt, header.number, *largest)


class SiteCheckpoints:
    """The checkpoints of one client in one federation, by exchange.

    `newest` is the newest request that was answered. `found` says whether an earlier
    process left something.
    """

    def __init__(
        self, start: Kept, folder: Path | None, federation: str, client: int
    ) -> None:
        self.client = client
        self.start = jax.tree.map(np.asarray, start)
        self.names = _tree.leaf_names(self.start)
        self.path = None if folder is None else folder / f"{federation}.npz"
        self.kept: dict[int, Kept] = {}
        self.newest = Newest()
        self.found = self._load()

    def at(self, exchange: int) -> Kept | None:
        """Return what was kept after an exchange, or None if that is lost."""
        if exchange == START or not self.names:
            return self.start
        return self.kept.get(exchange)

    def put(self, exchange: int, kept: Kept, oldest: int) -> None:
        """Keep one more checkpoint, and none from before `oldest`."""
        self.kept = {n: one for n, one in self.kept.items() if n >= oldest}
        self.kept[exchange] = jax.tree.map(np.asarray, kept)

    def answered(self, header: Header) -> None:
        """Note that a request was answered, and write everything before that leaves."""
        self.newest = self.newest.after(header)
        self.save()

    def save(self) -> None:
        """Write all checkpoints, if they are to outlive this process."""
        if self.path is None:
            return
        arrays = {
            f"{exchange}/{name}": leaf
            for exchange, kept in self.kept.items()
            for name, leaf in zip(self.names, jax.tree.leaves(kept), strict=True)
        }
        about = {
            "protocol": PROTOCOL,
            "client": self.client,
            "newest": asdict(self.newest),
            "exchanges": sorted(self.kept),
        }
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        make_private_folder(self.path.parent)
        write_arrays(self.path, arrays, mode=0o600)

    def _load(self) -> bool:
        """Read what an earlier process left; say whether there was something."""
        if self.path is None or not self.path.exists():
            return False
        try:
            arrays = read_arrays(self.path)
            about = json.loads(arrays["about"].tobytes())
            # It is not damaged: the version that wrote it can still continue it.
            written = about.get("protocol", "2 or older")
            if written != PROTOCOL:
                raise RefusedError(
                    "version",
                    f"{self.path} was written under protocol {written}, this version "
                    f"of fedbilevel speaks {PROTOCOL}. Finish the federation with the "
                    "version that began it, or serve it again in a new folder",
                )
            if about["client"] != self.client:
                raise ValueError("the state of another client")
            like, structure = jax.tree.flatten(self.start)
            kinds = [(leaf.shape, leaf.dtype) for leaf in like]
            for exchange in about["exchanges"]:
                leaves = [arrays[f"{exchange}/{name}"] for name in self.names]
                if [(leaf.shape, leaf.dtype) for leaf in leaves] != kinds:
                    raise ValueError("a state of other shapes")
                self.kept[exchange] = jax.tree.unflatten(structure, leaves)
            newest = about["newest"]
            self.newest = Newest(**{n: int(newest[n]) for n in asdict(self.newest)})
        except DAMAGED as error:
            put_aside(self.path, error)
            self.kept, self.newest = {}, Newest()
        return True
