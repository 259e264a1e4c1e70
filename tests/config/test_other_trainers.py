"""Files of TRL, axolotl and LLaMA-Factory: each value is translated exactly, noted as unneeded, or refused by name."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tpu_kit.cli import main, parse
from tpu_kit.config.files.other_trainers import NAMES, _rules_of, translate
from tpu_kit.config.loader import ConfigError, TrainConfig, as_trained, load_config
from tpu_kit.config.schema import parameters

TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/Capybara
dataset_text_field: body
torch_dtype: bfloat16
per_device_train_batch_size: 4
per_device_eval_batch_size: 8
gradient_accumulation_steps: 2
gradient_checkpointing: true
num_train_epochs: 3
learning_rate: 2.0e-5
lr_scheduler_type: constant_with_warmup
optim: adamw_torch_fused
max_steps: -1
max_length: 2048
completion_only_loss: false
eval_strategy: steps
eval_steps: 100
save_total_limit: 5
report_to: [tensorboard]
use_peft: true
lora_r: 8
lora_target_modules: [q_proj, v_proj]
load_in_4bit: false
deepspeed: ""
seed: 42
"""

AXOLOTL = """
base_model: unsloth/Llama-3.2-1B
datasets:
  - path: openai/gsm8k
    name: main
    split: train[:1000]
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
sequence_len: 512
sample_packing: true
eval_sample_packing: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-5
train_on_inputs: false
val_set_size: 0.0
evals_per_epoch: 4
warmup_ratio: 0.1
bf16: auto
tf32: false
attn_implementation: flash_attention_2
special_tokens: {pad_token: <|end|>}
wandb_project:
deepspeed:
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def read(write: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    def read(text: str) -> tuple[TrainConfig, str]:
        """Returns the configuration of a file, and the notes."""
        config = load_config(write(text))
        return config, capsys.readouterr().err

    return read


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return caught.value.problems


def test_a_file_of_trl_is_read_as_ours(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path := write(TRL))
    ours = {
        "model.name": "Qwen/Qwen2.5-0.5B-Instruct", "data.source": "trl-lib/Capybara", "data.columns": {"text": "body"},
        "model.base_dtype": "bf16", "optim.batch_size": 4, "optim.gradient_accumulation": 2, "optim.remat": "full",
        "optim.epochs": 3, "optim.learning_rate": 2e-5, "optim.schedule": "constant", "optim.optimizer": "adamw",
        "optim.max_steps": None, "data.max_length": 2048, "data.loss_on": "all", "optim.eval_steps": 100,
        "checkpoint.keep": 5, "tracking.tensorboard": True, "lora.r": 8, "lora.targets": ("q_proj", "v_proj"),
        "data.seed": 42, "optim.seed": 42,
    }  # fmt: skip
    assert {name: config[name] for name in ours} == ours
    told = capsys.readouterr().err.splitlines()
    for text in (
        "per_device_train_batch_size=4 -> optim.batch_size=4", "gradient_checkpointing=true -> optim.remat='full'",
        "per_device_eval_batch_size=8 is ignored: evaluation takes batches of optim.batch_size",
        "optim='adamw_torch_fused' -> optim.optimizer='adamw'", "max_steps=-1 is ignored: it is the default",
        "load_in_4bit=false is ignored: it is the default", "deepspeed='' is ignored: it is the default",
    ):  # fmt: skip
        assert f"note: {path}: {text}" in told
    assert not [line for line in told if "learning_rate=" in line], "a name that is ours needs no note"


def test_a_file_of_axolotl_is_read_as_ours(read: Any) -> None:
    config, notes = read(AXOLOTL)
    ours = {
        "model.name": "unsloth/Llama-3.2-1B", "data.source": "openai/gsm8k:main", "data.split": "train[:1000]",
        "data.format": "messages", "data.columns": {"messages": "conversations"}, "data.max_length": 512,
        "data.packing": True, "lora.r": 32, "lora.alpha": 16, "lora.targets": "all-linear", "optim.batch_size": 2,
        "optim.epochs": 4, "optim.optimizer": "adamw", "optim.schedule": "cosine", "optim.learning_rate": 2e-5,
        "data.loss_on": "completion", "data.eval_rows": 0, "optim.warmup_ratio": 0.1, "model.base_dtype": "bf16",
        "model.attention": "auto", "tracking.wandb": "off",
    }  # fmt: skip
    assert {name: config[name] for name in ours} == ours
    assert "evals_per_epoch=4 is ignored: there are no rows to evaluate on" in notes
    assert "attn_implementation='flash_attention_2' is ignored: the flash-attn package runs only on CUDA" in notes
    assert "lora_model_dir" not in notes and "deepspeed" not in notes, "null is absent"


def test_absent_keys_have_the_defaults_of_the_trainer(read: Any) -> None:
    config, notes = read("model_name_or_path: a/b\ndataset_name: c/d\nuse_peft:\n")
    trl = {
        "lora.r": 0, "optim.learning_rate": 2e-5, "optim.schedule": "linear", "optim.epochs": 3, "data.loss_on": "all",
        "optim.batch_size": 8, "data.packing": False, "checkpoint.save_steps": 500, "data.eval_rows": 0,
        "data.seed": 42, "optim.seed": 42, "lora.dropout": 0.0, "data.eval_split": None,
    }  # fmt: skip
    assert {name: config[name] for name in trl} == trl
    assert {config.sources[name] for name in trl if name in config.sources} == {"default of TRL"}
    for name in ("lora.r=0", "learning_rate=2e-05", "optim.schedule='linear'", "data.loss_on='all'"):
        assert f"{name} is the default of TRL" in notes
    assert "dataset_name is absent" not in notes and "lora_target_modules is absent" not in notes
    assert "resume_from_checkpoint is absent: a run starts anew there; here checkpoint.resume=auto continues" in notes
    assert "completion_only_loss is absent: rows with a prompt and a completion have loss on the compl" in notes
    assert "lora_target_modules is absent: PEFT chooses" in read("model_name_or_path: a/b\nuse_peft: true\n")[1]
    config, notes = read("base_model: a/b\nadapter:\nlora_r: 8\nlearning_rate: 1e-5\n")
    assert (config.lora.r, config.data.max_length, config.data.packing, config.optim.batch_size) == (0, 512, False, 1)
    assert config.optim.warmup_ratio == 0.03 and config.data.eval_rows == 0
    assert "lora_r=8 is ignored: all weights are trained, without adapters" in notes
    config, notes = read("base_model: a/b\nlora: {r: 4}\nlearning_rate: 1e-5\n")
    assert config.lora.r == 4 and "lora.r" not in notes, "a value of the file wins"
    assert read("per_device_train_batch_size: 2\n")[0].lora.r == 16, "no model by their name: a file of the kit"


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("bf16: false", {"model.base_dtype": "fp32"}),
        ("resume_from_checkpoint: false", {"checkpoint.resume": "never"}),
        ("resume_from_checkpoint: true", {"checkpoint.resume": "must"}),
        ("overwrite_output_dir: true", {"checkpoint.resume": "never"}),
        ("overwrite_output_dir: false", {"checkpoint.resume": "auto"}),
        ("lr_scheduler_type: constant\nwarmup_steps: 10", {"optim.schedule": "constant", "optim.warmup_steps": 0}),
        ("lr_scheduler: constant_with_warmup\nwarmup_steps: 10", {"optim.warmup_steps": 10}),
        ("warmup_steps: 0.1", {"optim.warmup_steps": 0, "optim.warmup_ratio": 0.1}),
        ("warmup_steps: 7", {"optim.warmup_steps": 7, "optim.warmup_ratio": 0.0}),
        ("dataset_name: a/b\ndataset_config: c", {"data.source": "a/b:c"}),
        ("datasets: [{path: json, data_files: a.jsonl, type: completion, field: body}]",
         {"data.source": "a.jsonl", "data.format": "text", "data.columns": {"text": "body"}}),
        ("test_datasets: [{path: a/b, name: c, split: test}]",
         {"data.eval_source": "a/b:c", "data.eval_split": "test"}),
        ("val_set_size: 0.05", {"data.eval_rows": 0.05}),
        ("datasets: [{path: a, split: 'train[:20%]'}]", {"data.split": "train[:20%]"}),
        ("train_sampling_strategy: sequential", {"data.shuffle": False}),
        ("use_cpu: true", {"launch.device_type": "cpu"}),
        ("use_cpu: false", {"launch.device_type": "auto"}),
        ("report_to: [wandb, tensorboard]", {"tracking.wandb": "online", "tracking.tensorboard": True}),
        ("base_model: a/b\nwandb_project: mine", {"tracking.wandb": "online", "tracking.wandb_project": "mine"}),
        ("wandb_project: mine", {"tracking.wandb": "off", "tracking.wandb_project": "mine"}),
        ("load_best_model_at_end: false", {"optim.eval_steps": None}),
        ("load_in_4bit: true\nbf16: true\nbnb_4bit_quant_type: nf4", {"model.base_dtype": "int4"}),
        ("load_in_8bit: true\ntorch_dtype: bfloat16", {"model.base_dtype": "int8"}),
        ("load_in_4bit: false\nbf16: true", {"model.base_dtype": "bf16"}),
        ("base_model: a/b\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nbf16: auto\nfp16:\nval_set_size: 0.1\n"
         "num_epochs: 3\nevals_per_epoch: 4",
         {"model.base_dtype": "int4", "lora.r": 8, "optim.eval_steps": 0.083333}),
        ("evals_per_epoch: 1\nnum_epochs: 1", {"optim.eval_steps": None}),
        ("base_model: a/b\nadapter: lora\nval_set_size: 0\nevals_per_epoch: 4", {"optim.eval_steps": None}),
        ("optimizer: adafactor", {"optim.optimizer": "adafactor"}),
        ("gradient_checkpointing: false", {"optim.remat": "none"}),
        ("gradient_checkpointing_kwargs: {use_reentrant: false}", {"optim.remat": "auto"}),
        ("lora_target_linear: true\nlora_target_modules: [q_proj]", {"lora.targets": "all-linear"}),
        ("base_model: a/b\nadapter: lora\nlora_modules_to_save: [embed_tokens, lm_head]\nembedding_lr: 1e-5",
         {"lora.full": ("embed_tokens", "lm_head"), "optim.embedding_learning_rate": 1e-5}),
        ("modules_to_save: [lm_head]\nembedding_learning_rate: 1e-5",
         {"lora.full": ("lm_head",), "optim.embedding_learning_rate": 1e-5}),
        ("model_name_or_path: a/b\nstage: sft\nadditional_target: lm_head,embed_tokens\nloraplus_lr_ratio: 16",
         {"lora.full": ("embed_tokens", "lm_head"), "lora.plus": 16.0, "optim.embedding_learning_rate": None}),
        ("loraplus_lr_ratio: 4\nloraplus_lr_embedding: 1e-6",
         {"lora.plus": 4.0, "optim.embedding_learning_rate": None}),
        ("target_modules: [q_proj, embed_tokens]\nloraplus_lr_embedding: 1e-6",
         {"lora.targets": ("q_proj", "embed_tokens"), "optim.embedding_learning_rate": 1e-6}),
        ("base_model: a/b\nadapter: lora\npeft_trainable_token_indices: [7, 9]", {"lora.tokens": ("id:7", "id:9")}),
        ("trainable_token_indices: [7]", {"lora.tokens": ("id:7",)}),
        ("base_model: a/b\nlora_modules_to_save: [lm_head]\nloraplus_lr_ratio: 2",
         {"lora.full": None, "lora.plus": 1.0}),
        ("model_name_or_path: a/b\neval_strategy: steps\neval_steps: 5\nuse_peft: true",
         {"data.eval_split": "test", "optim.eval_steps": 5, "lora.dropout": 0.05, "data.eval_rows": None}),
        ("model_name_or_path: a/b\neval_steps: 5", {"data.eval_split": None, "optim.eval_steps": None}),
        ("model_name_or_path: a/b\nlr_scheduler_type: constant\nwarmup_ratio: 0.1", {"optim.warmup_ratio": 0.0}),
        ("per_device_train_batch_size: 2\nrun_name:\nhub_strategy: every_save\nhub_token: <HUB_TOKEN>\n"
         "accelerator_config: {split_batches: false, dispatch_batches: null}", {"run_name": "default"}),
        ("model_name_or_path: a/b\nnum_generations: 4\nloss_type: grpo\ntemperature: 0.9\nscale_rewards: false\n"
         "top_p: 1.0\nuse_vllm: true\nvllm_importance_sampling_mode: token_mask\nvllm_importance_sampling_cap: 2.0",
         {"rl.loss_type": "grpo", "rl.sampling_temperature": 0.9, "rl.scale_rewards": "none", "rl.num_generations": 4,
          "rl.importance_sampling_correction": "token_mask", "rl.importance_sampling_cap": 2.0, "data.eval_rows": 0,
          "optim.learning_rate": 1e-6, "data.loss_on": "completion", "lora.r": 0}),
        ("loss_type: cispo\nepsilon_high: 5", {"rl.loss_type": "cispo"}),
    ],
)  # fmt: skip
def test_a_value_is_translated_exactly(read: Any, text: str, ours: dict[str, Any]) -> None:
    config, notes = read(text)
    assert {name: config[name] for name in ours} == ours
    assert notes or text.startswith(("warmup_steps: 7", "wandb_project"))


@pytest.mark.parametrize("name", ["adamw8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_adamw_of_small_moments_is_adamw_for_adapters_alone(write: Any, name: str, capsys: Any) -> None:
    config = load_config(path := write(f"optimizer: {name}"))
    assert config.optim.optimizer == "adamw"
    note = f"note: {path}: optimizer='{name}' -> optim.optimizer='adamw': the optimizer state of adapters is small"
    assert note in capsys.readouterr().err
    for full in ("use_peft: false", "lora: {r: 0}", "lora.r: 0", "base_model: a/b", "model_name_or_path: a/b"):
        (found,) = problems(write(f"optim: {name}\n{full}"))
        assert found.startswith(f"optim: '{name}' has no counterpart here; ") and "with lora.r=0 use" in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("torch_dtype: float64", "torch_dtype: 'float64' has no counterpart here; it may be bfloat16, torch.bfloat16"),
        ("save_strategy: epoch", "save_strategy: 'epoch' has no counterpart here; set checkpoint.save_steps"),
        ("eval_strategy: epoch", "set optim.eval_steps, the updates between evaluations"),
        ("eval_strategy: steps", "set optim.eval_steps, the updates between evaluations"),
        ("eval_steps: 5\nload_best_model_at_end: false", "load_best_model_at_end: false has no counterpart here; a ru"),
        ("bnb_4bit_quant_type: nf4", "bitsandbytes runs only on CUDA; use model.base_dtype=int4 or int8"),
        ("load_in_4bit: true\nload_in_8bit: true", "model.base_dtype: given twice, as 'int4' and as load_in_8bit=true"),
        ("load_in_4bit: true\nfp16: true", "a TPU has no float16"),
        ("evals_per_epoch: 4\nmax_steps: 100", "set optim.eval_steps, the updates between evaluations"),
        ("rl: grpo", "rl: 'grpo': files of such runs are not supported; the kit trains on rows, on pairs of re"),
        ("image_size: 512", "image_size: 512: settings for images, sounds and videos are not supported in file"),
        ("push_to_hub: true", "push_to_hub: true: a push without the repository's name is not supported: set hu"),
        ("push_to_hub: true\nhub_model_id: a/b\nhub_strategy: all_checkpoints", "hub_strategy: 'all_checkpoints': it"),
        ("push_dataset_to_hub: a/b", "the kit does not push data; set hub.model_id=your-name/a-name to push the resu"),
        ("hub_token: x", "hub_token: (hidden) has no counterpart here; secrets do not belong in a file: set it in the"),
        ("fp16: true", "a TPU has no float16"),
        ("neftune_noise_alpha: 5", "the kit adds no noise to embeddings; remove it"),
        ("report_to: mlflow", "the kit's trackers are W&B and TensorBoard: set tracking.wandb=onl"),
        ("resume_from_checkpoint: out/checkpoint-5", "checkpoint.resume=auto resumes from the newest checkpoint"),
        ("adapter: dora", "adapter: 'dora' has no counterpart here; it may be lora or qlora; set lora.r"),
        ("test_datasets: [{path: a}, {path: b}]", "evaluation has one source, data.eval_source"),
        ("datasets: [{path: a}, {path: b, type: alpaca}]", "datasets[2]: datasets.type: 'alpaca' has no counterpart"),
        ("datasets: [{path: a, fraction: 0.5}, {path: b}]", "lacks a share above 0 for some of the 2 data sets"),
        ("datasets: [{path: a, fraction: true}, {path: b, fraction: 1}]", "lacks a share above 0 for some of the 2"),
        ("datasets: [{path: a, type: alpaca}]", "datasets.type: 'alpaca' has no counterpart here; this type has "),
        ("datasets: [{path: a, shards: 4}]", "datasets.shards: 4 has no counterpart here; set data.source, data"),
        ("special_tokens: {eos_token: x}", "special_tokens.eos_token: 'x' has no counterpart here; it comes from"),
        ("modules_to_save: score", "modules_to_save: 'score' has no counterpart here; lora.full takes the input and"),
        ("trainable_token_indices: {lm_head: [3]}", "set lora.tokens to the tokens, or give one list of their ids"),
        ("base_model: a/b\ntokens: [<x>]", "add the tokens to the tokenizer and the model, save both into a folder"),
        ("embedding_lr_scale: 0.1", "set optim.embedding_learning_rate to the learning rate times this factor"),
        ("lora_target_modules: .*_proj", "list the endings of the layers' names, such as [q_proj, v_proj]"),
        ("average_tokens_across_devices: false", "average_tokens_across_devices: false has no counterpart here"),
        ("base_model: a/b\nbatch_size: 4", "batch_size: 4 has no counterpart here; axolotl's batch_size counts the ro"),
        ("model_name_or_path: a/b\nmax_length:", "max_length: null has no counterpart here; every row has"),
        ("lr_scheduler_type: polynomial",
         'lr_scheduler_type: \'polynomial\' has no counterpart here; optim.schedule is "cosine", "linear" or "const'),
        ("model_name_or_path: a/b\nnum_generations: 4\ntop_p: 0.9", "top_p: 0.9 has no counterpart here; completions"),
        ("model_name_or_path: a/b\nreward_funcs: [accuracy_reward]", "write module:function, such as trl.rewards:accu"),
        ("model_name_or_path: a/b\nreward_funcs: [accuracy, format]", "these names are open-r1's: use math for accu"),
        ("model_name_or_path: a/b\nreward_funcs: [math]\nper_device_train_batch_size: 8", "set rl.prompts_per_update"),
        ("lr: 1\nlearning_rate: 2", "optim.learning_rate: given twice"),
        ("num_epochs: 1\nnum_train_epochs: 2", "optim.epochs: given twice, as 1 and as num_train_epochs=2"),
        ("epohcs:", "epohcs: no such parameter (given null); did you mean optim.epochs?"),
        ("per_device_train_batch_sise: 1", "per_device_train_batch_sise: no such parameter"),
        ("base_model: a/b\nrl: kto\ndatasets: [{path: c/d, type: chat_template}]", "use argilla, argilla_chat, intel,"),
        ("base_model: a/b\nrl: dpo\nkto_desirable_weight: 0.5", "preference.desirable_weight: 0.5 is for kto; remove "),
        ("model_name_or_path: a/b\nstage: kto\npref_ftx: 0.5", "pref_ftx: 0.5 has no counterpart with kto; set it"),
        ("model_name_or_path: a/b\nloss_type: apo_zero_unpaired", "'apo_zero_unpaired' is not here; use kto, which r"),
        ("model_name_or_path: a/b\nloss_type: aot", "preference.losses: ['aot'] 'aot' sorts the pairs of a batch"),
        ("model_name_or_path: a/b\nbeta: 0.1\nloss_type: sigmod", "'sigmod' is no loss; use sigmoid, hinge"),
        ("model_name_or_path: a/b\ncpo_alpha: 0.5\nloss_type: hinge",
         "loss_type: 'hinge' of CPOTrainer has no reference, but here it has; set loss_type=simpo, or loss"),
        ("model_name_or_path: a/b\ncpo_alpha: 0.5", "loss_type: 'sigmoid' of CPOTrainer has no reference"),
        ("model_name_or_path: a/b\nloss_type: simpo\ncpo_alpha: much", "cpo_alpha: 'much' is not a number"),
        ("model_name_or_path: a/b\nloss_type: simpo\nalpha: 0.3", "alpha: 0.3 has no counterpart here; the kit does n"),
        ("model_name_or_path: a/b\nbeta: 0.1\nsync_ref_model: true", "sync_ref_model: true has no counterpart here; t"),
        ("model_name_or_path: a/b\nbeta: 0.1\nuse_weighting: true", "the kit does not weight pairs by likelihood or l"),
        ("model_name_or_path: a/b\nbeta: 0.1\ntruncation_mode: keep_end", "truncation_mode: 'keep_end' has no counter"),
        ("model_name_or_path: a/b\nbeta: 0.1\nref_model: c/d", "the reference is always the model before training"),
        ("model_name_or_path: a/b\nbeta: 0.1\ngenerate_during_eval: true", "set tracking.eval_generate_rows"),
        ("model_name_or_path: a/b\nbeta: 0.1\nlabel_smoothing: 0.1", "preference.pref_smoothing: 0.1 is for robust, e"),
        ("model_name_or_path: a/b\nbeta: 0.1\nloss_type: [sigmoid, sft]\nloss_weights: [1]", "gives 1 weights for 2"),
        ("base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: chatml}]", "write chatml.prompt_pairs, chatml.icr, c"),
        ("base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: zephyr.nectar}]", "write chat_template.default, or r"),
        ("base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: {prompt_format: '[INST] {prompt} [/INST]'}}]",
         "datasets.type.prompt_format: '[INST] {prompt} [/INST]' has no counterpart here; this type has its own promp"),
        ("base_model: a/b\nrl: orpo\ncpo_alpha: 1.0", "cpo_alpha: 1.0 has no counterpart here; cpo_alpha is for simpo"),
        ("base_model: a/b\nrl: dpo\ntrl: {beta: 0.1}", "it belongs to grpo; write its beta as rl_beta"),
        ("base_model: a/b\nrl: dpo\nrl_beta: 0.1\norpo_alpha: 0.2", "preference.pref_beta: given twice, as 0.1 and as"),
        ("model_name_or_path: a/b\nstage: sft\npref_loss: sigmoid\nsource: a.jsonl", "pref_loss: 'sigmoid' has no cou"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(write: Any, text: str, problem: str) -> None:
    (found,) = problems(write(text))
    assert problem in found and "\n" not in found


def test_a_file_of_accelerate_is_refused_in_one_line(write: Any) -> None:
    path = write("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    (problem,) = error.value.problems
    assert problem.startswith("compute_environment: this is a file of accelerate") and "launch.mesh=fsdp=-1" in problem


LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset_dir: data
template: llama3
cutoff_len: 1024
preprocessing_num_workers: 16
output_dir: saves/llama3
overwrite_cache: true
plot_loss: true
per_device_train_batch_size: 1
learning_rate: 1.0e-4
lr_scheduler_type: cosine
val_size: 0.1
"""


