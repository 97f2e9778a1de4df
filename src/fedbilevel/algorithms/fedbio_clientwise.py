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

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
from jaxtyping import Array, Float

from fedbilevel._types import Pair
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._own_lower_level import AbstractOwnLowerLevel
from fedbilevel.estimators import AbstractEstimator, Plain
from fedbilevel.schedules import as_number

__all__ = ["FedBiOClientwise"]


class FedBiOClientwise(AbstractOwnLowerLevel):
    """Plain local steps; x averaged every p steps, y kept on its client."""

    reference: ClassVar[str] = "Li, Huang, Huang 2022, arXiv 2205.01608"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"

    lr_x: Float[Array, "..."] = eqx.field(converter=as_number)
    lr_y: Float[Array, "..."] = eqx.field(converter=as_number)
    alternating: bool = eqx.field(static=True, default=True, kw_only=True)

    def estimator(self) -> AbstractEstimator:
        """Return the plain one."""
        return Plain()

    def step(self, t: Any) -> Pair:
        """Return both steps."""
        del t
        return Pair(self.lr_x, self.lr_y)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        return ("lr_x", "lr_y", "upper_step", "lower_step", "q", "theta", "order")

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters or effective steps."""
        del clients
        return cls(
            _options.series(options),
            _options.first_number(options, "lr_x", "upper_step"),
            _options.first_number(options, "lr_y", "lower_step"),
            local_steps=local_steps,
            alternating=_options.is_alternating(options, "alternating"),
        )
