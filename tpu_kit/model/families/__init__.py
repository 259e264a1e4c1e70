"""Layers that only some models have: experts, linear attention.

Offers one module for each kind of layer.
Must not be needed by a model without such layers.
"""
