"""A run or a comparison as one HTML file, which needs nothing but a browser."""

from fedbilevel.report.page.document import MARK as MARK
from fedbilevel.report.page.document import write_page as write_page
