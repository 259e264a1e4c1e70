"""The large libraries, loaded before the processes of `child_processes.run_loaded` are forked.

torch_xla is not among them: it reads the environment of each of those processes when they import it.
"""

import gc

import datasets  # noqa: F401
import peft  # noqa: F401
import torch._dynamo  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

import tpu_kit.recipes.sft  # noqa: F401

gc.freeze()  # or the first search for garbage copies every page of them
