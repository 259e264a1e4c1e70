"""The rules across the parameters of a run: values that contradict each other, and the change that helps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from datetime import date
from typing import TYPE_CHECKING

from tpu_kit.config.fields import near_multiples
from tpu_kit.config.hub import hub_conflicts
from tpu_kit.config.mesh import parse_mesh
from tpu_kit.config.named_values import check_roles
from tpu_kit.config.sections.data import GENERATED

if TYPE_CHECKING:
    from tpu_kit.config.schema import OptimConfig, TrainConfig

_NAMES = (
    "model.name", "model.revision", "model.gguf_file", "model.quant_cache", "data.eval_source", "data.eval_split",
    "output_dir", "tracking.wandb_project",
)  # fmt: skip

_ARRANGED = ("sequence", "round_robin", True)  # of data.order and data.pack_apart
_SMOOTHED = ("robust", "exo_pair", "simpo")  # losses with label smoothing
_SEQUENCE_EPSILON = 0.1  # far above useful clipping of ratios per completion (GSPO, arXiv:2507.18071: 3e-4 and 4e-4)


def conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) for every contradiction between parameters; reads nothing but `config`.

    `names` is a text of dotted names separated by spaces. `problem` is about the first, and continues "NAME: VALUE",
    such as "is not supported with ...; remove it".
    """
    model, lora, data = config.model, config.lora, config.data

    if config.run_name in (".", "..") or set(config.run_name) & set('/\\:*?"<>|') or not _is_name(config.run_name):
        yield "run_name", "cannot name a folder; use letters, digits, dots and dashes, 200 bytes at most"
    named = [(name, config[name]) for name in _NAMES]
    named += [(f"data.{name}", getattr(one, name)) for one in data.by_source for name in ("source", "split")]
    for name, value in named:
        if value is not None and not all(_is_name(part) for part in value.split("/") if part):
            yield name, "cannot name a file or a folder; write a name without line breaks or spaces at its ends"
    if config.remote and not re.fullmatch(r"gs://[^/]+(/.*)?|hf://.*", config.remote):
        yield "output_dir", "is neither a folder nor a gs:// address; use either, such as gs://bucket/run"
    if model.base_dtype in ("int8", "int4"):
        if lora.r == 0:
            text = "holds weights that cannot be trained, and lora.r=0 trains all; set lora.r=16, or "
            yield "model.base_dtype lora.r", f"{text}model.base_dtype=bf16"
        if lora.dora:
            text = f"reads base weights that model.base_dtype={model.base_dtype} has rounded; remove it"
            yield "lora.dora model.base_dtype", text
    if lora.experts and (lora.dropout or lora.dora):
        name = "dora" if lora.dora else "dropout"
        yield f"lora.{name} lora.experts", "is not supported for adapters of experts; remove it, or set lora.experts=0"
    yield from _embedding_conflicts(config)
    for one, name in zip(data.by_source, data.source_names or ("",), strict=True):
        try:
            check_roles(one.columns or {}, one.format)
        except ValueError as error:
            if one.columns == data.columns:
                yield "data.columns data.format", str(error)
            else:
                yield "data.source data.format", f"has {name}, whose columns={one.columns} {error}"
    if data.date is not None and not _is_date(data.date):
        yield "data.date", "is no date such as 2025-12-31; write a date, or null for the day on which the run starts"
    if data.think_open == data.think_close:
        yield "data.think_close data.think_open", "is data.think_open too; the two must differ"
    if config.launch.mesh is not None:
        yield from _mesh_conflicts(config, config.launch.mesh)
    yield from _objective_conflicts(config)
    yield from _policy_conflicts(config)
    yield from _preference_conflicts(config)
    yield from _evaluation_conflicts(config)
    yield from _mix_conflicts(config)
    yield from _stream_conflicts(config)
    yield from _image_conflicts(config)
    yield from _schedule_conflicts(config.optim)
    yield from _remat_conflicts(config)
    yield from _batch_conflicts(config)
    yield from hub_conflicts(config)
    yield from _without_effect(config)


