r"""FedBiO: local steps on x, y and the linear-system variable z, for a shared y.

Client k at every local iteration, independent samples for each line:

    omega = gy_k(x, y; .)                            slope of the lower level
    q     = hvp_k(x, y; .)[z] - fy_k(x, y; .)        slope of 0.5 z'Hz - z'fy
    nu    = fx_k(x, y; .) - jvp_k(x, y; .)[z]        hypergradient with the current z
    y <- y - lr_y omega,   z <- z - lr_z q,   x <- x - lr_x nu
    every p iterations:  x, y, z <- mean over clients

Because z is averaged, it tracks Hbar^-1 fybar of the mean Hessian, so the limit is
unbiased where clients differ (p = 1), up to a drift of order lr p (p > 1). With K = 1
this is SOBA (arXiv 2201.13409), whose code stores -z and shares one sample a level.

Exchanges a round: 1, with dx + 2 dy floats each way. A step: one Hessian and one cross
product, two upper gradients.

Reference: Li, Huang, Huang, arXiv 2302.06701 (NeurIPS 2023).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. All three lines use the old point; `alternating=True` moves y, then z, then x at
fresh values. z starts at 0. `radius` projects z onto a ball after every step.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
from jaxtyping import Array, Float

from fedbilevel._types import Triple
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._auxiliary import AbstractAuxiliary
from fedbilevel.estimators import AbstractEstimator, Plain
from fedbilevel.schedules import as_number

__all__ = ["FedBiO"]


class FedBiO(AbstractAuxiliary):
    """Plain local steps on x, y and z, averaged every p steps."""

    reference: ClassVar[str] = "Li, Huang, Huang 2023, arXiv 2302.06701"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"

    lr_x: Float[Array, "..."] = eqx.field(converter=as_number)
    lr_y: Float[Array, "..."] = eqx.field(converter=as_number)
    lr_z: Float[Array, "..."] = eqx.field(converter=as_number)

    def estimator(self) -> AbstractEstimator:
        """Return the plain one."""
        return Plain()

    def step(self, t: Any) -> Triple:
        """Return the three steps."""
        del t
        return Triple(self.lr_x, self.lr_y, self.lr_z)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        steps = ("upper_step", "lower_step", "auxiliary_step")
        return ("lr_x", "lr_y", "lr_z", *steps, "radius", "order")

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters or effective steps; z moves like y unless told."""
        del clients
        auxiliary = ("lr_z", "auxiliary_step", "lr_y", "lower_step")
        return cls(
            _options.first_number(options, "lr_x", "upper_step"),
            _options.first_number(options, "lr_y", "lower_step"),
            _options.first_number(options, *auxiliary),
            local_steps=local_steps,
            radius=_options.optional_number(options, "radius"),
            alternating=_options.is_alternating(options, "simultaneous"),
        )
