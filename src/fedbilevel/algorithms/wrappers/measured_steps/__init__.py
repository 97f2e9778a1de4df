"""Steps that follow the curvature, and a run that survives steps that are too long."""

from fedbilevel.algorithms.wrappers.measured_steps.steps import (
    SteadySteps as SteadySteps,
)
from fedbilevel.algorithms.wrappers.measured_steps.steps import steadied as steadied
