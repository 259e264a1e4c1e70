"""Weights over the devices of a mesh: which dimension of a parameter is cut, and by which axis.

Offers `partition` and `sharding_rules`.
Must not start a mesh: `distributed` does.
"""
