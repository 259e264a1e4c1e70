"""Whether a machine works: installation, doctor, and what its devices compute, up to a small run.

Offers `install.ensure`, `doctor.diagnose` and `verify.verify`.
Must not be needed by a run.
"""
