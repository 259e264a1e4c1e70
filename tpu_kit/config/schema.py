"""Declares every parameter of a run with its type, default, bounds and meaning.

conflicts.py has the rules across parameters. loader.py reads the values; other modules import the sections from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from tpu_kit.config.conflicts import conflicts
from tpu_kit.config.fields import ConfigError, ConfigField, knob, knobs_of, nest, show
from tpu_kit.config.files.other_trainers import advice
from tpu_kit.config.hub import HubConfig, read_hub_address
from tpu_kit.config.mesh import parse_rules
from tpu_kit.config.named_values import (
    REWARDS,
    VERIFIERS,
    check_objective,
    check_rewards,
    check_updates_between,
    check_verifier,
    layer_pairs,
)
from tpu_kit.config.registry import OBJECTIVES, installed
from tpu_kit.config.sections.data import DataConfig, DataSource
from tpu_kit.config.sections.preference import PreferenceConfig


@dataclass(frozen=True)
class ModelConfig:
    """The base model."""

    name: str = knob("embedded", 'Hub id, a folder, or "embedded": the small model that comes with the kit.')
    revision: str | None = knob(None, "Branch, tag or commit on the hub.")
    gguf_file: str | None = knob(None, "GGUF file in that folder or repository to read the weights from.")
    base_dtype: Literal["bf16", "fp32", "int8", "int4"] = knob(
        "bf16", "Type of the frozen base weights and of matrix products; with int8 and int4, products are in bf16."
    )
    quant_group: int = knob(128, "With base_dtype=int4, columns of a weight that share a scale.", at_least=16)
    quant_cache: str | None = knob(
        "~/.cache/tpu_kit/quantized", "Folder that caches int8 and int4 weights for later runs; null = no cache."
    )
    attention: Literal["auto", "splash", "sdpa"] = knob("auto", "auto: the splash kernel on TPU, sdpa elsewhere.")
    images: bool = knob(False, "Load the model's vision part too, and train on rows with images.")
    trust_remote_code: bool = knob(False, "Run code from the model's repository.")


EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "embedding")
"""Names that models give their input and output embeddings."""
ADDED = "added"
"""The value of `lora.tokens` that means the new tokens of the rows; the plan replaces it by their names."""


@dataclass(frozen=True)
class LoraConfig:
    """Which weights are trained."""

    r: int = knob(
        16, "Rank of the adapters; 0 trains all weights instead (full fine-tuning).", at_least=0, at_most=16384
    )
    alpha: float = knob(32.0, "The adapters are scaled by alpha / r (rslora: alpha / sqrt(r)).", above=0)
    dropout: float = knob(0.0, "Dropout on the adapters' input.", at_least=0, below=1)
    experts: int = knob(
        0, "Rank of separate adapters for every expert, scaled like the others; 0 = none.", at_least=0, at_most=1024
    )
    targets: str | tuple[str, ...] = knob(
        "all-linear", "all-linear, or the name endings of the layers to adapt, also embed_tokens and lm_head."
    )
    tokens: str | tuple[str, ...] | None = knob(
        None,
        "Tokens whose embedding vectors are trained, as text or as id:NUMBER; added = all new tokens in the rows; "
        "null = none.",
    )
    full: tuple[str, ...] | None = knob(
        None, "Embeddings that are trained in full beside the adapters: embed_tokens, lm_head; null = none."
    )
    rslora: bool = knob(False, "Scale the adapters by alpha / sqrt(r) (rsLoRA).")
    dora: bool = knob(False, "Train magnitude and direction of the weights separately (DoRA).")
    vision: bool = knob(False, "Also adapt the projector, which maps image features into the text model.")
    init: Literal["default", "gaussian"] = knob("default", "PEFT's initialisation of the adapters.")
    plus: float = knob(1.0, "Learning rate of the B matrices, as a multiple of the A matrices' rate (LoRA+).", above=0)
    adapter: str | None = knob(None, "Adapter folder of a run, local or in gs://, to start training from.")

    @property
    def finds_tokens(self) -> bool:
        """Whether `tokens` means the new tokens of the rows, which the plan has not named yet."""
        return self.tokens == ADDED

    @property
    def adapts_embeddings(self) -> bool:
        """Whether `targets` names an embedding: the last part of a name is in `EMBEDDINGS`."""
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        return any(target.rpartition(".")[2] in EMBEDDINGS for target in targets)

    @property
    def token_names(self) -> tuple[str, ...]:
        """The tokens of `tokens` without repetitions; () if it is null, or "added" and not resolved yet."""
        if self.tokens is None or self.finds_tokens:
            return ()
        return (self.tokens,) if isinstance(self.tokens, str) else tuple(dict.fromkeys(self.tokens))


USUAL = "usual for this model"
"""The source shown for a learning rate that is not given."""
# (model is embedded, adapters are trained) -> (rate of `grpo` and `dpo`, rate of all other runs). The embedded model
# has a million weights and takes larger steps.
_USUAL_RATES = {
    (True, True): (6e-4, 5e-3), (True, False): (2e-4, 2e-3), (False, True): (2e-5, 2e-4), (False, False): (2e-6, 2e-5),
}  # fmt: skip
LEAST_UPDATES = 20
"""With fewer updates a small data set is hardly learned."""
MOST_ROWS = 10**6
"""The largest batch_size: far more than any chip holds."""


@dataclass(frozen=True)
class OptimConfig:
    """The batch, the optimizer and how long to train."""

    batch_size: int | Literal["auto"] = knob(
        4,
        "Rows per replica in one forward and backward pass; auto = the fastest number that fits.",
        at_least=1,
        at_most=MOST_ROWS,
    )
    global_batch_size: int | None = knob(
        None, "Rows per update over all replicas; gradient_accumulation follows from it.", at_least=1, at_most=10**8
    )
    gradient_accumulation: int = knob(
        1, "Passes per update; leave it at 1 if global_batch_size is given.", at_least=1, at_most=10**6
    )
    objective: str = knob(
        "supervised", f"{', '.join(installed(OBJECTIVES))}, or module:function.", check=check_objective
    )
    optimizer: Literal["adamw", "adafactor"] = knob("adamw", "adafactor stores almost no moments. Both run on XLA.")
    learning_rate: float | None = knob(
        None, "Peak learning rate, after warm-up; null = 2e-4, divided by 10 with lora.r=0 and again by 10 in grpo and "
        "dpo; the embedded model has higher rates.", above=0,
    )  # fmt: skip
    embedding_learning_rate: float | None = knob(
        None, "Peak learning rate of trained input and output embeddings; null = learning_rate.", above=0
    )
    min_learning_rate_ratio: float = knob(0.0, "Final learning rate, as a share of the peak.", at_least=0, at_most=1)
    schedule: Literal["cosine", "linear", "constant"] = knob("cosine", "Shape of the decay.")
    warmup_steps: int = knob(0, "Updates of linear warm-up.", at_least=0)
    warmup_ratio: float = knob(0.0, "Warm-up as a share of all updates, instead of warmup_steps.", at_least=0, below=1)
    max_steps: int | None = knob(None, "Number of updates; overrides epochs.", at_least=1, at_most=10**7)
    epochs: float | None = knob(1.0, "Passes over the data, if max_steps is null.", above=0, at_most=1e5)
    weight_decay: float = knob(0.0, "Decoupled weight decay.", at_least=0)
    beta1: float = knob(0.9, "Decay rate of AdamW's mean of gradients.", at_least=0, below=1)
    beta2: float = knob(0.999, "Decay rate of AdamW's mean of squared gradients.", at_least=0, below=1)
    eps: float = knob(1e-8, "Added to the denominator of the update.", above=0)
    max_grad_norm: float = knob(1.0, "Clip the global norm of the gradients to this; 0 = never.", at_least=0)
    ema_decay: float = knob(
        0.0, "Decay of an exponential moving average of the trained weights; 0 = off.", at_least=0, below=1
    )
    remat: Literal["auto", "none", "outputs", "full", "blocks"] = knob(
        "auto",
        "Recomputation in the backward pass, which saves memory. full: whole layers; outputs: all but matrix products "
        "and attention; none: nothing, so layers run one by one, and on XLA compile for minutes; blocks: most layers "
        "twice, with only the input of every block of layers in memory. auto: on a TPU the choice with the shortest "
        "predicted run, elsewhere full.",
    )
    scan_layers: Literal["auto", "on", "off"] = knob(
        "auto",
        "Run equal layers as a loop over stacked weights. auto: on XLA unless remat=none; on: everywhere; off: treat "
        "no layers as equal.",
    )
    mlp_tile: int | None = knob(
        2048,
        "Tokens that an MLP processes at a time if layers run as a loop with remat=full or blocks; null = all.",
        at_least=1,
    )
    loss_chunk: int = knob(512, "Tokens per chunk of the loss; memory holds the logits of one chunk.", at_least=1)
    label_smoothing: float = knob(0.0, "Share of the target probability spread over all tokens.", at_least=0, below=1)
    on_nan: Literal["skip", "stop"] = knob(
        "skip", "Skip an update, or stop, if its loss or gradients are not finite or its loss explodes."
    )
    max_loss_rise: float | None = knob(
        5.0, "A loss explodes if it exceeds recent losses by this, in nats per token; null = never, the default for "
        "losses in other units (grpo, dpo, module:function, distill.hidden_weight, distill.embeddings_weight).",
        above=0,
    )  # fmt: skip
    eval_steps: int | float | None = knob(
        None, "Updates between evaluations; below 1, a share of all updates; null = only at the end.", above=0,
        check=check_updates_between,
    )  # fmt: skip
    early_stop_patience: int | None = knob(
        None, "Stop after this many evaluations without a better loss; null = never.", at_least=1
    )
    batch_growth_factor: float = knob(1.0, "Factor of gradient_accumulation at every growth of the batch.", at_least=1)
    batch_growth_steps: int | None = knob(None, "Updates between growths of the batch.", at_least=1)
    batch_growth_max: int | None = knob(None, "Rows per update at which growth stops.", at_least=1)
    batch_growth_lr: Literal["none", "sqrt", "linear"] = knob("none", "How the learning rate grows with the batch.")
    seed: int = knob(
        0, "Seed of the initialisation and of dropout; seed without its section sets data.seed too.",
        at_least=0, at_most=2**32 - 1,
    )  # fmt: skip

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes whole layers: remat=full, blocks, or auto that is not resolved yet."""
        return self.remat in ("auto", "full", "blocks")