def test_a_file_of_llama_factory_is_not_trls(write: Any) -> None:
    config = load_config(write(LLAMA_FACTORY), {"source": "rows.jsonl"})
    assert (config.lora.r, config.lora.targets, config.lora.dropout) == (16, "all-linear", 0)
    assert (config.data.max_length, config.data.num_proc, config.data.packing) == (1024, 16, False)
    assert (config.data.eval_rows, config.optim.epochs, config.optim.schedule) == (0.1, 3, "cosine")
    named = problems(write(LLAMA_FACTORY + "dataset: identity,alpaca_en_demo\nmax_samples: 10\nmask_history: true\n"))
    assert [text.split(":")[0] for text in named] == ["dataset", "max_samples", "mask_history"]
    assert "entries of LLaMA-Factory's dataset_info.json; set data.source" in named[0]
    full = load_config(write(LLAMA_FACTORY.replace("type: lora", "type: full")), {"source": "rows.jsonl"})
    assert full.lora.r == 0
    assert "may be lora or full" in problems(write(LLAMA_FACTORY.replace("type: lora", "type: freeze")))[0]
    assert "answers (sft)" in problems(write(LLAMA_FACTORY.replace("stage: sft", "stage: rm")))[0]


MIXES = [
    # axolotl, TRL, and texts for continued pre-training.
    ("base_model: a/b\ndatasets: [{path: c/d, name: main, type: chat_template, field_messages: talk, weight: 0.5}, "
     "{path: json, data_files: e.jsonl, split: 'train[:9]'}]",
     [{"source": "c/d:main", "format": "messages", "columns": {"messages": "talk"}, "weight": 0.5},
      {"source": "e.jsonl", "split": "train[:9]"}], {}),
    ("base_model: a/b\ndatasets: [{path: c/d, weight: 2}]", [{"source": "c/d", "weight": 2.0}], {}),
    ("model_name_or_path: a/b\ndatasets: [{path: c/d, fraction: 1}, {path: e/f, fraction: 3, split: dev}]\n"
     "test_split_size: 0.1",
     [{"source": "c/d", "tokens": 0.25}, {"source": "e/f", "tokens": 0.75, "split": "dev"}], {"eval_rows": 0.1}),
    ("model_name_or_path: a/b\ndatasets: [{path: c/d}, {path: e/f}]", ["c/d", "e/f"], {}),
    ("base_model: a/b\npretraining_dataset: [{path: c/d, name: x, type: pretrain}, {path: e/f, text_column: body}]",
     [{"source": "c/d:x", "columns": {"text": "text"}}, {"source": "e/f", "columns": {"text": "body"}}],
     {"format": "text", "too_long": "split"}),
]  # fmt: skip


