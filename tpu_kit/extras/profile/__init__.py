"""Where the time of a training step goes, and what to change.

Offers `profile.profile`: a trace of a short run of the real step, or the compiled program of a TPU that is not here.
Nothing that trains knows it: the loop calls `Trainer.mark`, which does nothing unless a profile sets it.
"""
