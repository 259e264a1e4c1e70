"""Layers that only some models have: experts, linear attention, vision towers.

Offers one module per kind of layer.
Must not be needed by a model without such layers.
"""