@pytest.mark.parametrize("entry", ["c/d", "[{path: c/d, text_column: text, type: pretrain}]"])
def test_texts_for_continued_pre_training_are_a_stream(read: Any, entry: str) -> None:
    config, notes = read(f"base_model: a/b\nmax_steps: 9\npretraining_dataset: {entry}")
    data = config.data
    assert (data.source, data.columns, data.format, data.too_long) == ("c/d", {"text": "text"}, "text", "split")
    assert data.streaming and config.optim.max_steps == 9
    assert "pretraining_dataset=... -> data.source='c/d', data.streaming=true" in notes
    with pytest.raises(ConfigError, match=r"optim.max_steps: null but a stream has no end"):
        read(f"base_model: a/b\npretraining_dataset: {entry}")


@pytest.mark.parametrize(("text", "sources", "others"), MIXES)
def test_lists_of_data_sets_are_mixes(read: Any, text: str, sources: list[Any], others: dict[str, Any]) -> None:
    config, notes = read(text)
    assert [one.plain() for one in config.data.mix] == sources
    assert {name: getattr(config.data, name) for name in others} == others
    assert "data.source=[" in notes and "absent: set data.source" not in notes
    if "fraction" in text:
        assert "it is the share of the rows there, and of the tokens here; an epoch ends when the first source" in notes


