"""The quality of a shared model on held-out rows, compared with baselines.

It needs NumPy alone.
"""

from fedbilevel.evaluation.assessment import Judged as Judged
from fedbilevel.evaluation.assessment import Site as Site
from fedbilevel.evaluation.assessment import is_linear_cheap as is_linear_cheap
from fedbilevel.evaluation.assessment import quality as quality
from fedbilevel.evaluation.at_sites import NUMBERS as NUMBERS
from fedbilevel.evaluation.at_sites import reported as reported
from fedbilevel.evaluation.at_sites import split as split
from fedbilevel.evaluation.metrics import Rows as Rows
