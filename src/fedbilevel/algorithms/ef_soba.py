r"""EF-SOBA: SOBA on clients that send a part of each direction, and remember the rest.

With D_k = (D_x, D_y, D_z) of SOBA (`fedbilevel.algorithms.soba`) on client k, one
sample for each level, and C the largest entries of each block, a `fraction` of them:

    client k:  c_k = C(e_k + D_k(w; s)),   e_k <- e_k + D_k(w; s) - c_k,   e_k = 0 first
    server:    w <- w - lr a_t mean_k c_k            at every iteration (p = 1)

What was not sent is added to what is sent next (error feedback, in `TopK`), so that
nothing is lost, only late. With fraction = 0 it compresses nothing itself and is SOBA
on clients, averaged at every iteration, which is right where they differ; with
`--compress quantize:8`, which is unbiased and needs no memory, that is C-SOBA.

Exchanges an iteration: 1, with dx + 2 dy floats down; up that fraction of it, and as
many places.

Reference: He et al., arXiv 2405.18858 (ICML 2024).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. The variants with momentum and with many steps of compression are left out.
"""

from typing import ClassVar

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms._base import (
    AbstractAlgorithm,
    Phases,
    Repeat,
    ServerTurn,
    with_turn,
)
from fedbilevel.algorithms._local import at_time, check_counts
from fedbilevel.algorithms._single import (
    ITERATIONS,
    Path,
    all_directions,
    sampled,
    stepped,
)
from fedbilevel.channels import PLAIN, Channel, TopK
from fedbilevel.schedules import Schedule, count, number, schedule

__all__ = ["EFSOBA"]


class EFSOBA(AbstractAlgorithm):
    """SOBA on clients, with compressed directions and error feedback."""

    reference: ClassVar[str] = "He et al. 2024, arXiv 2405.18858"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"

    lr_x: Number = number("x moves by lr_x a c_x", step="upper")
    lr_y: Number = number("y moves by lr_y a c_y", step="lower")
    lr_z: Number = number("z moves by lr_z a c_z", step="lower")
    a: Schedule = schedule("common shape of the steps over t", default=1.0)
    fraction: float = count("share of the entries that travel up", default=0.1)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        self.channel()  # which checks the fraction

    def channel(self) -> Channel:
        """Send the largest entries, and the others later."""
        return Channel((TopK(self.fraction),)) if self.fraction else PLAIN

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at (x, y, 0)."""
        return Path(Triple(x, y, _tree.zeros_like(y)))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: what was not sent yet is kept by the channel."""

    def phases(self) -> Phases:
        """Return the iterations of a round."""
        step = sampled("step", all_directions, with_turn(self.moved))
        return (Repeat(self.local_steps, (step,)),)

    def point(self, server: Path) -> Pair:
        """Return x and y."""
        return Pair(server.point.x, server.point.y)

    def moved(self, server: Path, c: Triple, turn: ServerTurn) -> Path:
        """Move x, y and z along the mean of what was sent."""
        a = at_time(self.a, turn.index, self.lr_x)
        steps = Triple(self.lr_x * a, self.lr_y * a, self.lr_z * a)
        return Path(stepped(server.point, steps, c))
