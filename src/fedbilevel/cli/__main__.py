"""Lets `python -m fedbilevel.cli` start it."""

from fedbilevel.cli import main

main()
