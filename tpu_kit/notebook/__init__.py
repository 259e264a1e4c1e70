"""Functions for notebooks and commands that test a machine: cells, batch runs, installation, doctor and verify.

Offers `cells`, `runner`, `install.ensure`, `doctor.diagnose` and `verify.verify`.
A run must not need this room; it must not compute results that other rooms compute.
"""
