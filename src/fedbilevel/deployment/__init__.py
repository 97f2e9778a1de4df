"""Starts the processes of a federation over Flower, and keeps them going.

Their work is in `fedbilevel.federation` and `fedbilevel.experiments.federated`. Needs
`fedbilevel[flower]`.
"""
