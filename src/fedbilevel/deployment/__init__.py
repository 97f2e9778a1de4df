"""A named experiment on real sites: what the server does, and what a site does."""

from fedbilevel.deployment.server import serve as serve
from fedbilevel.deployment.settings import shared_settings as shared_settings
from fedbilevel.deployment.site import build_site as build_site
