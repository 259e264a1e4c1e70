"""Profiles a training step: where its time goes, and which parameter to change.

Offers `profile.profile`: a trace of a short run of the real step, or the program compiled for an absent TPU.
Training does not import it: the loop calls `Trainer.mark`, which does nothing unless a profile replaces it.
"""
