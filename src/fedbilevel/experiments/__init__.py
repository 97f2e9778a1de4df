"""Experiments by name: tasks, algorithms and options as text, for the command line."""

from fedbilevel.experiments.built import Built as Built
from fedbilevel.experiments.experiment import Experiment as Experiment
