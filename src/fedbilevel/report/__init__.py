"""Results for people. Reads results only."""

from fedbilevel.report.comparison import Standing as Standing
from fedbilevel.report.comparison import default_target as default_target
from fedbilevel.report.comparison import ranking as ranking
from fedbilevel.report.comparison import ranking_table as ranking_table
from fedbilevel.report.curves import draw_curves as draw_curves
from fedbilevel.report.tables import cost_table as cost_table
from fedbilevel.report.tables import result_table as result_table
