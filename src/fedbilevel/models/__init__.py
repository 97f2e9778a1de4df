"""Models that a run leaves behind: how rows become predictions, by NumPy alone.

A model is a few layers of arrays, the names of its classes, and how raw columns or
pixels become its features. It needs no task, no data set and no code of the training
run. Transformers, which are read and frozen, and their adapters are modules beside it:
`transformer`, `adapters`, `checkpoints` (Hugging Face's folders) and `peft`.
"""

from fedbilevel.models.layers import Convolution as Convolution
from fedbilevel.models.layers import Dense as Dense
from fedbilevel.models.layers import Layer as Layer
from fedbilevel.models.layers import Multiply as Multiply
from fedbilevel.models.layers import OneLength as OneLength
from fedbilevel.models.layers import Pixels as Pixels
from fedbilevel.models.layers import Tanh as Tanh
from fedbilevel.models.model import Model as Model
from fedbilevel.models.model import Predictor as Predictor
from fedbilevel.models.model import can_be_kept as can_be_kept