@dataclass(frozen=True)
class DistillConfig:
    """The teacher of `distill`, and the losses between it and the model."""

    teacher: str | None = knob(None, "Hub id or folder of a teacher with the model's tokenizer; null = none.")
    teacher_dtype: Literal["bf16", "fp32", "int8", "int4"] = knob("bf16", "Type of the teacher's frozen weights.")
    teacher_trust_remote_code: bool = knob(False, "Run code from the teacher's repository.")
    divergence: Literal["forward", "reverse", "js"] = knob(
        "forward", "forward: KL(teacher || model); reverse: KL(model || teacher); js: Jensen-Shannon."
    )
    temperature: float = knob(1.0, "Divides the logits of teacher and model before the divergence.", above=0)
    logits_weight: float = knob(1.0, "Weight of the divergence.", at_least=0)
    labels_weight: float = knob(0.0, "Weight of the labels' negative log-likelihood.", at_least=0)
    hidden_weight: float = knob(0.0, "Weight of the squared difference between hidden states (layers).", at_least=0)
    embeddings_weight: float = knob(0.0, "Weight of the squared difference between input embeddings.", at_least=0)
    layers: str | None = knob(
        None, "Layers whose hidden states are compared, as model:teacher, counted from 1, such as 12:14,24:28.",
        check=layer_pairs,
    )  # fmt: skip
    files: str | None = knob(
        None, "Folder with the teacher's top logits for all rows, computed first if they are missing; null = keep the "
        "teacher in memory.",
    )  # fmt: skip
    top_k: int = knob(64, "Logits per token in files; all other logits together count as one outcome.", at_least=1)
    on_policy: bool = knob(
        False, "Train on completions that the model samples (settings: section rl), not on completions in the rows."
    )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """`layers` as pairs (model layer, teacher layer), counted from 1; () if it is null."""
        return layer_pairs(self.layers)


