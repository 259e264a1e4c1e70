"""Imports the large libraries; `child_processes.run_loaded` forks its processes from a process with this module.

torch_xla is not imported here: each child imports it, so that it reads the child's environment.
"""

import gc

import datasets  # noqa: F401
import peft  # noqa: F401
import torch._dynamo  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

import tpu_kit.recipes.sft  # noqa: F401

gc.freeze()  # otherwise a child's first garbage collection copies all their pages