def _embedding_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) as `conflicts`: embeddings trained twice or with images, or a rate if none is trained."""
    lora, rate = config.lora, config.optim.embedding_learning_rate
    if lora.tokens and lora.full:
        yield "lora.tokens lora.full", "trains vectors of embeddings that lora.full trains in full; remove either"
    for name in ("tokens", "full"):
        if config.model.images and config[f"lora.{name}"]:
            yield f"lora.{name} model.images", "is not for model.images=true; remove it, or set that to false"
    if config.model.images and lora.adapts_embeddings:
        text = "names an embedding, but model.images=true trains none; name linear layers, or set model.images=false"
        yield "lora.targets model.images", text
    if rate is not None and lora.r and lora.targets == "all-linear" and not (lora.tokens or lora.full):
        text = "has no effect: no embedding is trained; set lora.tokens or lora.full, or name one in lora.targets"
        yield "optim.embedding_learning_rate lora.targets", text


def _remat_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    looped = {"optim.scan_layers=on": config.optim.scan_layers == "on", "distill.layers": bool(config.distill.layers)}
    for setting in (setting for setting, given in looped.items() if given and config.optim.remat == "none"):
        text = f"needs layers that do not run as a loop, but {setting} makes loops; set optim.remat=outputs"
        yield f"optim.remat {setting.partition('=')[0]}", text
    if (config.optim.remat, config.optim.scan_layers) == ("blocks", "off"):
        text = "needs blocks of equal layers, and optim.scan_layers=off has none; remove optim.scan_layers=off"
        yield "optim.remat optim.scan_layers", text
    if config.optim.remat == "blocks" and config.distill.layers:
        text = "stores no outputs of single layers, which distill.layers compares; set optim.remat=full"
        yield "optim.remat distill.layers", text


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) for non-default parameters without effect, or refused, because of the second name."""
    model, distill, optim, rl = config.model, config.distill, config.optim, config.rl
    sampler = "distill.on_policy" if distill.on_policy else "grpo"
    of_distill = " ".join(leaf.name for leaf in fields(distill))
    no_growth = "has no effect with optim.batch_growth_factor=1; remove it or set optim.batch_growth_factor=2"
    rules = (
        (model.name == "embedded", "model", "revision gguf_file", "model.name",
         "has no effect on the embedded model; remove it or set model.name"),
        ("int4" not in (model.base_dtype, distill.teacher_dtype), "model", "quant_group", "model.base_dtype",
         "needs model.base_dtype=int4; remove it or set that"),
        (not model.images, "lora", "vision", "model.images", "trains the projector of images; set model.images=true"),
        (not model.images, "data", "images_per_row image_tokens", "model.images",
         "has no effect without images; remove it or set model.images=true"),
        (config.lora.r == 0, "lora", "experts dropout targets tokens full plus rslora dora init adapter", "lora.r",
         "needs adapters, and lora.r=0 has none; remove it or set lora.r=16"),
        (optim.optimizer == "adafactor", "optim", "beta1 beta2 eps", "optim.optimizer",
         "has no effect with optim.optimizer=adafactor, only with adamw; remove it"),
        (distill.teacher is None, "distill", of_distill, "distill.teacher",
         "has no effect without a teacher; remove it or set distill.teacher"),
        (distill.teacher is not None and distill.files is None, "distill", "top_k", "distill.files",
         "needs distill.files; remove it or set distill.files"),
        (optim.objective.startswith("error-"), "tracking", "eval_generate_rows", "optim.objective",
         "generates without the error-correction head; set it to 0"),
        (optim.schedule == "constant", "optim", "min_learning_rate_ratio", "optim.schedule",
         "is the end of a decay, but optim.schedule=constant has none; set it to 0 or optim.schedule=cosine"),
        (optim.eval_steps is None, "optim", "early_stop_patience", "optim.eval_steps",
         "counts evaluations during training, but optim.eval_steps is null; set optim.eval_steps"),
        (rl.loss_type == "cispo", "rl", "delta", "rl.loss_type",
         "has no effect with rl.loss_type=cispo; remove it"),
        (config.hub.model_id is None, "hub", "private strategy revision format", "hub.model_id",
         "has no effect without a repository; remove it or set hub.model_id=owner/name"),
        (config.tracking.wandb == "off", "tracking", "wandb_adapter", "tracking.wandb",
         "uploads to a W&B run, but tracking.wandb=off; set wandb=online"),
        (config.on_policy, "optim",
         "gradient_accumulation global_batch_size batch_growth_factor label_smoothing early_stop_patience",
         "distill.on_policy" if distill.on_policy else "optim.objective",
         f"is not for {sampler}: an update has as many passes as its completions need; remove it"),
        (config.on_pairs, "optim", "label_smoothing", "optim.objective",
         "is for the loss of tokens; in dpo set preference.pref_smoothing"),
        (config.on_pairs, "rl", " ".join(leaf.name for leaf in fields(rl)), "optim.objective",
         "is for grpo; in dpo set the section preference (pref_beta, losses), or remove it"),
        (optim.batch_growth_factor == 1, "optim", "batch_growth_steps batch_growth_max batch_growth_lr",
         "optim.batch_growth_factor", no_growth),
    )  # fmt: skip
    for unused, section, leaves, because, text in rules:
        values = getattr(config, section)
        for leaf in leaves.split() if unused else ():
            if getattr(values, leaf) != getattr(type(values), leaf):  # the class has the defaults
                yield f"{section}.{leaf} {because}", text


