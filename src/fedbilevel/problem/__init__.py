"""Federated bilevel problems: two losses, the clients' data, and the oracle on both."""

from fedbilevel.problem.checks import broken_derivative as broken_derivative
from fedbilevel.problem.checks import check_problem as check_problem
from fedbilevel.problem.curvature import curvature_along as curvature_along
from fedbilevel.problem.curvature import largest_curvature as largest_curvature
from fedbilevel.problem.curvature import opposed_curvatures as opposed_curvatures
from fedbilevel.problem.curvature import some_direction as some_direction
from fedbilevel.problem.data import ClientData as ClientData
from fedbilevel.problem.data import Data as Data
from fedbilevel.problem.data import PooledData as PooledData
from fedbilevel.problem.data import as_weights as as_weights
from fedbilevel.problem.data import padded as padded
from fedbilevel.problem.data import padded_count as padded_count
from fedbilevel.problem.losses import Batch as Batch
from fedbilevel.problem.losses import Problem as Problem
from fedbilevel.problem.losses import coin_mask as coin_mask
from fedbilevel.problem.losses import split_start as split_start
from fedbilevel.problem.oracle import Oracle as Oracle
from fedbilevel.problem.stored_rows import StoredRows as StoredRows
from fedbilevel.problem.stored_rows import stored as stored
