"""Python runs this at the start of each process of the tests, which have this folder on their path.

Importing torch, torch_xla and transformers makes millions of objects and almost no garbage. To look for garbage after
each 700 objects takes a quarter of that time, in each of hundreds of processes.
"""

import atexit
import gc

gc.set_threshold(50_000)
atexit.register(gc.freeze)  # and at the end a second, to look through them once more