def _mesh_conflicts(config: TrainConfig, mesh: str) -> Iterator[tuple[str, str]]:
    try:
        sizes = {} if mesh == "auto" else parse_mesh(mesh)
    except ValueError as error:
        yield "launch.mesh", str(error)
        return
    if config.launch.num_replicas is not None:
        yield "launch.mesh launch.num_replicas", "sets the number of devices itself; remove launch.num_replicas"
    if mesh == "auto":  # then replicas remain
        return
    if config.launch.device_type in ("torch-tpu", "cuda", "cpu"):
        text = f"needs XLA, and launch.device_type={config.launch.device_type}; use tpu or xla-cpu, or remove it"
        yield "launch.mesh launch.device_type", text
    for name in ("model.base_dtype", "distill.teacher_dtype"):
        if config[name] == "int4" and sizes.get("model", 1) != 1:
            text = f"splits columns, but int4 packs two columns in a byte; use fsdp instead of model, or {name}=int8"
            yield f"launch.mesh {name}", text
    if config.optim.scan_layers == "off":
        yield "launch.mesh optim.scan_layers", "needs layers that run as a loop; remove optim.scan_layers=off"
    if config.optim.remat == "none":
        yield "launch.mesh optim.remat", "needs layers that run as a loop, and loops recompute; set optim.remat=outputs"


def _objective_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    optim, distill = config.optim, config.distill
    own = optim.objective != "supervised"
    if optim.objective == "error-correction-alone" and not config.lora.r:
        yield "optim.objective lora.r", "does not train the model's weights, and lora.r=0 saves them all; set lora.r=1"
    if distill.teacher is None:
        return
    if own:
        yield "optim.objective distill.teacher", "excludes the loss of distill.teacher; remove either"
    weights = [f"distill.{leaf.name}" for leaf in fields(distill) if leaf.name.endswith("_weight")]
    if not any(config[name] for name in weights):
        yield " ".join(weights), "and all other weights of distill are 0 too, so nothing is learned; set one above 0"
    if distill.on_policy and distill.labels_weight:
        text = "weights the likelihood of labels, but the model samples the labels here; set it to 0"
        yield "distill.labels_weight distill.on_policy", text
    pairs = distill.pairs
    if bool(pairs) != bool(distill.hidden_weight):
        text = f"and distill.layers={distill.layers or 'null'} belong together; set both, or remove both"
        yield "distill.hidden_weight distill.layers", text
    if distill.files is None:
        return
    if distill.on_policy:
        text = "holds logits of the rows, but distill.on_policy samples new completions; remove either"
        yield "distill.files distill.on_policy", text
    if not distill.logits_weight:
        yield "distill.files distill.logits_weight", "holds logits, but distill.logits_weight=0; remove either"
    elif distill.hidden_weight or distill.embeddings_weight:
        text = "holds only logits; set distill.hidden_weight=0 and distill.embeddings_weight=0, or remove it"
        yield "distill.files distill.hidden_weight distill.embeddings_weight", text


