"""What runs in each replica: its process, its backend and memory, collectives, and the rehearsal on XLA:CPU.

Offers `runtime.Runtime` and `backends`, the kinds of it; `worker` is the program of the other processes.
Must not know what the function of a launch computes.
"""
