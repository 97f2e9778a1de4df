r"""LFedNest: the light FedNest, with nothing but local steps.

For every round:

    LFedInn, T_in times (1 exchange each):
        y_i = y;  tau times:  y_i -= (beta/tau) gy_i(x, y_i; zeta);    y = mean_i y_i
    LFedOut (1 exchange):
        x_i = x;  tau times:  x_i -= (alpha/tau) h_i(x_i, y);          x = mean_i x_i

h_i is a hypergradient on the client's own Hessian, formed anew at every step: right
for clients whose data are alike, biased where they differ.

Exchanges a round: T_in + 1. Floats a client and round, each way: T_in dy + dx.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, arXiv 2205.02215 (ICML 2022).
`anchored=True` takes FedInn in place of LFedInn: that is LFedNest-SVRG
(`fedbilevel.algorithms.presets`).
`upper_steps` gives the step of x another number of parts than tau: the published
setting is 25 lower steps and one of x.
Deviations: tau is the same on all clients; any hypergradient estimator (`Neumann` on
the command line).
"""

from fedbilevel import _tree
from fedbilevel._types import Number, Pair
from fedbilevel.algorithms.nested import _nest
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.schedules import choice, count, part

__all__ = ["LFedNest"]


class LFedNest(_nest.Nested):
    """Plain local steps below, local hypergradients above."""

    reference = "Tarzanagh et al. 2022, arXiv 2205.02215"
    provenance = "authors' program and table read; details from memory"
    inverts_locally = True

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi")
    beta: Number = _nest.whole_step("lower", "y")
    inner_rounds: int = count("lower updates in a round, T_in", kw_only=True, default=5)
    upper_steps: int = _nest.parts_of_x()
    anchored: bool = choice(
        "correct lower steps by an anchor", default=False, kw_only=True
    )

    def init_server(self, x, y):
        """Start at (x, y), with an anchor where there will be one."""
        return _nest.Nest(Pair(x, y), q=_tree.zeros_like(y) if self.anchored else None)

    def phases(self):
        """Return T_in lower updates, and LFedOut."""
        above = self.upper_steps or self.local_steps
        upper = _nest.local_steps_on("x", "outer_local", self.alpha, above, self.draw)
        return _nest.lower_updates(self), upper

    def draw(self, oracle, key):
        """Draw a bundle; return the map of h_i."""
        b = self.hypergradient.draw(oracle, key)
        return lambda w: self.hypergradient(oracle, w.x, w.y, b)
