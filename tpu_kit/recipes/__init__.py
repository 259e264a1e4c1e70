"""Training recipes that a user starts, in short modules.

Offers `sft.train`, `run_plan.plan_run`, which plans a run on this machine, and the commands for a run.
Must not be imported by the folders that it uses.
"""
