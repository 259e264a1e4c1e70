"""Training losses and their inputs: the chunked kernel, teachers, rollouts.

Offers `loss`, which every loss calls, `distillation`, `policy_gradient` and `preference`.
Must not know the training step or the training loop.
"""
