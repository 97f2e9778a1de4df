r"""The constants of the theorems, from those of the problem (Gao 2022, appendix).

    L_Phi  = L1 + (2 L1^2 + L21 L0^2)/mu + (L22 L1 L0 + L1^3 + L21 L0 L1)/mu^2
             + L22 L1^2 L0/mu^3
    Lhat^2 = 2 L1^2 + 4 theta^2 L0^2 L21^2 (Q+1)^2 + 8 theta^2 L1^4 (Q+1)^2
             + 2 theta^4 L0^2 L1^2 L22^2 Q^2 (Q+1)^2
    Ltil   = L1 + L1^2/mu + L0 L21/mu + L0 L1 L22/mu^2
    G^2    = 2 L0^2 + 12 theta^2 L0^2 L1^2 (Q+1)^2
             + 4 theta^4 L0^2 L1^2 (Q+2) (Q+1)^2 sigma^2
    Delta_Q = (1 - theta mu)^(Q+1) L0 L1/mu

L_Phi: smoothness of Phi. Lhat: mean-square Lipschitz constant of the stochastic
hypergradient. Ltil: how far an error in y moves the hypergradient. G^2: variance of the
stochastic hypergradient with one sample. Delta_Q: bias of the truncated series.

Readings: the printed L_12 in L_Phi is L21. G is defined by an expression that is a
variance, so that expression is G^2.
"""

import math
from dataclasses import asdict, dataclass

from fedbilevel.errors import InvalidInputError


@dataclass(frozen=True)
class Inputs:
    """The constants of a problem in the assumptions.

    f is l0-Lipschitz, the gradients of f and g are l1-Lipschitz, the cross Hessian of g
    l21-Lipschitz, its yy-Hessian l22-Lipschitz, g is mu-strongly convex in y, and sigma
    bounds the noise of its gradient and its Hessian.
    """

    l0: float
    l1: float
    l21: float
    l22: float
    mu: float
    sigma: float

    def __post_init__(self) -> None:
        values = asdict(self)
        bad = [n for n, v in values.items() if not math.isfinite(v) or v < 0]
        if bad or self.mu == 0 or self.l1 < self.mu:
            raise InvalidInputError(
                f"constants {values}: all must be finite and not negative, and "
                "0 < mu <= l1. A lower level without strong convexity has no theorem: "
                "add a regularizer to it."
            )


@dataclass(frozen=True)
class Constants:
    """The constants of the theorems for a series of `q` factors of step `theta`."""

    inputs: Inputs
    theta: float
    q: int

    def __post_init__(self) -> None:
        if not 0 < self.theta or self.q < 0:
            raise InvalidInputError(
                f"theta={self.theta}, q={self.q}: a series needs theta > 0, q >= 0."
            )

    @property
    def l_phi(self) -> float:
        """Return the smoothness of Phi."""
        i = self.inputs
        first = (2 * i.l1**2 + i.l21 * i.l0**2) / i.mu
        second = (i.l22 * i.l1 * i.l0 + i.l1**3 + i.l21 * i.l0 * i.l1) / i.mu**2
        return i.l1 + first + second + i.l22 * i.l1**2 * i.l0 / i.mu**3

    @property
    def l_hat(self) -> float:
        """Return Lhat."""
        i, theta, terms = self.inputs, self.theta, self.q + 1
        square = 2 * i.l1**2
        square += 4 * theta**2 * i.l0**2 * i.l21**2 * terms**2
        square += 8 * theta**2 * i.l1**4 * terms**2
        square += 2 * theta**4 * i.l0**2 * i.l1**2 * i.l22**2 * self.q**2 * terms**2
        return math.sqrt(square)

    @property
    def l_tilde(self) -> float:
        """Return Ltil."""
        i = self.inputs
        indirect = i.l1**2 / i.mu + i.l0 * i.l21 / i.mu
        return i.l1 + indirect + i.l0 * i.l1 * i.l22 / i.mu**2

    @property
    def g_squared(self) -> float:
        """Return G^2."""
        i, theta, terms = self.inputs, self.theta, self.q + 1
        square = 2 * i.l0**2 + 12 * theta**2 * i.l0**2 * i.l1**2 * terms**2
        scale = 4 * theta**4 * i.l0**2 * i.l1**2
        return square + scale * (self.q + 2) * terms**2 * i.sigma**2

    @property
    def delta_q(self) -> float:
        """Return Delta_Q."""
        i = self.inputs
        return (1 - self.theta * i.mu) ** (self.q + 1) * i.l0 * i.l1 / i.mu

    def as_dict(self) -> dict[str, float]:
        """Return all of them by name."""
        names = ("l_phi", "l_hat", "l_tilde", "g_squared", "delta_q")
        return {name: getattr(self, name) for name in names}
