"""What notebooks call, and whether a machine works: cells, runs without a browser, installation, doctor, verify.

Offers `cells`, `runner`, `install.ensure`, `doctor.diagnose` and `verify.verify`.
Must not be needed by a run, nor compute results that other rooms compute.
"""