LISTED = {
    "mine": {"file_name": "mine.json", "columns": {"prompt": "ask", "query": "more", "response": "say"}},
    "talks": {"hf_hub_url": "a/b", "subset": "main", "split": "dev", "num_samples": 9, "formatting": "sharegpt",
              "columns": {"messages": "talk"}, "tags": {"role_tag": "from", "content_tag": "value"}},
    "pairs": {"file_name": "pairs.json", "ranking": True},
    "odd": {"file_name": "odd.json", "formatting": "sharegpt", "tags": {"role_tag": "who"}},
    "text": "mine.json", "list": {"file_name": "mine.json", "columns": ["ask", "say"]},
}  # fmt: skip


def test_data_sets_of_llama_factory_are_those_of_its_list(
    write: Any, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(LISTED))
    mine = {"source": "data/mine.json", "name": "mine",
            "columns": {"question": "ask", "context": "more", "answer": "say"}}  # fmt: skip
    talks = {"source": "a/b:main", "split": "dev[:9]", "name": "talks", "columns": {"messages": "talk"}}
    config, _ = read(LLAMA_FACTORY + "dataset: mine,talks\n")
    assert [one.plain() for one in config.data.mix] == [mine, talks]
    shares = "mix_strategy: interleave_under\ninterleave_probs: 0.2,0.8\n"
    config, notes = read(LLAMA_FACTORY + "dataset: mine, talks\n" + shares)
    assert [one.tokens for one in config.data.mix] == [0.2, 0.8] and "and of the tokens here" in notes
    assert read(LLAMA_FACTORY + "dataset: mine\nmix_strategy: interleave_under\n")[0].data.mix[0].plain() == mine
    told = problems(write(LLAMA_FACTORY + "dataset: [mine, pairs, odd]\nmix_strategy: interleave_over\n"))
    assert [text.partition(": ")[0] for text in told] == ["dataset", "dataset", "mix_strategy"]
    assert "pairs, in data/dataset_info.json: it has pairs, which are for stage=dpo" in told[0]
    assert "its role_tag=who is not read" in told[1]
    assert "repeats the smaller data sets until all have ended" in told[2]
    for text in ("pretraining_dataset: [{split: train}]", "datasets: [{path: a}, {split: train}]"):
        assert any("it names no data set; give its path" in told for told in problems(write(text)))
    for lost in ("lost", "[{a: b}]"):
        assert "it names entries" in problems(write(LLAMA_FACTORY + f"dataset: {lost}\n"))[0]
    told = problems(write(LLAMA_FACTORY + "dataset: [text, list]\n"))
    assert "text, in data/dataset_info.json: it is no object with a file_name and objects as columns" in told[0]
    assert "list, in data/dataset_info.json: it is no object" in told[1]
    told = problems(write(LLAMA_FACTORY + "dataset: mine, talks\n" + shares.replace("0.2", "half")))
    assert told == [
        "interleave_probs: ['half', 0.8] lacks a share above 0 for some of the 2 data sets; give a share to "
        "all, or to none"
    ]


