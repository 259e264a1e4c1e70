"""What cells of notebooks show of runs and plans: live progress, curves, memory, pairs of replies.

Must not know how a run is made.
"""
