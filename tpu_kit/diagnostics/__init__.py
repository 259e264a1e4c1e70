"""Whether a machine works: installation, doctor, and a smoke test of a whole run.

Offers `install.ensure`, `doctor.diagnose` and `smoke_test`.
Must not be needed by a run.
"""
