"""The weights of base models and adapters: locates, reads, quantizes and identifies them.

Offers `source.locate`, `loading.load_base`, `quantization.quantize_model` and `saved_adapter.attach_adapter`.
Must not know about training.
"""
