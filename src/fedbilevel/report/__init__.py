"""Results for people. Reads results only."""

from fedbilevel.report.tables import cost_table as cost_table
from fedbilevel.report.tables import result_table as result_table
