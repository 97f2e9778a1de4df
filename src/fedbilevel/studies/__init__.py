"""Studies of runs: one, many seeds, a grid, a comparison, a theory.

Everything here takes objects: a problem, data, a start and algorithms. Names and text
are one layer above.
"""

from fedbilevel.studies.comparison import Contender as Contender
from fedbilevel.studies.comparison import compare as compare
from fedbilevel.studies.planning import calibrate as calibrate
from fedbilevel.studies.planning import check_theory as check_theory
from fedbilevel.studies.planning import plan as plan
from fedbilevel.studies.presented import Comparison as Comparison
from fedbilevel.studies.scaling import complexity as complexity
from fedbilevel.studies.scaling import speedup as speedup
from fedbilevel.studies.searching import Range as Range
from fedbilevel.studies.searching import Search as Search
from fedbilevel.studies.searching import Values as Values
from fedbilevel.studies.seeds import sweep as sweep
from fedbilevel.studies.setting import Keeping as Keeping
from fedbilevel.studies.setting import Setting as Setting
from fedbilevel.studies.single import minimize as minimize
from fedbilevel.studies.single import run as run
from fedbilevel.studies.tuning import Trial as Trial
from fedbilevel.studies.tuning import Tuned as Tuned
from fedbilevel.studies.tuning import tune as tune
