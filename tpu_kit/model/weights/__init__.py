"""The weights of a base model and of an adapter: where they are, how they are read, rounded and identified.

Offers `source.locate`, `loading.load_base`, `quantization.quantize_model` and `saved_adapter.attach_adapter`.
Must not know how the model trains.
"""
