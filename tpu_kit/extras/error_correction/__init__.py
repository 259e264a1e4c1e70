"""A head that corrects the last hidden states: the objectives error-correction and error-correction-alone.

Offers `head.ErrorCorrection` and `head.ErrorCorrectionObjective`.
Must not know the training loop, checkpoints or exports.
"""
