"""Compares the logits of an export with the tuned model's logits on the same prompts.

A new process, `python -m tpu_kit.exporting.equivalence JOB.json RESULT`, reads the export with transformers and PEFT or
with llama.cpp, so that objects in this process cannot replace a missing file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit.config.loader import ModelConfig
from tpu_kit.distributed.child_process import run_child
from tpu_kit.exporting.streaming import stream
from tpu_kit.model.weights.source import model_class

POSITIONS = 32  # last positions of a prompt whose logits are compared
NEW, LIKELIEST = 16, 10  # new tokens per prompt in llama.cpp, and likeliest tokens that it reports per new token
GREEDY = {"n_predict": NEW, "temperature": 0, "n_probs": LIKELIEST, "cache_prompt": False}
SECONDS = 3600

LIMITS = {"fp32": (0.01, 0.99), "f16": (0.05, 0.95), "bf16": (0.3, 0.9), "q8_0": (0.3, 0.9)}
"""Limits by weight type: the largest difference of a logit, in standard deviations of the tuned model's logits over the
vocabulary, and the smallest share of positions with the same likeliest token.

Measured for SmolLM2-135M with LoRA: see tests/exporting/test_export.py. Deeper models stay within the limits; an
adapter that is missing, wrongly scaled or on another layer does not."""

LOST = 0.5  # largest mean difference, as a share of the mean effect of tuning


@dataclass(frozen=True)
class LogitComparison:
    """The result of a comparison.

    Attributes:
        by: the program that read the export.
        unit: "logits", or "log-probabilities" if the program reports no logits.
        positions: number of compared tokens.
        largest: largest absolute difference from the tuned model.
        limit: upper limit of `largest`, in its unit.
        agreement: share of positions with the same likeliest token.
        least: lower limit of `agreement`.
        mean: mean absolute difference from the tuned model; at most `LOST` of `effect` is within the limits.
        effect: mean absolute difference between the tuned model's logits and the base's.
        share: share of positions, those with the smallest differences, that `largest` covers.
    """

    by: str
    unit: str
    positions: int
    largest: float
    limit: float
    agreement: float
    least: float
    mean: float
    effect: float
    share: float = 1.0

    @property
    def problems(self) -> list[str]:
        """Texts for `largest` > `limit`, `agreement` < `least`, `mean` > `LOST` * `effect`, and NaNs; empty if none."""
        texts = {
            f"the largest difference of its {self.unit}{self._where} is {self.largest:.4g}, more than {self.limit:.4g}":
                self.largest <= self.limit,
            f"its likeliest token is the tuned model's at only {self.agreement:.1%} of the positions":
                self.agreement >= self.least,
            f"it differs from the tuned model by {self.mean:.3g} on average, and tuning changed the base model by "
            f"{self.effect:.3g}: rounding or a missing adapter hides the tuning; use a finer format (fp32, f16), or "
            "train longer": self.mean <= LOST * self.effect,
        }  # fmt: skip
        return [text for text, holds in texts.items() if not holds]  # a NaN fits no bound

    @property
    def _where(self) -> str:
        """The share of the positions for texts; empty if it is all."""
        return f" at {self.share:.0%} of the positions" if self.share < 1 else ""

    def __str__(self) -> str:
        return (
            f"{self.by}: largest difference of {self.unit}{self._where} {self.largest:.4g} (limit {self.limit:.4g}), "
            f"likeliest token the same at {self.agreement:.1%} of {self.positions} positions (limit {self.least:.0%}); "
            f"mean difference {self.mean:.3g}, while tuning changed the base by {self.effect:.3g}"
        )


def logits(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    positions: int = POSITIONS,
    pictures: Sequence[Mapping[str, torch.Tensor]] = (),
) -> list[torch.Tensor]:
    """Computes, on the CPU, a model's logits at the last positions of every prompt: (up to `positions`, V), fp32.

    Args:
        model: of transformers or PEFT, on the CPU and in evaluation mode.
        prompts: token ids, which may carry pictures (`PicturedIds`); they run one at a time.
        positions: maximum number of positions per prompt.
        pictures: the model's keyword arguments for pictures, a mapping for every prompt ({} without pictures). If the
            sequence is empty, they are made from the pictures that the ids carry.
    """
    given = pictures or pictures_of(prompts) or [{}] * len(prompts)
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([[*ids]]), use_cache=False, **more).logits[0, -positions:].float()
            for ids, more in zip(prompts, given, strict=True)
        ]


def pictures_of(prompts: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
    """Returns a transformers model's keyword arguments for the pictures of every prompt; an empty list without any."""
    pictured = any(hasattr(ids, "pictures") for ids in prompts)
    return [ids.for_transformers() if hasattr(ids, "pictures") else {} for ids in prompts] if pictured else []