def test_the_list_of_data_sets_of_llama_factory_is_no_configuration(write: Any) -> None:
    (problem,) = problems(write('{"mine": {"file_name": "mine.json"}, "hub": {"hf_hub_url": "a/b"}}'))
    assert problem.startswith("mine: this is LLaMA-Factory's list of data sets; give its training file")


def test_no_note_and_no_problem_shows_a_secret(write: Any) -> None:
    (found,) = problems(write("hub_token: plain-words\n"))
    assert "plain-words" not in found and "hub_token" in found
    token = "hf_" + "abcdefghij" * 4
    translation = translate({"base_model": token, "tf32": token, "rl": token}, ())
    assert token not in str(translation.notes + translation.problems)


def fields_of(module: str, file: str, name: str) -> dict[str, ast.expr]:
    """The annotated fields of a class in an installed package, which is not imported, and their values."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    pairs = [node for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: node.value for node in pairs if node.value is not None}  # type: ignore[union-attr]


OF_PAIRS = [
    ("trainer/dpo_config.py", "DPOConfig"), ("experimental/cpo/cpo_config.py", "CPOConfig"),
    ("experimental/orpo/orpo_config.py", "ORPOConfig"), ("trainer/kto_config.py", "KTOConfig"),
]  # fmt: skip


def test_every_parameter_of_trl_has_a_rule() -> None:
    theirs = {
        **fields_of("transformers", "training_args.py", "TrainingArguments"),
        **fields_of("trl", "trainer/base_config.py", "_BaseConfig"),
        **fields_of("trl", "trainer/sft_config.py", "SFTConfig"),
        **fields_of("trl", "trainer/grpo_config.py", "GRPOConfig"),
        **fields_of("trl", "trainer/model_config.py", "ModelConfig"),
        **fields_of("trl", "scripts/utils.py", "ScriptArguments"),
        **fields_of("trl", "scripts/grpo.py", "GRPOScriptArguments"),
        **{name: value for place in OF_PAIRS for name, value in fields_of("trl", *place).items()},
    }
    ours = {parameter.leaf for parameter in parameters().values()}
    assert len(theirs) > 140
    assert [name for name in theirs if not (name in NAMES or name in ours or _rules_of(name))] == []


def test_the_defaults_of_trl_are_those_of_the_installed_release() -> None:
    theirs = fields_of("transformers", "training_args.py", "TrainingArguments")
    theirs |= fields_of("trl", "trainer/sft_config.py", "SFTConfig") | fields_of(
        "trl", "trainer/base_config.py", "_BaseConfig"
    )
    theirs |= fields_of("trl", "trainer/model_config.py", "ModelConfig") | fields_of(
        "trl", "scripts/utils.py", "ScriptArguments"
    )

    def default(name: str) -> Any:
        value = theirs[name]
        if isinstance(value, ast.Call):
            (value,) = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        return ast.literal_eval(value)

    absent = translate({"model_name_or_path": "a/b"}, ()).defaults
    assert absent["learning_rate"] == default("learning_rate") and absent["optim.epochs"] == default("num_train_epochs")
    assert absent["optim.schedule"] == default("lr_scheduler_type") and absent["seed"] == default("seed")
    assert absent["optim.batch_size"] == default("per_device_train_batch_size")
    assert absent["save_steps"] == default("save_steps") and absent["packing"] is default("packing")
    assert absent["lora.r"] == 0 and default("use_peft") is False
    assert absent["data.eval_rows"] == 0 and default("eval_strategy") == "no"
    assert (default("lora_dropout"), default("dataset_test_split")) == (0.05, "test")
    theirs |= fields_of("trl", "trainer/grpo_config.py", "GRPOConfig")
    absent = translate({"model_name_or_path": "a/b", "num_generations": 4}, ()).defaults
    assert absent["learning_rate"] == default("learning_rate") == 1e-6
    ours = {name.removeprefix("rl."): each.default for name, each in parameters().items() if name.startswith("rl.")}
    assert {name for name in ours.keys() & theirs.keys() if ours[name] != default(name)} == {
        "epsilon_high", "steps_per_generation"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("push_to_hub: true\nhub_model_id: a/b", ("a/b", True, "end", None)),
        ("push_to_hub: true\nhub_model_id: a/b\nhub_strategy: every_save\nhub_private_repo: false",
         ("a/b", False, "checkpoint", None)),
        ("push_to_hub: false\nhub_model_id: a/b\nhub_strategy: every_save\nhub_private_repo: false",
         (None, True, "end", None)),
        ("push_to_hub_merged: a/b", ("a/b", True, "end", "merged")),
        ("push_to_hub_gguf: true\npush_to_hub: true\nhub_model_id: a/b", ("a/b", True, "end", "gguf-q8_0")),
        ("hub_model_id: a/b\nhub_strategy: checkpoint\nbase_model: c/d", ("a/b", True, "checkpoint", None)),
    ],
)  # fmt: skip
def test_a_push_of_theirs_is_one_of_ours(text: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text if "base_model" in text else f"model_name_or_path: c/d\n{text}")
    hub = load_config(file).hub
    assert (hub.model_id, hub.private, hub.strategy, hub.format) == expected


# ---------------------------------------------------------------------------------------------------- pairs of replies

TRL_DPO = """
model_name_or_path: embedded
dataset_name: pairs.jsonl
learning_rate: 5.0e-7
num_train_epochs: 1
per_device_train_batch_size: 2
loss_type: [sigmoid, sft]
loss_weights: [1.0, 0.5]
beta: 0.05
max_length: 2048
max_prompt_length: 512
truncation_mode: keep_start
f_divergence_type: js_divergence
f_alpha_divergence_coef: 0.7
ld_alpha: 0.5
precompute_ref_log_probs: true
sync_ref_model: false
use_weighting: false
disable_dropout: true
use_peft: true
lora_r: 8
lora_dropout: 0.05
"""
AXOLOTL_DPO = """
base_model: a/b
rl: dpo
rl_beta: 0.2
dpo_loss_type: [sigmoid, sft]
dpo_loss_weights: [1.0, 0.2]
datasets:
  - path: c/d
    type: chat_template.default
    field_messages: conversation
    field_chosen: good
    field_rejected: bad
    message_property_mappings: {role: role, content: content}
    roles: {system: [system], user: [user], assistant: [assistant]}
