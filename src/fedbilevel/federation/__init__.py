"""A federation of sites that exchange packets with a server, whatever carries them.

`Site` is one client, `FederationRuntime` runs rounds on all of them, and `Roster` finds
them through a `Transport`; the one over Flower is in `fedbilevel.federation.flower`.
"""

from fedbilevel.federation.ledger import ServerReleases as ServerReleases
from fedbilevel.federation.ledger import SiteLimits as SiteLimits
from fedbilevel.federation.server.blind_job import (
    algorithm_fingerprint as algorithm_fingerprint,
)
from fedbilevel.federation.server.blind_job import blind_job as blind_job
from fedbilevel.federation.server.blind_job import (
    settings_fingerprint as settings_fingerprint,
)
from fedbilevel.federation.server.roster import Identity as Identity
from fedbilevel.federation.server.roster import Member as Member
from fedbilevel.federation.server.roster import Roster as Roster
from fedbilevel.federation.server.roster import Terms as Terms
from fedbilevel.federation.server.roster import Transport as Transport
from fedbilevel.federation.server.runtime import Federated as Federated
from fedbilevel.federation.server.runtime import FederationRuntime as FederationRuntime
from fedbilevel.federation.site import Fingerprints as Fingerprints
from fedbilevel.federation.site import Site as Site
from fedbilevel.federation.wire import PROTOCOL as PROTOCOL