def _policy_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) as `conflicts`: within `rl` for all runs, with rows and lengths if the run samples."""
    rl, data, sampler = config.rl, config.data, "distill.on_policy" if config.distill.on_policy else "grpo"
    if rl.loss_type == "cispo" and rl.epsilon_high < 1:
        text = "limits the ratio itself with rl.loss_type=cispo, and ratios are about 1; set rl.epsilon_high=5"
        yield "rl.epsilon_high rl.loss_type", text
    elif rl.loss_type != "cispo" and rl.epsilon_high < rl.epsilon:
        text = f"is below rl.epsilon={rl.epsilon:g}; raise it, or lower rl.epsilon"
        yield "rl.epsilon_high rl.epsilon", text
    elif rl.loss_type != "cispo" and rl.importance_sampling_level == "sequence" and rl.epsilon_high > _SEQUENCE_EPSILON:
        text = (
            "suits ratios of tokens; with rl.importance_sampling_level=sequence a ratio is the mean over a completion, "
            "which is rarely 0.1 away from 1; set rl.epsilon=3e-4 and rl.epsilon_high=4e-4"
        )
        yield "rl.epsilon_high rl.epsilon rl.importance_sampling_level", text
    if rl.beta and not config.lora.r:
        text = "compares with the model without its adapter, and lora.r=0 has none; set rl.beta=0 or lora.r=16"
        yield "rl.beta lora.r", text
    if rl.beta and config.lora.adapter:
        text = (
            "is the start of training, but rl.beta compares with the model without any adapter; export it merged and "
            "set model.name to that folder, or set rl.beta=0"
        )
        yield "lora.adapter rl.beta", text
    for name in ("beta", "entropy_coef"):
        if getattr(rl, name) and rl.drop_zero_advantage:
            text = f"leaves out groups that rl.{name}={getattr(rl, name):g} needs; remove it, or set rl.{name}=0"
            yield f"rl.drop_zero_advantage rl.{name}", text
    if not config.on_policy:
        return
    if rl.max_completion_length + (rl.max_prompt_length or 1) > data.max_length:
        text = f"and a prompt must fit a row of data.max_length={data.max_length}; raise data.max_length, or lower this"
        yield "rl.max_completion_length rl.max_prompt_length data.max_length", text
    if data.source == "synthetic":
        because = "distill.on_policy" if config.distill.on_policy else "optim.objective"
        yield f"data.source {because}", f"has random tokens but no prompts, which {sampler} needs; name a source"
    if config.optim.eval_steps is not None and not config.tracking.eval_generate_rows:
        text = f"evaluates only answers in {sampler}; set tracking.eval_generate_rows to 200 or more, or this to null"
        yield "optim.eval_steps tracking.eval_generate_rows", text


def _preference_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) as `conflicts`: within `preference` for all runs, and with the data section for `dpo`."""
    preference, lora = config.preference, config.lora
    losses = {*preference.losses}
    if preference.loss_weights is not None and len(preference.loss_weights) != len(preference.losses):
        text = (
            f"gives {len(preference.loss_weights)} weights for {len(preference.losses)} losses; give a weight per loss"
        )
        yield "preference.loss_weights preference.losses", text
    if preference.pref_smoothing and losses.isdisjoint(_SMOOTHED):
        yield "preference.pref_smoothing preference.losses", f"is for {', '.join(_SMOOTHED)}; remove it, or use one"
    for name in ("desirable_weight", "undesirable_weight"):
        if getattr(preference, name) != 1.0 and not preference.labelled:
            yield f"preference.{name} preference.losses", "is for kto; remove it, or set losses=[kto]"
    if preference.labelled and preference.reference == "step":
        yield "preference.reference preference.losses", "is not for kto, whose reference is always start; remove it"
    if "exo_pair" in losses and not preference.pref_smoothing:
        yield "preference.pref_smoothing preference.losses", "must be above 0 with exo_pair, such as 1e-3"
    if preference.reference == "step" and preference.compares:
        if lora.adapter:
            text = "is the start of training, but preference.reference=step compares with the model without any adapter"
            yield "lora.adapter preference.reference", text + "; set preference.reference=start"
        if not lora.r:
            yield "preference.reference lora.r", "needs an adapter to turn off, but lora.r=0 has none; set it to start"
    if not config.on_pairs:
        return
    if config.distill.teacher is not None:
        yield "distill.teacher optim.objective", "is for train and distill; dpo has its own losses; remove it"
    for name in ("data.eval_source", "data.source"):
        if config[name] == "synthetic":
            yield name, "has random tokens but no pairs of replies; name rows with a chosen and a rejected reply"
    for number, one in enumerate(config.data.by_source):
        where = f"data.source[{number}].format" if config.data.mix else "data.format"
        wanted = "unpaired" if preference.labelled else "preference"
        if one.format not in ("auto", wanted) and ":" not in one.format:
            text = f"({where}={one.format}) does not suit losses={','.join(preference.losses)}, which need {wanted}"
            yield "data.format", text + "; remove it"
        if one.loss_on == "all":
            yield "data.loss_on", "trains prompts too, but dpo compares replies; remove it"
    if config.data.too_long == "split":
        yield "data.too_long", "cuts plain text, but a pair is never cut; set truncate, drop or error"
    if config.model.images:
        yield "model.images", "is not for pairs of replies; set it to false"


