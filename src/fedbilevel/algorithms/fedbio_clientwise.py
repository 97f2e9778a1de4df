r"""FedBiO for a client-local lower level: x is shared, every client keeps its own y.

    min_x  1/K sum_k f_k(x, y_k*(x))   with   y_k*(x) = argmin_y g_k(x, y)

Client k at every local iteration, from all rows or a sample of them:

    y <- y - lr_y gy_k(x, y)
    nu = fx_k(x, y) - jvp_k(x, y)[z],    z from the client's own Hessian
    x <- x - lr_x nu                                 (at the fresh y)
    every p iterations:  x <- mean over clients;  y is never sent

Averaging client hypergradients is exact here, however much the clients differ. It is
another problem than the one with a shared y: see `docs/which-question.md`.

Exchanges a round: 1, with dx floats each way.

Reference: Li, Huang, Huang, arXiv 2205.01608.
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. z comes from any hypergradient rule (`Neumann` on the command line).
`alternating=False` takes both directions at the old point.
"""

from typing import Any, ClassVar

from fedbilevel._blocks import combine
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._local import (
    Iterate,
    averaged,
    check_counts,
    evaluate,
    hypergradient_and_slope,
    local_steps,
    move,
    only,
)
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import choice, count, number, part

__all__ = ["FedBiOClientwise"]


class FedBiOClientwise(AbstractAlgorithm):
    """Plain local steps; x averaged every p steps, y kept on its client."""

    reference: ClassVar[str] = "Li, Huang, Huang 2022, arXiv 2205.01608"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"
    answers: ClassVar[str] = "own y per client"

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi_k")
    lr_x: Number = number("x moves by lr_x nu", step="upper")
    lr_y: Number = number("y moves by lr_y gy", step="lower")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    alternating: bool = choice(
        "move y, then x at the fresh y", default=True, kw_only=True
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)

    def private_blocks(self) -> Pair:
        """Keep y on its client."""
        return Pair(False, True)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y)."""
        return Iterate(Pair(x, y))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: beyond its y a client keeps nothing."""

    def phases(self) -> Phases:
        """Return the one exchange of a round."""
        return (averaged(self.local),)

    def point(self, server: Iterate) -> Pair:
        """Return the averaged x, and y."""
        return server.point

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        steps, together = Pair(self.lr_x, self.lr_y), (Pair(True, True),)
        order = (Pair(False, True), Pair(True, False)) if self.alternating else together

        def iterate(w: Pair, time: tuple[Any, Key]) -> Pair:
            _, key = time
            G = hypergradient_and_slope(self.hypergradient, oracle, key)
            for group in order:
                d = evaluate(only(G, group))(w)
                moved = move(only(w, group), only(steps, group), d)
                w = combine(moved, w)
            return w

        w = local_steps(iterate, message.point, turn, self.local_steps)
        return client, Iterate(w)
