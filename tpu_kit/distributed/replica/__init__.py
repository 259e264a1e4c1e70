"""Code that runs in replicas: processes, backends, collectives, and the rehearsal on XLA:CPU.

Offers `runtime.Runtime` and its subclasses in `backends`; `worker` is the program of the launcher and the replicas.
Must not know the purpose of the function that a launch runs.
"""