def _is_date(text: str) -> bool:
    with suppress(ValueError):
        return date.fromisoformat(text).isoformat() == text
    return False


def _is_name(text: str) -> bool:
    """Returns whether a text is printable, without outer spaces, and has 1 to 200 bytes of UTF-8."""
    return text == text.strip() and text.isprintable() and 0 < len(text.encode()) <= 200


def _evaluation_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    rows = "data.eval_rows data.eval_source data.eval_split"
    answers = "tracking.generate_rows", "tracking.eval_generate_rows"
    if data.eval_source is None and data.eval_split in [one.split for one in data.by_source]:
        yield "data.eval_split data.split", "is the training split; name another split, or null to hold out eval_rows"
    if data.source == "synthetic":
        for name in ("data.eval_source", "data.eval_split", "data.eval_rows", *answers):
            if config[name]:
                yield f"{name} data.source", "needs text, but data.source=synthetic has random tokens; remove that"
    if data.eval_source is None and data.eval_split is None and data.eval_rows == 0:
        for name in ("optim.eval_steps", "optim.early_stop_patience", *answers):
            if config[name]:
                advice = "remove data.eval_rows=0, or set data.eval_source or data.eval_split"
                yield f"{name} {rows}", f"needs rows to evaluate on, but data.eval_rows=0; {advice}"


def _mix_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) as `conflicts` for order, pack_apart and curriculum, and for shares of tokens."""
    data, arranged = config.data, [name for name in ("order", "pack_apart") if config[f"data.{name}"] in _ARRANGED]
    for name in arranged if not data.mix else ():
        yield f"data.{name} data.source", "is for several sources; remove it, or give data.source a list"
    if data.curriculum is not None:
        arranged.append("curriculum")
        if data.order != "mix":
            yield "data.curriculum data.order", f"and data.order={data.order} are two orders; remove either"
    if not config.on_policy:
        return
    because = "distill.on_policy" if config.distill.on_policy else "optim.objective"
    for name in arranged:
        yield f"data.{name} {because}", "orders rows that are packed before the run, but this run samples; remove it"
    if any(one.tokens is not None for one in data.mix):
        yield f"data.source {because}", "has shares of tokens, but this run samples its tokens; give weight instead"


def _stream_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem) as `conflicts` for settings that data.streaming=true does not allow."""
    data, tracking, distill = config.data, config.tracking, config.distill
    if not data.streaming:
        return
    if config.optim.max_steps is None:
        yield "optim.max_steps data.streaming", "but a stream has no end; set the number of updates"
    if data.mix:
        yield "data.source data.streaming", "is a mix, but a stream is one source; name its files by a glob or a folder"
    elif data.source in (*GENERATED, "synthetic"):
        yield "data.source data.streaming", "is no text file; name files, a folder or a data set of the hub"
    own_first = "is not for a stream, which holds out its first data.eval_rows rows; remove it"
    prompts = "needs prompts, but a stream is plain text; "
    rules = (
        ("data.format", data.format not in ("auto", "text"), "is not plain text, but a stream is; set it to text"),
        (
            "data.too_long",
            data.too_long != "split",
            "loses parts of long texts, but a stream must split them; set it to split",
        ),
        ("data.packing", not data.packing, "leaves rows unfilled, but a stream fills them; remove it"),
        ("data.curriculum", data.curriculum is not None, "sorts all rows, but a stream reads them in parts; remove it"),
        ("data.split", "[" in data.split, "is a part, but a stream does not count its rows; name the whole split"),
        ("data.eval_source", data.eval_source is not None, own_first),
        ("data.eval_split", data.eval_split is not None, own_first),
        (
            "data.eval_rows",
            0 < (data.eval_rows or 0) < 1,
            "is a share, but a stream does not count its rows; set a number",
        ),
        (
            "model.images",
            config.model.images,
            "is for chats with images, but a stream is plain text; set it to false",
        ),
        ("optim.objective", config.on_policy and not distill.on_policy, prompts + "use train instead of grpo"),
        (
            "optim.objective",
            config.on_pairs,
            "needs pairs of replies, but a stream is plain text; use train",
        ),
        ("distill.on_policy", distill.on_policy, prompts + "set it to false"),
        ("distill.files", distill.files is not None, "holds logits of rows known before training; set it to null"),
        ("tracking.generate_rows", tracking.generate_rows > 0, prompts + "set it to 0"),
        ("tracking.eval_generate_rows", tracking.eval_generate_rows > 0, prompts + "set it to 0"),
    )
    yield from ((f"{name} data.streaming", text) for name, wrong, text in rules if wrong)


