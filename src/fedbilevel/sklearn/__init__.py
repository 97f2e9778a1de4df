"""Estimators of scikit-learn whose rows are spread over sites.

Each solves one of the tasks by a federated method, in this process, and is used like
any other estimator: in pipelines, in grid searches, in cross validation.
"""

from fedbilevel.sklearn.estimators import FederatedClassifier as FederatedClassifier
from fedbilevel.sklearn.estimators import FederatedCleaner as FederatedCleaner
from fedbilevel.sklearn.estimators import FederatedRegularizer as FederatedRegularizer
from fedbilevel.sklearn.estimators import FederatedReweighter as FederatedReweighter
from fedbilevel.sklearn.estimators import FederatedRidge as FederatedRidge
