"""Weights on the devices of a mesh: the dimensions of a parameter that are sharded, and the mesh axes.

Offers `partition` and `sharding_rules`.
Must not start a mesh: `distributed` does.
"""
