"""Writes files and commands that run a configuration on a slice of several hosts.

Offers `slice_job.check_job`, `engines.ENGINES` (SkyPilot, JobSet, xpk, gcloud) and `report.write`.
Must not start anything, load torch, or import an engine.
"""
