"""Federated bilevel optimization on JAX.

min_x  1/K sum_k f_k(x, y*(x))     with   y*(x) = argmin_y 1/K sum_k g_k(x, y)
"""

from fedbilevel.problem import ClientData as ClientData
from fedbilevel.problem import Problem as Problem
from fedbilevel.result import Result as Result
from fedbilevel.run import run as run
from fedbilevel.runtime import configure as configure
from fedbilevel.runtime import join as join

__version__ = "0.1.0"
