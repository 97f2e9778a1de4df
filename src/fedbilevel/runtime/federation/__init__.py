"""A federation of sites that exchange packets, whatever carries them."""

from fedbilevel.runtime.federation.coordinator import Federated as Federated
from fedbilevel.runtime.federation.coordinator import (
    FederationRuntime as FederationRuntime,
)
from fedbilevel.runtime.federation.plan import algorithm_mark as algorithm_mark
from fedbilevel.runtime.federation.plan import server_job as server_job
from fedbilevel.runtime.federation.plan import settings_mark as settings_mark
from fedbilevel.runtime.federation.roster import Identity as Identity
from fedbilevel.runtime.federation.roster import Member as Member
from fedbilevel.runtime.federation.roster import Roster as Roster
from fedbilevel.runtime.federation.roster import Terms as Terms
from fedbilevel.runtime.federation.roster import Transport as Transport
from fedbilevel.runtime.federation.site import Marks as Marks
from fedbilevel.runtime.federation.site import Site as Site
