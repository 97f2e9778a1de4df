"""Privacy, compression and robustness: wrappers of a phase's reply and its reduction.

They know nothing of algorithms, and no algorithm knows of them.
"""

from fedbilevel.channels.channel import PLAIN as PLAIN
from fedbilevel.channels.channel import Channel as Channel
from fedbilevel.channels.channel import change_blocks as change_blocks
from fedbilevel.channels.channel import count_blocks as count_blocks
from fedbilevel.channels.channel import vector_shapes as vector_shapes
from fedbilevel.channels.coders import AbstractCoder as AbstractCoder
from fedbilevel.channels.coders import BFloat16 as BFloat16
from fedbilevel.channels.coders import Privacy as Privacy
from fedbilevel.channels.coders import Quantize as Quantize
from fedbilevel.channels.coders import TopK as TopK
from fedbilevel.channels.reductions import AbstractReduction as AbstractReduction
from fedbilevel.channels.reductions import GeometricMedian as GeometricMedian
from fedbilevel.channels.reductions import Krum as Krum
from fedbilevel.channels.reductions import Mean as Mean
from fedbilevel.channels.reductions import Median as Median
from fedbilevel.channels.reductions import SecureMean as SecureMean
from fedbilevel.channels.reductions import TrimmedMean as TrimmedMean
from fedbilevel.channels.reductions import weighted_mean as weighted_mean
