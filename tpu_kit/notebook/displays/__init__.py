"""Displays of runs and plans for notebook cells.

Offers the live progress, curves and figures of a run, the memory of a plan, and pairs of replies.
Must not know how a run is made.
"""
