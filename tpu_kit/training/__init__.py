"""The training step and the training loop: losses, optimizers, metrics, checkpoints, resume.

Offers `step.train_step` and `trainer.Trainer`, which runs in each replica.
Must not know the launch, the planner or notebooks.
"""
