"""The memory of a training step by formula: arguments, temporaries, and their sum.

Offers `memory_estimate`; `argument_memory` and `activation_memory` are its parts.
Must not load torch or weights.
"""
