"""What a step of training spends its time and memory on, and what to change.

It offers `profile`: a short run of the real step with a trace of its steady state, or the compiled program of a TPU
that the machine lacks, as tables, pictures and ranked advice.
It knows the recipes and the planner. Nothing that trains knows it: the loop calls `Trainer.mark`, which does nothing
unless a profile sets it.
"""
