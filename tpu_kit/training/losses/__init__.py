"""The losses of training, with what each needs: the chunked kernel, a teacher, rollouts.

Offers `loss`, which all of them call, `distillation` and `policy_gradient`.
Must not know the step or the loop around it.
"""
