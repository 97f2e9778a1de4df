"""Estimates of grad Phi(x) = fx - (d2g/dxdy) [d2g/dydy]^-1 fy on one client.

Every estimator draws a sample bundle from a key, `draw(oracle, key)`, and is a function
`(oracle, x, y, bundle) -> tree like x`: one bundle can be evaluated at many points.

`fedbilevel.hypergradient(problem, x, y, upper_rows, lower_rows)` is the function of one
machine in `direct.py`: the package has its name, and can be called.
"""

import sys
from types import ModuleType

from fedbilevel.hypergradient._base import (
    AbstractHypergradient as AbstractHypergradient,
)
from fedbilevel.hypergradient.conjugate_gradient import (
    ConjugateGradient as ConjugateGradient,
)
from fedbilevel.hypergradient.conjugate_gradient import Exact as Exact
from fedbilevel.hypergradient.darts import DARTS as DARTS
from fedbilevel.hypergradient.darts import SAMA as SAMA
from fedbilevel.hypergradient.darts import FiniteDifference as FiniteDifference
from fedbilevel.hypergradient.direct import hypergradient as hypergradient
from fedbilevel.hypergradient.local_inverse import (
    local_inverse_bias as local_inverse_bias,
)
from fedbilevel.hypergradient.neumann import FrozenNeumann as FrozenNeumann
from fedbilevel.hypergradient.neumann import Neumann as Neumann
from fedbilevel.hypergradient.neumann import RandomNeumann as RandomNeumann
from fedbilevel.hypergradient.unrolled import ForwardGradient as ForwardGradient
from fedbilevel.hypergradient.unrolled import Unrolled as Unrolled


class _Callable(ModuleType):
    __call__ = staticmethod(hypergradient)


sys.modules[__name__].__class__ = _Callable
