"""Files and commands that run the configuration on a slice of several hosts.

Offers `slice_job.check_job`, which checks a run for a slice, `engines.ENGINES`, the writers for SkyPilot, JobSet, xpk
and gcloud, and `report.write`, behind the command `pod`.
Must not start anything, load torch, or import an engine.
"""
