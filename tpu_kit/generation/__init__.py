"""Text from a model: sampling, key/value cache, decoding, replicas that answer, tree search.

Offers `service.generate`, `generator.Generator` and `tree_search.think`; `reference_check` compares with transformers.
Must not know training.
"""
