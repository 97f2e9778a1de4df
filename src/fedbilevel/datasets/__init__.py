"""Data sets as NumPy arrays, from files, by name or from other libraries."""

from fedbilevel._table_choices import TableChoices as TableChoices
from fedbilevel.datasets._base import Dataset as Dataset
from fedbilevel.datasets.arrays import from_arrays as from_arrays
from fedbilevel.datasets.arrays import from_torch as from_torch
from fedbilevel.datasets.images import shrink as shrink
from fedbilevel.datasets.named import LAYOUTS as LAYOUTS
from fedbilevel.datasets.named import from_frame as from_frame
from fedbilevel.datasets.named import is_named as is_named
from fedbilevel.datasets.named import load as load
from fedbilevel.datasets.named import names as names
from fedbilevel.datasets.preparation import Preparation as Preparation
from fedbilevel.datasets.sums import Sums as Sums
