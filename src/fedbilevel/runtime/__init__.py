"""Runs an algorithm on a problem: the same numbers on every runtime."""

from fedbilevel.runtime.checkpoint_schedule import Checkpoints as Checkpoints
from fedbilevel.runtime.configuration import configure as configure
from fedbilevel.runtime.counts import Ledger as Ledger
from fedbilevel.runtime.counts import count as count
from fedbilevel.runtime.disk_simulator import (
    DiskSimulatorRuntime as DiskSimulatorRuntime,
)
from fedbilevel.runtime.driver import Outcome as Outcome
from fedbilevel.runtime.driver import execute as execute
from fedbilevel.runtime.job import Job as Job
from fedbilevel.runtime.job import State as State
from fedbilevel.runtime.mesh import join as join
from fedbilevel.runtime.progress import Event as Event
from fedbilevel.runtime.progress import OnRound as OnRound
from fedbilevel.runtime.progress import Watch as Watch
from fedbilevel.runtime.progress import reporting as reporting
from fedbilevel.runtime.reference import ReferenceRuntime as ReferenceRuntime
from fedbilevel.runtime.sampling import Sampling as Sampling
from fedbilevel.runtime.simulator import SimulatorRuntime as SimulatorRuntime
from fedbilevel.runtime.stopping import Stopping as Stopping
from fedbilevel.runtime.sweeping import SweepRuntime as SweepRuntime
