"""Results for people. Reads results only."""

from fedbilevel.report.comparison import Standing as Standing
from fedbilevel.report.comparison import default_target as default_target
from fedbilevel.report.comparison import ranking as ranking
from fedbilevel.report.comparison import ranking_table as ranking_table
from fedbilevel.report.comparison import trials_table as trials_table
from fedbilevel.report.curves import draw_curves as draw_curves
from fedbilevel.report.label_counts import draw_label_counts as draw_label_counts
from fedbilevel.report.label_counts import label_counts_table as label_counts_table
from fedbilevel.report.tables import cost_table as cost_table
from fedbilevel.report.tables import result_table as result_table
from fedbilevel.report.theory import conditions_table as conditions_table
from fedbilevel.report.theory import draw_scaling as draw_scaling
from fedbilevel.report.theory import estimates_table as estimates_table
from fedbilevel.report.theory import plan_table as plan_table
from fedbilevel.report.theory import scaling_table as scaling_table
from fedbilevel.report.theory import terms_table as terms_table
