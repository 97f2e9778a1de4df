r"""FedNest: T_in anchored lower updates, a federated inverse, one anchored upper step.

For every round, with S a fresh cohort of clients in each exchange:

    FedInn, T_in times (2 exchanges each):
        q   = mean_i gy_i(x, y; zeta_i)
        y_i = y;  tau times:
            y_i -= (beta/tau) (gy_i(x, y_i; zeta) - gy_i(x, y; zeta) + q)
        y   = mean_i y_i
    FedIHGP (1 + N' exchanges), N' uniform on {0..N-1}:
        p_0 = (N/ell) mean_i fy_i(x, y; xi_i)
        p_m = mean_i (p_{m-1} - (1/ell) hvp_i(x, y; zeta_{i,m})[p_{m-1}]),  m = 1..N'
    FedOut (2 exchanges), z = p_{N'}:
        h   = mean_i (fx_i(x, y; xi_i) - jvp_i(x, y; zeta_i)[z])
        x_i = x;  tau times:  x_i -= (alpha/tau) (h - fx_i(x, y; xi) + fx_i(x_i, y; xi))
        x   = mean_i x_i

One sample at both points of a difference. Every factor of the series is averaged, so
it inverts the mean Hessian: unbiased where clients differ. `random_length=False` sums
the whole series instead, z = (1/ell) sum_{m=0..N} r_m with r_0 = mean fy, N factors.

Exchanges a round: 2 T_in + N' + 3 (N' = N for the whole series). Floats a client and
round, each way: 2 T_in dy + (1 + N') dy + 2 dx. Down, a client that did not take part
before also needs x and y.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, arXiv 2205.02215 (ICML 2022).
`anchored=False` takes LFedInn in place of FedInn: that is FedNest-SGD
(`fedbilevel.algorithms.presets`).
`upper_steps` gives the step of x another number of parts than tau: the published
setting is 25 lower steps and one of x.
Deviations: tau is the same on all clients. Random length and scaling of the series are
from memory. The authors' program differs in many points (its Neumann vectors are never
averaged, steps are not divided by tau). This is the paper's structure.
"""

from dataclasses import replace

from fedbilevel import _tree
from fedbilevel.algorithms.nested import _nest
from fedbilevel.schedules import Number, choice, count

__all__ = ["FedNest"]


class FedNest(_nest.WithSeries):
    """Anchored lower and upper steps around a federated Neumann series."""

    reference = "Tarzanagh et al. 2022, arXiv 2205.02215"
    provenance = "authors' program and table read; details from memory"

    beta: Number = _nest.whole_step("lower", "y")
    inner_rounds: int = count("lower updates in a round, T_in", kw_only=True, default=5)
    upper_steps: int = _nest.parts_of_x()
    anchored: bool = choice(
        "correct lower steps by an anchor", default=True, kw_only=True
    )

    def drifts(self):
        """Say so of lower steps without an anchor."""
        return not self.anchored

    def init_server(self, x, y):
        """Start at (x, y) with empty anchors, where there will be some."""
        nest = super().init_server(x, y)
        return replace(nest, q=_tree.zeros_like(y)) if self.anchored else nest

    def phases(self):
        """Return T_in lower updates, the series, and one upper update."""
        above = self.upper_update(self.upper_steps or self.local_steps)
        return (_nest.lower_updates(self), *above)