adapter: lora
lora_r: 8
lora_dropout: 0.05
sequence_len: 2048
micro_batch_size: 2
learning_rate: 5e-6
val_set_size: 0.0
"""
FACTORY_DPO = """
model_name_or_path: a/b
stage: dpo
finetuning_type: lora
lora_rank: 16
lora_target: all
pref_beta: 0.2
pref_loss: sigmoid
pref_ftx: 0.5
dpo_label_smoothing: 0.0
ld_alpha: 0.5
dataset: pairs, talks
template: llama3
cutoff_len: 2048
learning_rate: 5.0e-6
"""
PAIRS_LISTED = {
    "pairs": {"file_name": "pairs.json", "ranking": True,
              "columns": {"prompt": "ask", "query": "more", "chosen": "good", "rejected": "bad"}},
    "talks": {"hf_hub_url": "a/b", "ranking": True, "formatting": "sharegpt",
              "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}},
    "answers": {"file_name": "mine.json"},
    "labels": {"file_name": "kto.json", "columns": {"messages": "talk", "kto_tag": "good"}},
    "tagged": {"file_name": "tag.json", "columns": {"prompt": "ask", "kto_tag": "tag"}},
}  # fmt: skip


def test_a_file_of_trls_dpo_is_a_run_on_pairs(read: Any) -> None:
    config, notes = read(TRL_DPO)
    ours = {
        "preference.losses": ("sigmoid", "sft"), "preference.loss_weights": (1.0, 0.5), "preference.pref_beta": 0.05,
        "preference.f_divergence": "js_divergence", "preference.f_alpha": 0.7, "preference.ld_alpha": 0.5,
        "preference.pref_smoothing": 0.0, "preference.reference": "start", "rl.beta": 0.0, "rl.max_prompt_length": None,
        "data.max_length": 2048, "data.packing": False, "data.eval_rows": 0, "data.loss_on": "completion",
        "optim.learning_rate": 5e-7, "optim.schedule": "linear", "optim.batch_size": 2, "optim.epochs": 1,
        "optim.label_smoothing": 0.0, "lora.r": 8, "lora.dropout": 0.0, "optim.seed": 42, "checkpoint.save_steps": 500,
    }  # fmt: skip
    assert {name: config[name] for name in ours} == ours
    assert as_trained(config).recipe == "dpo"
    for text in (
        "loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.5] -> preference.losses=['sigmoid', 'sft'], preference.l",
        "beta=0.05 -> preference.pref_beta=0.05", "precompute_ref_log_probs=true is ignored: the kit computes the refe",
        "max_length=2048 -> data.max_length=2048: there it limits the prompt with one reply, here the prompt with both",
        "max_prompt_length=512 is ignored: the kit cuts the ends", "use_weighting=false is ignored: it is the default",
        "sync_ref_model=false is ignored: it is the default", "disable_dropout=true is ignored: the kit's only dropout",
        "lora_dropout=0.05 is ignored: this trainer turns dropout off", "packing=false is the default of TRL DPO",
    ):  # fmt: skip
        assert f": {text}" in notes
    assert "loss_type is absent" not in notes and "data.max_length is absent" not in notes
    config, _ = read(TRL_DPO.replace("disable_dropout: true", "disable_dropout: false"))
    assert config.lora.dropout == 0.05


def test_absent_keys_of_pairs_have_the_defaults_of_trl(read: Any) -> None:
    config, notes = read("model_name_or_path: a/b\nbeta: 0.1\n")
    trl = {
        "lora.r": 0, "optim.learning_rate": 1e-6, "optim.schedule": "linear", "optim.epochs": 3, "optim.batch_size": 8,
        "data.packing": False, "data.max_length": 1024, "data.eval_rows": 0, "preference.losses": ("sigmoid",),
    }  # fmt: skip
    assert {name: config[name] for name in trl} == trl
    assert "loss_type is absent: it is sigmoid (DPO) there and here; files for ORPOTrainer and KTOTrainer can" in notes
    assert "data.max_length is absent: it is 1024 there too, but for the prompt with one reply; here data.max" in notes
    theirs = fields_of("trl", *OF_PAIRS[0]) | fields_of("trl", *OF_PAIRS[1])
    trls = {
        "f_alpha": "f_alpha_divergence_coef",
        "f_divergence": "f_divergence_type",
        "pref_smoothing": "label_smoothing",
    }
    for name in ("pref_beta", "pref_smoothing", "simpo_gamma", "discopop_tau", "f_divergence", "f_alpha", "ld_alpha"):
        value = theirs[trls.get(name, name.removeprefix("pref_"))]
        assert isinstance(value, ast.Call)
        (default,) = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        assert getattr(config.preference, name) == ast.literal_eval(default), name
    for name, there in {"learning_rate": 1e-6, "max_length": 1024, "disable_dropout": True, "cpo_alpha": 1.0}.items():
        call: Any = theirs[name]
        (default,) = [one.value for one in call.keywords if one.arg == "default"]
        assert ast.literal_eval(default) == there, name


def test_the_command_decides_between_trainers_of_the_same_keys(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("model_name_or_path: a/b\ndataset_name: c/d\n")
    config = parse(["dpo", str(path)]).config
    assert config.optim.learning_rate == 1e-6 and config.data.loss_on == "completion"
    assert as_trained(config).recipe == "dpo", "also for plan and doctor, which look at the parameters"
    assert "optim.batch_size=8 is the default of TRL DPO" in capsys.readouterr().err
    assert parse(["train", str(path)]).config.optim.learning_rate == load_config(path).optim.learning_rate == 2e-5
    with pytest.raises(ConfigError, match=r"'ipo' is not .*set preference.losses for pairs .dpo."):
        parse(["dpo", "loss_type=ipo"])
    orpo = as_trained(parse(["dpo", str(path), "losses=[orpo]", "pref_beta=0.3"]).config)
    assert orpo.preference.losses == ("orpo",) and orpo.data.format == "preference"


PAIR_FILES = [
    # TRL's CPO with its likelihood term, ORPO without a key of its own, older names, Unsloth's names.
    ("model_name_or_path: a/b\nloss_type: simpo\nsimpo_gamma: 1.0\nbeta: 2.0\nalpha: 0.0",
     {"preference.losses": ("simpo", "sft"), "preference.loss_weights": (1.0, 1.0), "preference.simpo_gamma": 1.0,
      "preference.pref_beta": 2.0, "lora.alpha": 32, "optim.learning_rate": 1e-6},
     "loss_type='simpo' -> preference.losses=['simpo', 'sft'], preference.loss_weights=[1.0, 1.0]: cpo_alpha is absen"),
    ("model_name_or_path: a/b\nloss_type: simpo\ncpo_alpha: 0.5",
     {"preference.losses": ("simpo", "sft"), "preference.loss_weights": (1.0, 0.5)}, "cpo_alpha=0.5 -> preference.lo"),
    ("model_name_or_path: a/b\nloss_type: simpo\ncpo_alpha: 0.0",
     {"preference.losses": ("simpo",), "preference.loss_weights": None}, "cpo_alpha=0.0 -> preference.losses=['simpo'"),
    ("model_name_or_path: a/b\nloss_type: alphapo", {"preference.losses": ("simpo",)}, "loss_type='alphapo' -> "),
    ("model_name_or_path: a/b\nlosses: [orpo]\nbeta: 0.3",
     {"preference.losses": ("orpo",), "preference.pref_beta": 0.3}, "beta=0.3 -> preference.pref_beta=0.3"),
    ("model_name_or_path: a/b\nloss_type: robust\nlabel_smoothing: 0.1\ngenerate_during_eval: false",
     {"preference.losses": ("robust",), "preference.pref_smoothing": 0.1, "optim.label_smoothing": 0.0},
     "label_smoothing=0.1 -> preference.pref_smoothing=0.1"),
    ("model_name_or_path: a/b\nbeta: 0.1\nrpo_alpha: 0.2",
     {"preference.losses": ("sigmoid", "sft"), "preference.loss_weights": (1.0, 0.2)}, "rpo_alpha=0.2 -> preference"),
    ("model_name: a/b\nmax_seq_length: 512\nloss_type: ipo\nbeta: 0.2\nper_device_train_batch_size: 2",
     {"preference.losses": ("ipo",), "preference.pref_beta": 0.2, "data.max_length": 512, "data.packing": True},
     "max_seq_length=512 -> data.max_length=512: there it limits the prompt with one reply"),
    # axolotl
    (AXOLOTL_DPO,
     {"preference.losses": ("sigmoid", "sft"), "preference.loss_weights": (1.0, 0.2), "preference.pref_beta": 0.2,
      "data.format": "preference", "data.columns": {"messages": "conversation", "chosen": "good", "rejected": "bad"},
      "data.max_length": 2048, "data.packing": False, "lora.dropout": 0.0, "lora.r": 8, "optim.batch_size": 2},
     "rl='dpo', dpo_loss_type=['sigmoid', 'sft'], dpo_loss_weights=[1.0, 0.2] -> preference.losses=['sigmoid', 'sft'"),
    ("base_model: a/b\nrl: ipo\nprecompute_ref_log_probs: true\ndpo_use_weighting: false\ndpo_padding_free: true",
     {"preference.losses": ("ipo",), "preference.pref_beta": 0.1}, "rl='ipo' -> preference.losses=['ipo']"),
    ("base_model: a/b\nrl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.0\nmax_prompt_len: 512",
     {"preference.losses": ("simpo", "sft"), "preference.loss_weights": (1.0, 1.0), "preference.pref_beta": 2.0},
     "cpo_alpha is absent, and its default is 1: sft keeps the chosen replies likely"),
    ("base_model: a/b\nrl: orpo\norpo_alpha: 0.3\ndatasets: [{path: c/d, type: chat_template.argilla}]",
     {"preference.losses": ("orpo",), "preference.pref_beta": 0.3, "data.columns": None}, "orpo_alpha=0.3 -> preferen"),
    ("base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: chatml.icr}]",
     {"data.columns": {"question": "input"}, "data.format": "preference"}, "the tokenizer's own chat template is used"),
    ("base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: llama3.ultra}]",
     {"data.columns": {"question": "prompt"}}, "datasets.type='llama3.ultra' -> data.format='preference'"),
    ("base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: llama3.argilla}]",
     {"data.columns": {"question": "instruction"}}, "datasets.type='llama3.argilla' -> data.columns.question="),
    ("base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: {field_prompt: ask, field_chosen: good, field_rejected: "
     "bad, prompt_format: '{prompt}', field_system: system}}]",
     {"data.columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"}, "data.format": "preference"},
     "datasets.type.prompt_format='{prompt}' is ignored: the columns are used as they are"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ours", "note"), PAIR_FILES)
def test_losses_and_rows_of_pairs_are_translated_exactly(read: Any, text: str, ours: dict[str, Any], note: str) -> None:
    config, notes = read(text)
    assert {name: config[name] for name in ours} == ours
    assert note in notes
    trained = as_trained(config)
    assert (trained.recipe, trained.data.format) == ("dpo", "preference")


LABEL_FILES = [
    ("model_name_or_path: a/b\nloss_type: kto\nbeta: 0.2\ndesirable_weight: 1.5\ntrain_sampling_strategy: sequential",
     {"preference.losses": ("kto",), "preference.pref_beta": 0.2, "preference.desirable_weight": 1.5,
      "optim.learning_rate": 1e-6, "data.packing": False}, "loss_type='kto' -> preference.losses=['kto']"),
    ("model_name_or_path: a/b\nundesirable_weight: 0.5",
     {"preference.losses": ("kto",), "preference.pref_beta": 0.1, "preference.undesirable_weight": 0.5},
     "the default loss -> preference.losses=['kto']"),
    ("base_model: a/b\nrl: kto\nrl_beta: 0.2\nkto_desirable_weight: 0.2\nkto_undesirable_weight: 1.0\n"
     "remove_unused_columns: false\ndatasets: [{path: c/d, type: llama3.argilla}]",
     {"preference.losses": ("kto",), "preference.pref_beta": 0.2, "preference.desirable_weight": 0.2,
      "data.format": "unpaired", "data.columns": {"question": "instruction"}}, "kto_desirable_weight=0.2 -> prefere"),
    ("base_model: a/b\nrl: kto\ndatasets: [{path: c/d, type: chatml.argilla_chat}]",
     {"data.columns": {"messages": "completion"}, "data.format": "unpaired"}, "the tokenizer's own chat template is"),
    ("base_model: a/b\nrl: kto\ndatasets: [{path: c/d, type: llama3.ultra}]", {"data.columns": {"question": "prompt"}},
     "datasets.type='llama3.ultra' -> data.format='unpaired'"),
    ("base_model: a/b\nrl: kto\ndatasets: [{path: c/d, type: {field_prompt: ask, field_completion: said, field_label: "
     "good, completion_format: '{completion}'}}]",
     {"data.columns": {"prompt": "ask", "completion": "said", "label": "good"}, "data.format": "unpaired"},
     "datasets.type.completion_format='{completion}' is ignored: the columns are used as they are"),
    ("model_name_or_path: a/b\nstage: kto\npref_beta: 0.3\nkto_chosen_weight: 2\nkto_rejected_weight: 0.5\n"
     "source: a.jsonl",
     {"preference.losses": ("kto",), "preference.pref_beta": 0.3, "preference.desirable_weight": 2,
      "preference.undesirable_weight": 0.5, "optim.learning_rate": 5e-5}, "stage='kto' is ignored: losses=[kto] sets"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ours", "note"), LABEL_FILES)
def test_files_of_kto_are_runs_on_labelled_replies(read: Any, text: str, ours: dict[str, Any], note: str) -> None:
    config, notes = read(text)
    assert {name: config[name] for name in ours} == ours
    assert note in notes and "it is sigmoid (DPO) there" not in notes
    trained = as_trained(config)
    assert (trained.recipe, trained.data.format) == ("dpo", "unpaired")


def test_two_data_sets_of_axolotls_pairs_are_a_mix(read: Any) -> None:
    config, _ = read(
        "base_model: a/b\nrl: dpo\ndatasets: [{path: c/d, type: chatml.intel}, {path: e/f, type: chat_template, "
        "field_messages: talk, message_property_mappings: {role: from, content: value}, roles: {user: [user]}}]"
    )
    assert [one.plain() for one in config.data.mix] == [
        {"source": "c/d", "format": "preference", "columns": {"question": "question"}},
        {"source": "e/f", "format": "preference", "columns": {"messages": "talk"}},
    ]


def test_a_file_of_llama_factorys_dpo_is_a_run_on_pairs(
    write: Any, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "of pairs {question: instruction, chosen: chosen, rejected: rejected}" in problems(write(FACTORY_DPO))[0]
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(PAIRS_LISTED))
    config, notes = read(FACTORY_DPO)
    ours = {
        "preference.losses": ("sigmoid", "sft"), "preference.loss_weights": (1.0, 0.5), "preference.pref_beta": 0.2,
        "preference.ld_alpha": 0.5, "data.max_length": 2048, "lora.r": 16, "optim.batch_size": 8, "data.packing": False,
    }  # fmt: skip
    assert {name: config[name] for name in ours} == ours and as_trained(config).recipe == "dpo"
    assert [one.plain() for one in config.data.mix] == [
        {"source": "data/pairs.json", "name": "pairs",
         "columns": {"question": "ask", "context": "more", "chosen": "good", "rejected": "bad"}},
        {"source": "a/b", "name": "talks", "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}},
    ]  # fmt: skip
    assert "sft averages over all tokens of the chosen replies here, but first within every reply there" in notes
    config, notes = read(FACTORY_DPO.replace("pref_loss: sigmoid\npref_ftx: 0.5", "pref_loss: orpo"))
    assert config.preference.losses == ("orpo",) and "its likelihood includes the prompt, as in TRL" in notes
    config, notes = read(FACTORY_DPO.replace("pref_loss: sigmoid\npref_ftx: 0.5", "pref_loss: simpo\nsimpo_gamma: 2"))
    assert (config.preference.losses, config.preference.simpo_gamma) == (("simpo",), 2.0)
    config, notes = read(FACTORY_DPO.replace("pref_loss: sigmoid\npref_ftx: 0.5\n", ""))
    assert config.preference.losses == ("sigmoid",) and "the default loss -> preference.losses=['sigmoid']" in notes
    told = problems(write(FACTORY_DPO.replace("pairs, talks", "[answers, labels]")))
    assert "it has no pairs, which stage=dpo needs" in told[0] and "of replies, which are for stage=kto" in told[1]
    config, _ = read("model_name_or_path: a/b\nstage: kto\ndataset: labels, tagged")
    assert [one.plain()["columns"] for one in config.data.mix] == [
        {"messages": "talk", "label": "good"}, {"question": "ask", "label": "tag", "completion": "output"},
    ]  # fmt: skip
    assert (
        "it has no labels of replies, which stage=kto needs"
        in problems(write("model_name_or_path: a/b\nstage: kto\ndataset: labels, answers"))[0]
    )
    told = problems(write(FACTORY_DPO.replace("smoothing: 0.0", "smoothing: 0.1\npref_bco_weight: 1\nref_model: c/d")))
    assert [text.split(":")[0] for text in told] == ["dpo_label_smoothing", "pref_bco_weight", "ref_model"]


def test_a_file_of_trl_is_planned_by_dpo(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {"question": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": f"It is {n + 2}."} for n in range(6)
    ]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = write(TRL_DPO.replace("max_length: 2048", "max_length: 256"))
    assert main(["dpo", str(path), "--dry-run", "device_type=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "pairs            6, " in printed and "3 updates" in printed


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: a/b, rope_scaling: {rope_type: yarn, factor: 4.0}}",
        "base_model: a/b\nrope_scaling: {type: linear, factor: 2.0}",
        "base_model: a/b\noverrides_of_model_config: {rope_scaling: {type: linear, factor: 2.0}}",
        "model_name_or_path: a/b\nstage: sft\nrope_scaling: dynamic\ntemplate: llama3",
    ],
)
def test_other_rotary_positions_than_the_models_are_refused_by_name(write: Any, text: str) -> None:
    (told,) = problems(write(text))
    assert "rope_scaling" in told
    assert told.endswith(
        "rotary positions come from model.name's config.json, because an adapter cannot store others; remove it, or "
        "use a model with more positions"
    )