@dataclass(frozen=True)
class RlConfig:
    """Sampling in `grpo` and `distill.on_policy`, and the rewards and loss of `grpo`; the names are TRL's."""

    reward_funcs: tuple[str, ...] = knob(
        ("auto",),
        f"Rewards of a completion: {', '.join(VERIFIERS)} (1 if the answer is correct), {', '.join(REWARDS)}, "
        "regex:PATTERN or module:function.",
        check=check_rewards,
    )
    reward_weights: tuple[float, ...] | None = knob(None, "A weight for each reward; null = 1.")
    num_generations: int = knob(8, "Completions per prompt in grpo: the size of a group.", at_least=2, at_most=1024)
    prompts_per_update: int = knob(16, "Prompts per update.", at_least=1, at_most=10**5)
    steps_per_generation: int = knob(1, "Updates whose prompts are sampled in one rollout.", at_least=1, at_most=100)
    max_prompt_length: int | None = knob(
        None, "Longer prompts are dropped and counted; null = data.max_length - max_completion_length.", at_least=1
    )
    max_completion_length: int = knob(512, "Maximum tokens of a completion.", at_least=1)
    sampling_temperature: float = knob(
        1.0, "Divides the logits when completions are sampled, and in the loss of grpo.", above=0
    )
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo"] = knob(
        "dapo",
        "dapo and bnpo average over tokens, grpo over completions; dr_grpo divides by max_completion_length for every "
        "completion; cispo clips the weight of the gradient.",
    )
    importance_sampling_level: Literal["token", "sequence"] = knob(
        "token", "Likelihood ratios per token, or per completion (GSPO)."
    )
    epsilon: float = knob(0.2, "Ratios are clipped to at least 1 - epsilon.", at_least=0, at_most=1)
    epsilon_high: float = knob(
        0.28, "Ratios are clipped to at most 1 + epsilon_high; with cispo to epsilon_high itself.", at_least=0
    )
    delta: float | None = knob(None, "Also clip ratios to at most this if the advantage is negative.", above=1)
    beta: float = knob(0.0, "Weight of the KL divergence from the model without its adapter.", at_least=0)
    use_bias_correction_kl: bool = knob(True, "Multiply that divergence by the likelihood ratio.")
    entropy_coef: float = knob(0.0, "Weight of the entropy bonus, the mean entropy per token.", at_least=0)
    scale_rewards: Literal["group", "batch", "none"] = knob(
        "group", "Divide advantages by the standard deviation of the rewards in the group, or in the rollout (batch)."
    )
    num_iterations: int = knob(1, "How often the updates of a rollout are repeated.", at_least=1, at_most=100)
    mask_truncated_completions: bool = knob(False, "Completions that reach max_completion_length get no loss.")
    drop_zero_advantage: bool | None = knob(
        None,
        "Leave groups with equal rewards out of the passes, but count them in the average; null = true if beta and "
        "entropy_coef are 0.",
    )
    importance_sampling_correction: Literal[
        "auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = knob(
        "auto",
        "Weight the loss by the trainer's likelihood / the sampler's likelihood. Above importance_sampling_cap, the "
        "weight is the cap (truncate) or 0 (mask). auto: off with base_dtype=fp32, else sequence_mask.",
    )
    importance_sampling_cap: float = knob(3.0, "Limit of these weights.", above=0)

    def longest_prompt(self, max_length: int) -> int:
        """Returns the maximum tokens of a prompt beside a completion, in rows of `max_length` (data.max_length)."""
        room = max_length - self.max_completion_length
        return min(room, self.max_prompt_length or room)

    @property
    def drops_flat_groups(self) -> bool:
        """Whether groups with equal rewards are left out of the passes: `drop_zero_advantage`, with null resolved."""
        if self.drop_zero_advantage is None:
            return self.beta == 0 and self.entropy_coef == 0
        return self.drop_zero_advantage

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts that are sampled together, over all replicas."""
        return self.prompts_per_update * self.steps_per_generation

    @property
    def updates_per_rollout(self) -> int:
        """Updates that learn from one rollout, including repeated updates."""
        return self.steps_per_generation * self.num_iterations


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and whether to resume."""

    save_steps: int = knob(100, "Updates between checkpoints.", at_least=1)
    save_minutes: float | None = knob(None, "Maximum minutes between checkpoints; null = no limit.", above=0)
    keep: int = knob(2, "Newest complete checkpoints to keep; the best is kept too.", at_least=1)
    keep_every: int | None = knob(None, "Keep checkpoints whose step is a multiple of this; null = none.", at_least=1)
    budget_minutes: float | None = knob(
        None, "Minutes after its start at which a launch saves and ends, to be resumed later; null = no limit.",
        above=0,
    )  # fmt: skip
    resume: Literal["auto", "never", "must"] = knob(
        "auto",
        "auto: resume from the newest complete checkpoint if there is one; must: fail if there is none; never: start "
        "anew every time, and keep the checkpoints of only one earlier run.",
    )
    source: str | None = knob(
        None,
        "hf://owner/name or hf://owner/name@commit, with a checkpoint of hub.strategy=checkpoint. It is fetched before "
        "the run if it is newer than all in output_dir. Write checkpoint.source: source alone is data.source.",
        check=read_hub_address,
    )