def _image_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields (names, problem), as `conflicts` does, for parameters that model.images=true does not allow."""
    if not config.model.images:
        return
    of_text = "is for text alone, but model.images=true trains on rows with images; "
    if config.on_policy:
        yield "optim.objective model.images", of_text + "use train, or set model.images=false"
    if config.distill.teacher is not None:
        yield "distill.teacher model.images", of_text + "remove it, or set model.images=false"
    if config.lora.r == 0:
        yield "lora.r model.images", "trains all weights, but the vision part stays frozen; set lora.r=16"
    if config.data.source == "synthetic":
        yield "data.source model.images", "has random tokens but no images; name a source, or set model.images=false"
    if config.data.too_long == "split":
        yield "data.too_long model.images", "cuts documents, which may hold images; set it to drop or error"


def _schedule_conflicts(optim: OptimConfig) -> Iterator[tuple[str, str]]:
    if optim.max_steps is None and optim.epochs is None:
        text = "and optim.epochs is null too, so training would never end; set either"
        yield "optim.max_steps optim.epochs", text
    if optim.warmup_steps and optim.warmup_ratio:
        text = f"and optim.warmup_ratio={optim.warmup_ratio:g} both set the warm-up; set either to 0"
        yield "optim.warmup_steps optim.warmup_ratio", text
    if optim.max_steps is not None and optim.warmup_steps > optim.max_steps:
        text = f"is more than optim.max_steps={optim.max_steps}; lower it or raise optim.max_steps"
        yield "optim.warmup_steps optim.max_steps", text


def _batch_conflicts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    optim = config.optim
    rows, whole, passes = optim.batch_size, optim.global_batch_size, optim.gradient_accumulation
    if whole is not None and isinstance(rows, int) and whole % (rows * passes):
        # Wrong for any number of replicas; batch_arithmetic checks the actual number.
        factors = f"optim.batch_size={rows} x optim.gradient_accumulation={passes}"
        text = f"is no multiple of {factors}; use {near_multiples(whole, rows * passes)}"
        yield "optim.global_batch_size optim.batch_size optim.gradient_accumulation", text
    if optim.batch_growth_factor > 1 and optim.batch_growth_steps is None:
        text = f"but optim.batch_growth_factor={optim.batch_growth_factor:g} needs the updates between growths; set it"
        yield "optim.batch_growth_steps optim.batch_growth_factor", text
    if optim.batch_growth_max is not None and whole is not None and optim.batch_growth_max < whole:
        text = f"is less than the optim.global_batch_size={whole} that training starts with; raise it"
        yield "optim.batch_growth_max optim.global_batch_size", text
