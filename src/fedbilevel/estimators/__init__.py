"""Direction estimators: how a stochastic map G is filtered over the iterations.

They know nothing of bilevel problems. `G` is a stochastic map with its sample fixed, so
calling it at two points uses the same sample at both.
"""

from fedbilevel.estimators._base import AbstractEstimator as AbstractEstimator
from fedbilevel.estimators._base import at_both as at_both
from fedbilevel.estimators.heavy_ball import HeavyBall as HeavyBall
from fedbilevel.estimators.moving_average import MovingAverage as MovingAverage
from fedbilevel.estimators.plain import Plain as Plain
from fedbilevel.estimators.storm import Storm as Storm