@dataclass(frozen=True)
class LaunchConfig:
    """Devices, replicas, the mesh and timeouts."""

    device_type: Literal["auto", "tpu", "torch-tpu", "cuda", "cpu", "xla-cpu"] = knob(
        "auto",
        "auto: the TPU if there is one; xla-cpu: rehearse the TPU's code path on the CPU; torch-tpu: the TPU through "
        "torch_tpu, experimental.",
    )
    num_replicas: int | None = knob(None, "Replicas of the model; null = all devices.", at_least=1, at_most=1024)
    mesh: str | None = knob(
        None,
        "Axes that shard the model, such as fsdp=8 or fsdp=2,context=4 (data, fsdp, model, and context for the tokens "
        "of a row; -1 = all remaining devices). auto, null: one replica per device if the model fits on one; otherwise "
        "fsdp over the fewest TPU devices that hold it, and context if a row does not fit.",
    )
    mesh_rules: dict[str, str] | None = knob(  # noqa: RUF009 - a dataclasses.field, not a shared dictionary
        None,
        "Sharding rules that precede the built-in rules: glob of tensor names -> axes of the dimensions, such as "
        '{"*.router.weight": "fsdp,None"}.',
        check=parse_rules,
    )
    torch_compile: bool = knob(True, "Compile the model's layers with torch.compile, on CUDA.")
    hang_timeout: float = knob(
        600.0, "Seconds without a sign of life after which a launch is ended; three times as long in a collective.",
        above=0, at_most=1e9,
    )  # fmt: skip
    meeting_timeout: float = knob(300.0, "Seconds in which all hosts of a run must connect.", above=0, at_most=1e9)


