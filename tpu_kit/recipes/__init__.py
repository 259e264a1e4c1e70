"""Training recipes that a user starts; each is one short module.

Offers `sft.train`, `run_plan.plan_run`, which finds what a run is on this machine, and the commands around a run.
Must not be imported by the folders that it uses.
"""
