"""Carries the packets of a federation over Flower.

Needs `fedbilevel[flower]`. The persistent node uses internals of flwr 1.41, which is
why that version is pinned.
"""