@dataclass(frozen=True)
class TrackingConfig:
    """Metrics, where they are logged, and answers to held-out rows."""

    logging_steps: int = knob(10, "Updates between readings of the metrics from the device.", at_least=1)
    wandb: Literal["off", "online", "offline"] = knob("off", "Log to Weights & Biases.")
    wandb_project: str = knob("tpu_kit", "Weights & Biases project.")
    wandb_adapter: bool = knob(False, "Upload the trained adapter to the W&B run as an artefact.")
    tensorboard: bool = knob(False, "Write TensorBoard events.")
    generate_rows: int = knob(
        0, "Held-out rows to answer by generation before and after training; 0 = none.", at_least=0
    )
    eval_generate_rows: int = knob(
        0, "Held-out rows to answer at each evaluation, which then reports accuracy; 0 = none.", at_least=0
    )
    generate_tokens: int = knob(
        256,
        "Maximum tokens of an answer; evaluations during a run that samples use rl.max_completion_length.",
        at_least=1,
    )
    verifier: str = knob(
        "auto",
        f"Verifier of the answers: {', '.join(VERIFIERS)}, regex:PATTERN or module:function.",
        check=check_verifier,
    )


@dataclass(frozen=True)
class TrainConfig:
    """One run. Construction sets a null learning_rate to `usual_rate`; `sources` says "code" for values set in code.

    Raises:
        ConfigError: on construction, with all problems: invalid values, and the contradictions of `conflicts`.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    output_dir: str | None = knob(
        None, "Folder or gs:// address for all output of the run; null = Drive on Colab, elsewhere runs/<run_name>."
    )
    run_name: str = knob("default", "The run's name.")
    # Dotted name -> source of the value, without defaults. Neither compared nor written.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        problems: list[str] = []
        values: dict[str, Any] = {}
        refused: set[str] = set()
        for section, kind in SECTIONS.items():
            if not isinstance(getattr(self, section), kind):
                raise ConfigError([f"{section}: {show(getattr(self, section))} is not a {kind.__name__}"])
        for name, parameter in parameters().items():
            try:
                values[name] = parameter.read(self[name])
            except ValueError as error:
                instead = advice(name, self[name])
                problems.append(f"{error} ({instead})" if instead else str(error))
                refused.add(name)
                values[name] = parameter.default  # the other parameters are still checked against each other
        for name, value in nest(values).items():
            object.__setattr__(self, name, SECTIONS[name](**value) if name in SECTIONS else value)
        if self.data.streaming and "data.too_long" not in self.sources:  # the default loses the rest of long texts
            object.__setattr__(self, "data", replace(self.data, too_long="split"))
            values["data.too_long"] = "split"
        for names, text in conflicts(self):
            first, *others = names.split()
            if refused.isdisjoint([first, *others]):
                problems.append(f"{first}: {show(self[first])} {text}")
        if problems:
            raise ConfigError(problems)
        in_code = {name: "code" for name, parameter in parameters().items() if values[name] != parameter.default}
        if self.optim.learning_rate is None:
            object.__setattr__(self, "optim", replace(self.optim, learning_rate=self.usual_rate))
            object.__setattr__(self, "sources", {**self.sources, "optim.learning_rate": USUAL})
        object.__setattr__(self, "sources", in_code | dict(self.sources))

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a parameter, or a section, by its dotted name; raises AttributeError if unknown."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value

    @property
    def usual_rate(self) -> float:
        """The peak learning rate of this run if none is given, by the model, lora.r and the objective."""
        rewarded, tuned = _USUAL_RATES[self.model.name == "embedded", bool(self.lora.r)]
        return rewarded if self.optim.objective in ("policy", "preference") else tuned

    @property
    def teacher(self) -> ModelConfig | None:
        """None without distill.teacher; else `model` with its name, dtype, trust_remote_code, no revision and GGUF."""
        distill, model = self.distill, replace(self.model, revision=None, gguf_file=None)
        if distill.teacher is None:
            return None
        trusted = distill.teacher_trust_remote_code
        return replace(model, name=distill.teacher, base_dtype=distill.teacher_dtype, trust_remote_code=trusted)

    @property
    def on_policy(self) -> bool:
        """Whether the run trains on completions that the model samples: `grpo` and `distill.on_policy`."""
        return self.optim.objective == "policy" or self.distill.on_policy

    @property
    def free_passes(self) -> bool:
        """Whether an update may have any number of passes, because the model samples its rows."""
        return self.on_policy

    @property
    def plain_loss(self) -> bool:
        """Whether the objective is the supervised loss, without a teacher and without a mix of sources."""
        return self.optim.objective == "supervised" and not (self.distill.teacher or self.data.source_names)

    @property
    def on_pairs(self) -> bool:
        """Whether the run is of `dpo`: on pairs of a chosen and a rejected reply, or with kto on labelled replies."""
        return self.optim.objective == "preference"

    @property
    def recipe(self) -> Literal["train", "distill", "grpo", "dpo"]:
        """The command for this run: distill with a teacher, grpo and dpo by their objectives, train for all others."""
        return "distill" if self.distill.teacher else "grpo" if self.on_policy else "dpo" if self.on_pairs else "train"

    @property
    def generates(self) -> bool:
        """Whether the run generates: completions to train on, or answers to held-out rows."""
        return bool(self.on_policy or self.tracking.generate_rows or self.tracking.eval_generate_rows)

    @property
    def num_generations(self) -> int:
        """Sampled completions per prompt: 1 with distill.on_policy, otherwise rl.num_generations."""
        return 1 if self.distill.on_policy else self.rl.num_generations

    @property
    def hub_formats(self) -> tuple[str, ...]:
        """The export formats to push, by default adapter, or merged with lora.r=0; the first goes to the root."""
        given = self.hub.format or ("adapter" if self.lora.r else "merged")
        return (given,) if isinstance(given, str) else given

    @property
    def output_path(self) -> Path:
        """The run's local folder, which may not exist: output_dir, or runs/<run_name> if that is null or `remote`."""
        if self.output_dir and not self.remote:
            return Path(self.output_dir).expanduser()
        return Path("runs") / self.run_name

    @property
    def served_name(self) -> str:
        """The run's name as a file name, for serving exports: "-" replaces all but letters, digits, dots and _."""
        return re.sub(r"[^\w.-]+", "-", self.run_name).strip("-.") or "model"

    @property
    def remote(self) -> str | None:
        """output_dir without a final slash if it is an address, such as gs://bucket/run; None for a local folder."""
        return self.output_dir.rstrip("/") if self.output_dir and "://" in self.output_dir else None

    @property
    def again(self) -> str:
        """Text on how to continue this run after an early end: "run this again", with resume=auto if it is never."""
        return f"run this again{' with checkpoint.resume=auto' if self.checkpoint.resume == 'never' else ''}"

    @property
    def checkpoints_place(self) -> Path | str:
        """The place of the run's checkpoints: an address if `remote`, otherwise a folder (Path)."""
        return f"{self.remote}/checkpoints" if self.remote else self.output_path / "checkpoints"

    def flat_values(self) -> dict[str, Any]:
        """Returns every parameter by dotted name, with a value for JSON: lists for tuples, a mix as in a file."""
        return {name: _plain(self[name]) for name in parameters()}

    def to_dict(self) -> dict[str, Any]:
        """Returns every parameter for JSON, as a dictionary per section, which `load_config` reads back."""
        return nest(self.flat_values())

    def to_yaml(self) -> str:
        """Returns the text of a YAML file that `load_config` reads back as an equal configuration."""
        from tpu_kit.config.files import strict_yaml  # PyYAML is not needed for --help

        return strict_yaml.dump(self.to_dict())


SECTIONS: dict[str, type] = {
    name: kind for name, kind in get_type_hints(TrainConfig).items() if isinstance(kind, type) and is_dataclass(kind)
}


@cache
def parameters() -> dict[str, ConfigField]:
    """Returns every parameter of a run by dotted name, in the order of declaration; always the same dictionary."""
    return knobs_of(TrainConfig)


def flat_items(nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (name, value): section.leaf for the mapping of a section, other keys as they are; skips null sections."""
    for key, value in nested.items():
        if key in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{key}.{leaf}", item) for leaf, item in value.items())
        elif not (key in SECTIONS and value is None):  # a section whose lines are all commented out
            yield str(key), value


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `flat_items` as a dictionary: nested values by dotted name."""
    return dict(flat_items(nested))


def _plain(value: Any) -> Any:
    """Returns `value` for JSON: a tuple as list, a source of a mix as its name or mapping, a dictionary as copy."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple):
        return [one.plain() if isinstance(one, DataSource) else one for one in value]
    return value
