"""A run or a comparison as one HTML file, which needs nothing but a browser."""

from fedbilevel.report.page.document import MARK as MARK
from fedbilevel.report.page.document import write_listing as write_listing
from fedbilevel.report.page.document import write_page as write_page
from fedbilevel.report.page.document import write_sentence as write_sentence