def compare(
    tuned: Sequence[torch.Tensor], exported: Sequence[torch.Tensor], effect: float, stored: str, by: str,
    mixture: bool = False,
) -> LogitComparison:  # fmt: skip
    """Compares an export's logits with the tuned model's logits; raises nothing, see `LogitComparison.problems`.

    If rounding routes a token to other experts, the logits of its position change by several times the limit. In random
    mixtures in bf16, this affected at most 8 % of the positions; a missing adapter affects all positions.

    Args:
        tuned: the tuned model's logits per prompt, (positions, V).
        exported: the export's logits, of the same shapes.
        effect: `mean_difference` between tuned model and base.
        stored: the type of the export's weights, a key of `LIMITS`.
        by: the program that read the export.
        mixture: whether the model has experts. If True, `LogitComparison.largest` covers only the share `least` of the
            positions, with the smallest differences; if False, it covers all.
    """
    here, there = torch.cat(list(tuned)), torch.cat(list(exported))
    same = here.argmax(1) == there.argmax(1)
    check = _check(by, "logits", (here - there).abs(), same, here.std(dim=1), effect, stored)
    if not mixture:
        return check
    largest = (here - there).abs().amax(1).quantile(check.least)
    return replace(check, largest=float(largest), share=check.least)


def mean_difference(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """Returns the mean absolute difference of two models' logits."""
    return float((torch.cat(list(first)) - torch.cat(list(second))).abs().mean())


def reload(folder: Path, prompts: Sequence[Sequence[int]], base: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """Returns an exported folder's logits as `logits` at `POSITIONS`, computed by transformers in a new process.

    Args:
        folder: a whole model, or an adapter.
        prompts: token ids, which may carry pictures.
        base: for an adapter, the arguments of transformers' `from_pretrained` for its base model; None: a whole model.

    Raises:
        ValueError: the folder cannot be read, or its weights do not fit the model; the text ends with the error of the
            process. Or the process takes more than `SECONDS`.
    """
    job: dict[str, Any] = {"folder": str(folder.absolute()), "base": base, "prompts": [*prompts]}
    if not (pictures := pictures_of(prompts)):
        return in_child(job)
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as scratch:
        torch.save(pictures, file := f"{scratch}/pictures.pt")
        return in_child(job | {"pictures": file})


Answer = list[tuple[int, dict[int, float]]]
"""The tokens of greedy decoding, with the log-probabilities of the likeliest tokens at every token."""


def run_llama_cpp(
    model: Path, prompts: Sequence[Sequence[int]], texts: Sequence[str], adapter: Path | None = None
) -> tuple[list[Answer], list[int]]:
    """Runs a GGUF file in llama.cpp, in a new process on the CPU.

    Args:
        model: the file.
        prompts: token ids to continue.
        texts: texts to tokenize.
        adapter: the file of a LoRA adapter, if `model` is its base model.

    Returns:
        The greedy answers to the prompts, of up to `NEW` tokens, and the number of tokens of every text.

    Raises:
        ValueError: llama.cpp refuses the file; the text ends with its error.
    """
    lora = str(adapter.absolute()) if adapter else None
    job = {"gguf": str(model.absolute()), "lora": lora, "prompts": [*prompts], "texts": [*texts]}
    answers, lengths = in_child(job)
    return answers, lengths


def compare_answers(
    model: torch.nn.Module, prompts: Sequence[Any], answers: Sequence[Answer], effect: float, stored: str,
    by: str = "llama.cpp",
) -> LogitComparison:  # fmt: skip
    """Compares another program's log-probabilities in its answers to `prompts` with `model`'s; raises nothing.

    Args:
        model: the tuned model, on the CPU and in evaluation mode.
        prompts: token ids, which may carry pictures.
        answers: the program's greedy answer to every prompt; the log-probabilities in it are compared.
        effect: `mean_difference` between tuned model and base.
        stored: the type of the export's weights, a key of `LIMITS`.
        by: the other program.
    """
    differences, same, spreads = [], [], []
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = [token for token, _ in answer]
        (rows,) = logits(model, [ids + tokens], len(tokens) + 1)  # the sum keeps the pictures of ids
        for row, (_, top) in zip(rows[:-1], answer, strict=True):
            likeliest, logprobs = list(top), torch.log_softmax(row, 0)
            differences.append((logprobs[likeliest] - torch.tensor(list(top.values()))).abs())
            same.append(int(logprobs.argmax()) == max(likeliest, key=top.__getitem__))
            spreads.append(row.std())
    spread = torch.stack(spreads)
    return _check(by, "log-probabilities", torch.cat(differences), torch.tensor(same), spread, effect, stored)


def _check(
    by: str, unit: str, differences: torch.Tensor, same: torch.Tensor, spread: torch.Tensor, effect: float, stored: str
) -> LogitComparison:
    """Returns a comparison with the limits of `stored`; `same` and `spread` (logits' deviation) are by position.

    `differences` are absolute, of any shape; `by`, `unit` and `effect` are put into the result.
    """
    limit, least = LIMITS[stored]
    return LogitComparison(
        by, unit, len(same), float(differences.max()), limit * float(spread.mean()), float(same.float().mean()), least,
        float(differences.mean()), effect,
    )  # fmt: skip


def in_child(
    job: dict[str, Any], module: str = "tpu_kit.exporting.equivalence", variables: Mapping[str, str] = {}
) -> Any:
    """Runs `python -m MODULE JOB.json RESULT` with a job in a new process without accelerators; returns the result.

    The job has JSON values. The module writes the result (tensors and plain values) to RESULT with `torch.save`.
    `variables` are added to the environment. Raises ValueError if the process fails or takes more than `SECONDS`.
    """
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    environment |= variables
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as folder:
        order, result = Path(folder) / "job.json", Path(folder) / "result.pt"
        order.write_text(json.dumps(job))
        try:
            arguments = ["-m", module, str(order), str(result)]
            done = run_child(arguments, environment, seconds=SECONDS)
        except TimeoutError as error:
            raise ValueError(f"the export cannot be read in a new process: {error}") from None
        if done.status or not result.is_file():
            said = " ".join(done.last_lines(6).split())
            raise ValueError(f"the export cannot be read in a new process ({done.how}): {said}")
        return torch.load(result, weights_only=True)


# ---------------------------------------------------------------------------------------------------- in the child


def _read(job: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the export's logits on a job's "prompts", with its file of "pictures", if any."""
    pictures = torch.load(job["pictures"], weights_only=True) if "pictures" in job else ()
    return logits(_stock(job), job["prompts"], pictures=pictures)


def _stock(job: dict[str, Any]) -> torch.nn.Module:
    """Returns the model of a job's "folder" in fp32 for evaluation; raises ValueError if weights do not fit.

    For an adapter, "base" has the arguments of `from_pretrained` for its base model; for a whole model it is None. If
    the job has "pictures", the model reads images.
    """
    options = job["base"] or {"pretrained_model_name_or_path": job["folder"]}
    config = ModelConfig(
        name=options["pretrained_model_name_or_path"], base_dtype="fp32",
        revision=options.get("revision"), gguf_file=options.get("gguf_file"), images="pictures" in job,
    )  # fmt: skip
    if streamed := stream(config, Path(job["folder"]) if job["base"] else None):
        return streamed.model
    model, info = model_class(config).from_pretrained(**options, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        wrong = {name: sorted(map(str, info[name]))[:5] for name in ("missing_keys", "unexpected_keys")}
        raise ValueError(f"weights that do not fit: {wrong}")
    if job["base"]:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, job["folder"], torch_device="cpu")
    return model.eval()


def llama_cpp(job: dict[str, Any], context: int) -> Any:
    """Starts llama.cpp's server (`xllamacpp.Server`) on the CPU with a job's files, for `context` tokens; returns it.

    "gguf" is the path of the model's file. Other entries may be missing or None: "lora" and "projector" are paths of
    files, "image_tokens" is the maximum of a picture's tokens, for models whose pictures have a variable number. Errors
    of xllamacpp, also if it is not installed, are raised unchanged.
    """
    xllamacpp = importlib.import_module("xllamacpp")  # it has no types

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = job["gguf"], context
    params.n_parallel, params.n_gpu_layers, params.warmup, params.fit_params = 1, 0, False, False
    # Waiting threads spin, so fewer threads are faster if other programs use the cores too.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, (os.cpu_count() or 2) // 2)
    if job.get("lora"):
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(job["lora"], 1.0)]
    if job.get("projector"):
        params.mmproj.path, params.mmproj_use_gpu = job["projector"], False
    if job.get("image_tokens"):
        params.image_min_tokens, params.image_max_tokens = 1, job["image_tokens"]
    return xllamacpp.Server(params)


def answer_of(places: Sequence[Mapping[str, Any]]) -> Answer:
    """Converts the token entries of llama.cpp's server to an answer."""
    return [(place["id"], {top["id"]: top["logprob"] for top in place["top_logprobs"]}) for place in places]


def _llama_cpp(job: dict[str, Any]) -> tuple[list[Answer], list[int]]:
    """Returns answers to a job's "prompts" (ids), and token counts of "texts"; "gguf", "lora" (or None) are files."""
    server = llama_cpp(job, max(map(len, job["prompts"])) + 2 * NEW)
    replies = [server.handle_completions({"prompt": prompt, **GREEDY}) for prompt in job["prompts"]]
    answers = [answer_of(reply["choices"][0]["logprobs"]["content"]) for reply in replies]
    replies = [server.handle_completions({"prompt": text, "n_predict": 1}) for text in job["texts"]]
    return answers, [reply["usage"]["prompt_tokens"] for reply in replies]


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.save(_llama_cpp(job) if "gguf" in job else _read(job), sys.argv[2])
