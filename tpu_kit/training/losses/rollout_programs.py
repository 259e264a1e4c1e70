"""The programs of `grpo` and `distill.on_policy` on one device: their shapes, their number, and their checks.

A rollout processes all its prompts at once (prefill), copies their KV cache for every sample, and runs a program that
decodes a block of tokens until every row has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from tpu_kit.config.loader import BatchPlan, ConfigError, TrainConfig, batch_arithmetic
from tpu_kit.config.schema import RlConfig
from tpu_kit.machine.checks import Check, Machine
from tpu_kit.model.shape_cache import shape_of

WHOLE_ROWS = 64
"""A TPU computes rows in multiples of this number; any other number of rows takes the time of the next multiple."""


_SAMPLING = (
    "prompts_per_update", "max_prompt_length", "max_completion_length", "sampling_temperature", "num_iterations",
    "steps_per_generation", "mask_truncated_completions",
)  # fmt: skip  # parameters of `rl` that distill.on_policy uses


def check_sampling(config: TrainConfig) -> None:
    """Raises ConfigError if parameters or formats of sampling or rewards are set in a run that does not use them.

    With optim.objective=policy it raises nothing. With distill.on_policy only the parameters of `rl` for sampling may
    differ from their defaults, otherwise none. data.format=prompt is for these two kinds of runs.
    """
    if config.optim.objective == "policy":
        return
    known, instead = RlConfig(), "here; train with grpo, or remove it"
    if config.distill.on_policy:
        instead = "with distill.on_policy, which samples each prompt once and has no rewards; remove it"
    used = _SAMPLING if config.distill.on_policy else ()
    changed = (one.name for one in fields(known) if getattr(config.rl, one.name) != getattr(known, one.name))
    found = [f"rl.{name}: has no effect {instead}" for name in changed if name not in used]
    if any(one.format == "prompt" for one in config.data.by_source) and not config.on_policy:
        text = "'prompt' has no replies to train on; train with grpo or distill.on_policy, or name columns"
        found.append(f"data.format: {text}")
    if found:
        raise ConfigError(found)


@dataclass(frozen=True)
class Rollout:
    """The shapes of a rollout on one replica, or on the mesh.

    Attributes:
        prompts: rows of a prefill.
        samples: rows of a decode step.
        widths: lengths to which prompts may be padded, tokens.
        slots: length of the KV cache, tokens.
        block: decode steps per program.
        tokens: most tokens of a completion.
        updates: number of updates that learn from the rollout.
        scored: whether the samples' log-probabilities are computed before the first of these updates.
    """

    prompts: int
    samples: int
    widths: tuple[int, ...]
    slots: int
    block: int
    tokens: int
    updates: int
    scored: bool

    @property
    def programs(self) -> dict[str, dict[str, int]]:
        """The sizes of every program at its widest, by name, as `trace.trace_generation` takes them."""
        sizes = {"rows": self.prompts, "width": self.widths[-1], "slots": self.slots}
        copy = {"samples": {**sizes, "samples": self.samples // self.prompts}} if self.copies else {}
        return {"prefill": sizes, **copy, "decode": {**sizes, "rows": self.samples}}

    @property
    def copies(self) -> bool:
        """Whether a prompt has several samples, so that its KV cache is copied."""
        return self.samples > self.prompts


def rollout_of(config: TrainConfig, replicas: int) -> Rollout | None:
    """Returns the rollout of a replica with the longest allowed prompts; None for a run that does not sample.

    `replicas` share the prompts, rounded up; on a mesh it is 1.
    """
    if not config.on_policy:
        return None
    from tpu_kit.generation.decoder import BLOCK, cache_slots, widths_to  # loads torch

    rl, most = config.rl, config.rl.longest_prompt(config.data.max_length)
    prompts = -(-rl.prompts_per_rollout // replicas)
    slots = cache_slots(most, rl.max_completion_length, BLOCK)
    scored = config.optim.objective == "policy" and rl.updates_per_rollout > 1
    return Rollout(
        prompts, prompts * config.num_generations, tuple(widths_to(most)), slots, BLOCK, rl.max_completion_length,
        rl.updates_per_rollout, scored,
    )  # fmt: skip


def update_plan(config: TrainConfig, replicas: int) -> BatchPlan:
    """Returns the batch arithmetic of a run; if it samples, for the longest prompts and completions.

    The tokens of such an update are the completions' tokens. A row may share prompts, see `policy_gradient.pack`.
    Raises ConfigError as `batch_arithmetic`.
    """
    plan = batch_arithmetic(config, replicas)
    if not config.on_policy:
        return plan
    rl, length, count = config.rl, config.data.max_length, config.num_generations
    prompt, completion = rl.longest_prompt(length) - 1, 1 + rl.max_completion_length
    shares = config.optim.objective == "policy" and shape_of(config.model).sees_all
    most = max(1, min(count, (length - prompt) // completion)) if shares else 1
    rows = 0
    for size, groups in ((most, count // most), (count % most, 1)):
        if size:
            rows += -(-rl.prompts_per_update * groups // (length // (prompt + size * completion)))
    passes = -(-rows // plan.global_batch_size)
    return replace(
        plan, gradient_accumulation=passes, global_batch_size=passes * plan.global_batch_size,
        tokens_per_update=rl.prompts_per_update * count * rl.max_completion_length,
    )  # fmt: skip


def program_count(config: TrainConfig, replicas: int) -> dict[str, int]:
    """Returns how many programs a run that samples compiles at most, by kind.

    The kinds are prefill, samples (copies of the KV cache), decode, accumulate, apply, and "log-probabilities before".
    A count may be 0. `config` must be of a run that samples.
    """
    rollout = rollout_of(config, replicas)
    assert rollout is not None
    # An evaluation fills the rows of the samples with held-out prompts, which takes another copy program.
    added = int(bool(config.tracking.eval_generate_rows) and rollout.copies)
    return {"prefill": len(rollout.widths), "samples": rollout.copies + added, "decode": 1, "accumulate": 1,
            "apply": 1, "log-probabilities before": int(rollout.scored)}  # fmt: skip


def whole_prompts(config: TrainConfig, replicas: int) -> int:
    """Returns the least `rl.prompts_per_update` whose completions are multiples of `WHOLE_ROWS` in every replica."""
    count, steps = config.num_generations, config.rl.steps_per_generation
    each = math.lcm(WHOLE_ROWS, count) // count * replicas
    return each // math.gcd(each, steps)


def smaller(config: TrainConfig, replicas: int) -> list[tuple[str, Sequence[int], str]]:
    """Returns (name, lower values, effect) of the two parameters that reduce a rollout's memory.

    The first is rl.steps_per_generation, with [1], or [] if it is 1. The second is rl.prompts_per_update, with lower
    multiples of `whole_prompts`, then all lower values below `whole_prompts`. The values are in falling order, and
    `effect` is a text such as "fewer prompts an update".
    """
    rl, whole = config.rl, whole_prompts(config, replicas)
    prompts = [n for n in range(rl.prompts_per_update - 1, 0, -1) if n % whole == 0 or n < whole]
    return [
        ("rl.steps_per_generation", [1] if rl.steps_per_generation > 1 else [], "fewer prompts a rollout"),
        ("rl.prompts_per_update", prompts, "fewer prompts an update"),
    ]


def warnings_of(config: TrainConfig, replicas: int) -> list[str]:
    """Returns a list with a warning if a rollout wastes a TPU's time; empty if not, or for a run that does not sample.

    It warns if a replica's completions in a rollout are no multiple of `WHOLE_ROWS`.
    """
    if not config.on_policy:
        return []
    rl, count = config.rl, config.num_generations
    rows = -(-rl.prompts_per_rollout // replicas) * count
    if rows % WHOLE_ROWS == 0:
        return []
    each = whole_prompts(config, replicas)
    return [
        f"{rl.prompts_per_rollout} prompts of a rollout x {count} completions are {rows} rows in each of {replicas} "
        f"replicas, no multiple of {WHOLE_ROWS}: a TPU takes the time of the next multiple, which "
        f"rl.prompts_per_update={-(-rl.prompts_per_update // each) * each} fills"
    ]


def check_rollouts(at: Machine, config: TrainConfig, tpu_replicas: int | None) -> Iterator[Check]:
    """Yields one check of a run that samples, with the result "failure", "warning" or "ok".

    It fails for several hosts, if `find_hosts` or `Rewards` raises ValueError, and warns as `warnings_of`.

    Args:
        at: the machine.
        config: the run; yields nothing for a run that does not sample.
        tpu_replicas: number of replicas on TPUs; None on other devices, for no warning.
    """
    from tpu_kit.distributed.hosts import find_hosts
    from tpu_kit.generation.evaluation.rewards import Rewards

    if not config.on_policy:
        return
    try:
        judges = "the teacher" if config.distill.on_policy else ", ".join(Rewards(config).names)
        hosts = find_hosts(at).count
    except ValueError as error:
        yield Check("Rollouts", "failure", str(error), "rl.reward_funcs=[auto]")
        return
    sizes = f"{config.rl.prompts_per_rollout} prompts x {config.num_generations} completions"
    text = f"{sizes} a rollout, judged by {judges}"
    if hosts > 1:
        text += f"; sampling is for one host, not {hosts}"
        yield Check("Rollouts", "failure", text, "one host")
    elif tpu_replicas and (notes := warnings_of(config, tpu_replicas)):
        yield Check("Rollouts", "warning", text, notes[0])
    else:
        yield Check("Rollouts", "ok", text)
