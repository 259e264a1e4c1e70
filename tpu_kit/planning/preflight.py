"""Chooses the batch and `optim.remat` of a run before `train` launches it, and predicts its memory and time.

The predictions come from the formula. If it does not cover a configuration, a message says so and the run starts. If
the formula alone does not decide and libtpu is installed, the TPU compiler is asked for at most a minute: see `_Asks`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.distributed.detection import Backend, detect, device_memory_budget, seen_on
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.slices import TargetSlice
from tpu_kit.model.shape import Shape
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.compiler.compile_check import CompilerUnavailable, check_available
from tpu_kit.planning.cost import StepTime, model_flops, work
from tpu_kit.planning.memory.argument_memory import item_bytes
from tpu_kit.planning.mesh_choice import check_mesh, placed
from tpu_kit.planning.planner import MOST_UNTIMED_ROWS, best_setting, verified
from tpu_kit.planning.run_cost import Count, filled_batch
from tpu_kit.planning.run_on_slice import Setting
from tpu_kit.training.losses.rollout_programs import rollout_of, warnings_of
from tpu_kit.xla.splash_blocks import padded_length, query_block

ASKED_SECONDS = 60.0
"""Time limit of the TPU compiler if the user did not ask for it; its answer is cached on disk."""
NEAR = 0.12
"""Share of a chip's memory: if the predicted peak is closer to the limit, the formula does not decide. Its error is
smaller for 9 of 10 steps of seeds that it was not fitted to."""
ROUNDED_PER_SECOND = {"int8": 500e6, "int4": 45e6}
"""Weights that a core of a server's CPU quantizes per second (measured: 584e6 and 49e6, groups of 128)."""
_LEAST_TILE = 128
"""Least tokens in a tile of the MLP, or in a chunk of the loss on a mesh: fewer leave a TPU's matrix units idle."""
_PADDED = 1.05
"""A note is printed if the attention kernel pads a row by more than this factor."""


@dataclass(frozen=True)
class Preflight:
    """The predictions for a run before it starts.

    Attributes:
        config: the run, with values for every "auto" that the launch needs.
        room: the devices, and the memory of a replica; None if that is not known.
        setting: the run on these devices, with the compiler's figures if it was asked; None if its memory is not known.
        notes: the choices that were made, and the facts that are not known.
    """

    config: TrainConfig
    room: TargetSlice | None
    setting: Setting | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the run fits with the reserve; None if that is not known."""
        return None if self.setting is None else self.setting.fits

    @property
    def time(self) -> StepTime | None:
        """The time of an update; None if the memory or the device's speed is not known."""
        return self.setting.time if self.setting and self.setting.where.chip.bf16_flops else None

    @property
    def device_bytes(self) -> int | None:
        """Predicted peak memory of a TPU or GPU in bytes; None for other devices, and if it is not known."""
        known = self.setting is not None and self.setting.where.device_type in ("tpu", "cuda")
        return self.setting.peak_bytes if self.setting and known else None

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs of a token in training, see `model_flops`; None if `setting` is None."""
        return model_flops(self.config, self.setting.shape) if self.setting else None

    def duration(self, updates: int) -> str:
        """Describes the duration of `updates` updates and its source, without compiling, evaluation and checkpoints.

        If `time` is known, it is an estimate. On a CPU it is a lower bound, by a measurement of a tenth of a second.
        Otherwise, and on a CPU if the run samples, the text says that it is not known.
        """
        besides = "without compiling, evaluation and checkpoints"
        if self.time is not None:
            how = "estimated, not measured" if self.time.measured is None else "as measured on this machine"
            return f"about {_duration(updates * self.time.seconds)} {how}; {besides}"
        one = self.setting
        # In a run that samples, the tokens depend on the completions.
        if one is None or one.several or one.where.device_type not in ("cpu", "xla-cpu"):
            return "not known before the first updates"
        done = work(seen_on(one.where.device_type, one.config), one.shape, one.update)
        least = updates * one.where.replicas * done.flops / _host_rate()
        return f"at least {_duration(least)} by the current speed of matrix products on this CPU; {besides}"

    def __str__(self) -> str:
        table = _table(self.setting, self.time) if self.setting else []
        return "\n".join([*table, *(f"plan             {note}" for note in self.notes)])


def _duration(seconds: float) -> str:
    """Formats seconds as minutes, or as seconds below a minute."""
    return f"{seconds / 60:,.1f} minutes" if seconds >= 60 else f"{seconds:.2g} seconds"


def _table(one: Setting, time: StepTime | None) -> list[str]:
    """Returns the lines about memory and its limit and, unless `time` is None, about a step's time."""
    room, peak = one.where, one.peak_bytes
    parts = [f"{name} {size / GIB:.2f}" for name, size in one.parts.items() if size >= peak / 50]
    verdict = "fits" if one.fits else "MAY NOT FIT"
    lines = [
        f"memory           {' + '.join(parts)} = {peak / GIB:.2f} GiB by {one.source}",
        f"memory limit     {room.limit / GIB:.2f} GiB for each of {room.replicas} on {room.name}, {one.free:.0%} "
        f"kept free: {verdict}",
    ]
    if room.device_type != "tpu":
        lines[0] += f", which is for TPUs, not for {room.device_type}"
    elif ratio := room.calibration.memory:
        lines[0] += f", {ratio * peak / GIB:.2f} GiB as measured on this machine"
    if time is not None:
        how = "estimated, not measured"
        if time.measured is not None:
            how = f"as measured on this machine ({time.predicted:.3f} s estimated)"
        most = "at most " if one.several else ""
        lines.append(f"step             {most}{time.seconds:.3f} s, {one.speed:,.0f} tokens/s {how}")
    return lines


def check_before_launch(
    config: TrainConfig,
    exact: bool = False,
    at: Machine | None = None,
    rows: int | None = None,
    backend: Backend | None = None,
    began: Mapping[str, Any] | None = None,
) -> Preflight:
    """Chooses open settings of a launch, and predicts its memory and time; a run that may not fit raises nothing.

    Args:
        config: the run.
        exact: True: the TPU compiler verifies batch size and remat, without a time limit. False: it is asked for at
            most `ASKED_SECONDS`, and only for a new run on one TPU host that the formula does not decide.
        at: the machine; None: this machine.
        rows: packed rows of the training data, or prompts of a run that samples; None if they are not known yet.
        backend: the result of `detect`, with the hosts; None detects it.
        began: "batch_size" and "global_batch_size" of the checkpoint from which the run resumes; None for a new run.

    Raises:
        ConfigError: as `check_mesh`. The batch cannot be split over the replicas, or the rows do not fill it; rows have
            no equal tiles; or the attention scores, or a rollout's KV cache, alone exceed the memory.
        ValueError: as `detection.detect` and `placed`; or `optim.batch_size=auto` cannot be chosen.
        RuntimeError: as `compile_step`, only with `exact`.
    """
    backend = backend or detect(config.launch, at)
    room = device_memory_budget(config, at, backend=backend)
    config, notes = room.calibration.apply(config) if room else (config, [])
    notes += room.calibration.notes if room else []
    asks = _Asks(backend, resumes=bool(began), auto=config.optim.batch_size == "auto")
    made: Setting | None = None
    try:
        shape, problem = read_shape(config.model), ""
    except ValueError as error:
        shape, problem = None, str(error)
    config, room, mesh, placing = _placed(config, room, shape, backend)
    notes += placing
    if room is not None and shape is not None:
        config, made, reasons = settle(config, room, exact, rows, began or {}, asks)
        notes += reasons
    elif config.optim.batch_size == "auto":
        problem = problem or "how much memory this machine has is not known"
        raise ValueError(f"optim.batch_size=auto: {problem}; give a number, such as optim.batch_size=4")
    if config.optim.remat == "auto":  # the memory or the shape is not known
        config = replace(config, optim=replace(config.optim, remat="full"))
    shards = mesh.batch_shards if mesh else room.replicas if room else None
    if shards is not None:
        config, fewer = filled_batch(config, shards, rows)
        notes += fewer
    one = Setting(config, shape, room) if room is not None and shape is not None else None
    notes += _rounding(config, shape)
    if room is not None and room.device_type == "tpu":
        notes += warnings_of(config, 1 if config.launch.mesh else room.replicas)
    try:
        _ = one and one.memory
    except ValueError as error:  # the run raises it, too
        one, problem = None, str(error)
    if one is not None and (wrong := [*_divisions(one), *_scores(one), *_caches(one)]):
        raise ConfigError(wrong)
    notes += _padding(one) if one else []
    if one is not None and made is not None and made.config.optim == config.optim:
        one = replace(one, compiled=made.compiled, unverified=made.unverified)
    if exact and (one is None or one.where.topology is None):
        notes.append("not by the TPU compiler: it compiles only for TPUs, and not for all of them")
    elif one is not None and not (one.compiled or one.unverified) and (exact or (seconds := asks(one))):
        one = verified([one], None if exact else seconds)
    notes += [_answer(one)] if one and _answer(one) else []
    return Preflight(config, room, one, (*notes, *([f"memory not known: {problem}"] if problem else [])))


def settle(
    config: TrainConfig, room: TargetSlice, exact: bool, count: int | None, began: Mapping[str, Any],
    asks: Callable[[Setting], float] = lambda best: 0.0,
) -> tuple[TrainConfig, Setting | None, list[str]]:  # fmt: skip
    """Chooses values for `optim.batch_size` and `optim.remat` if they are "auto"; raises as `best_setting`.

    A resumed run keeps the rows of an update, and the rows of a pass if they still divide the update. `began` has its
    "batch_size" and "global_batch_size"; it is empty for a new run. On other devices than TPUs, remat stays open.
    `count` is the number of data rows, None if unknown; `exact` and `asks` are passed to `best_setting`.

    Returns:
        The run; the chosen setting, or None if `best_setting` was not asked; and a text per choice with its reason.
    """
    notes = list[str]()
    if config.optim.batch_size == "auto" and isinstance(began.get("batch_size"), int):
        config, notes = _resumed(config, room, began["batch_size"], began["global_batch_size"])
    choices = ("batch_size", "remat") if room.device_type == "tpu" else ("batch_size",)
    names = [name for name in choices if getattr(config.optim, name) == "auto"]
    if not names:
        return config, None, notes
    best = best_setting(config, room, exact, Count(count), asks)
    why = f"the fastest that leaves {best.free:.0%} of {room.limit / GIB:.2f} GiB, by {best.source}"
    if room.chip.bf16_flops is None:
        why = f"the largest that leaves {best.free:.0%} of {room.limit / GIB:.2f} GiB, at most {MOST_UNTIMED_ROWS}"
    elif not best.fits:
        why = "the setting with the least memory"
    values: dict[str, Any] = {name: getattr(best.config.optim, name) for name in names}
    notes += [f"optim.{name}=auto is {value}: {why}" for name, value in values.items()]
    return replace(config, optim=replace(config.optim, **values)), best, notes


def _resumed(config: TrainConfig, room: TargetSlice, rows: int, whole: int) -> tuple[TrainConfig, list[str]]:
    """Chooses the batch of a resumed run from its earlier rows: `whole` per update, `rows` per pass of a replica.

    An update gets `whole` rows unless optim.global_batch_size is given; accumulation becomes 1. If the update has
    `whole` rows, and they fill passes of `rows` on all replicas of `room`, batch_size becomes `rows`, else it stays
    "auto". A run that samples only gets batch_size `rows`. Returns the run, and a list with a note if `rows` are kept.
    """
    optim = config.optim
    if not config.free_passes:  # otherwise its passes hold the samples
        optim = replace(optim, global_batch_size=optim.global_batch_size or whole, gradient_accumulation=1)
        if whole != optim.global_batch_size or whole % (rows * room.replicas):
            return replace(config, optim=optim), []
    note = f"optim.batch_size={rows}, as in the resumed run"
    return replace(config, optim=replace(optim, batch_size=rows)), [note]


def _placed(
    config: TrainConfig, room: TargetSlice | None, shape: Shape | None, backend: Backend
) -> tuple[TrainConfig, TargetSlice | None, Mesh | None, list[str]]:
    """Checks or, on TPUs, chooses the mesh; returns run, slice, mesh (None: replicas) and notes; raises as `placed`."""
    launch = config.launch
    if room is not None and room.device_type == "tpu" and shape is not None:
        config, room, why = placed(config, shape, replace(room, replicas=room.devices, mesh=None))
        notes, mesh = [why] if why else [], room.mesh
    else:
        notes, mesh = [], None
        found = backend.mesh
        if launch.mesh in (None, "auto"):
            config = replace(config, launch=replace(launch, mesh=str(found) if found else None))
        if found is not None:
            mesh = check_mesh(config, found.size, shape)
    if mesh is not None:
        notes.append(f"launch.mesh={mesh}: rows divided by {mesh.batch_shards}; devices {mesh.layout()}")
    return config, room, mesh, notes


def _divisions(one: Setting) -> Iterator[str]:
    """Yields a problem if tokens do not divide into equal tiles of the MLP, or on a mesh into chunks of the loss."""
    from tpu_kit.model.loop.activation_checkpointing import tiles_of  # it loads torch

    config, mesh = seen_on(one.where.device_type, one.config), one.where.mesh
    optim, length, rows = config.optim, config.data.max_length, one.update.batch_size
    tokens = length // mesh.context if mesh else rows * length  # on a mesh a tile has tokens of every row
    sizes = {"mlp_tile": optim.mlp_tile} if optim.remat in ("full", "blocks") and optim.scan_layers != "off" else {}
    for name, size in (sizes | ({"loss_chunk": optim.loss_chunk} if mesh else {})).items():
        most = max(1, size // rows if mesh else size) if size else tokens
        count = tiles_of(tokens, most)
        if tokens // count < min(most, _LEAST_TILE):
            near = max(_LEAST_TILE, length // _LEAST_TILE * _LEAST_TILE)
            yield (
                f"data.max_length={length}: {rows} x {length} tokens would be {count:,} tiles of {tokens // count} for "
                f"optim.{name}={size}, because larger tiles are not equal; set data.max_length={near}, a multiple of "
                f"{_LEAST_TILE}"
            )
            return


def _scores(one: Setting) -> Iterator[str]:
    """Yields a problem if attention scores, or the mask of a GPU's or CPU's kernel, exceed the memory."""
    where, rows, length = one.where, one.update.batch_size, one.config.data.max_length
    config, size = seen_on(where.device_type, one.config), item_bytes(one.config.model.base_dtype)
    shards = where.mesh.model * where.mesh.context if where.mesh else 1
    heads = -(-max(kind.heads for kind in one.shape.kinds) // shards)
    if where.device_type in ("cuda", "cpu"):  # a mask of booleans, and PyTorch's copy in the compute dtype
        block = length if where.device_type == "cuda" else query_block(length)
        each, what = block * length * (1 + size), f"the mask of {block:,} x {length:,} x {1 + size} bytes"
    elif config.model.attention == "sdpa":
        block = query_block(length)
        each, what = (
            heads * block * length * size,
            f"the scores of {heads} heads x {block:,} x {length:,} x {size} bytes",
        )
    else:
        return
    if rows * each <= where.limit:
        return
    advice = f"optim.batch_size={fitting}" if (fitting := where.limit // each) else "a smaller data.max_length"
    if where.device_type in ("tpu", "torch-tpu"):
        advice = f"model.attention=auto, whose kernel writes no scores, or {advice}"
    yield (
        f"model.attention={one.config.model.attention}: {what} for each of {rows} rows are {rows * each / GIB:.2f} "
        f"GiB, more than the {where.limit / GIB:.2f} GiB of {where.name}; set {advice}"
    )


def _caches(one: Setting) -> Iterator[str]:
    """Yields a problem if a rollout's KV cache exceeds the memory that weights and state leave."""
    config, where = one.config, one.where
    replicas = 1 if where.mesh else where.replicas
    if (rollout := rollout_of(config, replicas)) is None:
        return
    decode = next(program for program in one.memory.programs if program.name == "decode")
    held = {**decode.beside, **decode.arguments}
    caches = held["prompt_cache"] + held.get("sample_cache", 0)
    rest = sum(held.values()) - caches
    if not rest <= where.limit < rest + caches:
        return
    most = int((where.limit - rest) * rollout.prompts / caches) * replicas // config.rl.steps_per_generation
    advice = f"set rl.prompts_per_update={most}" if most else "lower rl.num_generations or rl.max_completion_length"
    yield (
        f"rl.prompts_per_update={config.rl.prompts_per_update}: keys and values of {rollout.prompts} prompts and "
        f"{rollout.samples} completions in {rollout.slots:,} slots take {caches / GIB:.2f} GiB. Weights and state take "
        f"{rest / GIB:.2f} GiB of the {where.limit / GIB:.2f} GiB per device of {where.name}; {advice}"
    )


def _padding(one: Setting) -> list[str]:
    """Returns a note on the length to which the attention kernel pads rows, if that costs time."""
    length = one.config.data.max_length
    mesh = one.where.mesh
    shards = mesh.context if mesh and not all(mesh.exchanges(kind.kv_heads) for kind in one.shape.kinds) else 1
    padded = padded_length(length, shards)
    kernel = one.where.device_type in ("tpu", "torch-tpu") and one.config.model.attention != "sdpa"
    if not kernel or padded <= length * _PADDED:
        return []
    step = 1024 if shards == 1 else 2048 * shards
    below = f"{length // step * step} or " if length > step else ""
    return [f"attention pads rows of {length} tokens to {padded}; data.max_length={below}{padded} wastes no time"]


def _rounding(config: TrainConfig, shape: Shape | None) -> list[str]:
    """Returns a note on the time to quantize the base weights, if that takes minutes."""
    rate = ROUNDED_PER_SECOND.get(config.model.base_dtype)
    if shape is None or rate is None or not config.lora.r:
        return []
    minutes = shape.linear_weights / rate / 60
    cache = f"; later starts read them from {config.model.quant_cache}" if config.model.quant_cache else ""
    text = f"model.base_dtype={config.model.base_dtype}: the first start quantizes the weights in {minutes:.0f} minutes"
    return [f"{text} on one core{cache}"] if minutes >= 1 else []


@cache
def _host_rate() -> float:
    """Measures the FLOP/s of fp32 matrix products on this CPU for a tenth of a second; training reaches less."""
    import torch

    factor = torch.ones(512, 512)
    factor @ factor
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < 0.1:
        factor @ factor
        count += 1
    return count * 2 * 512**3 / seconds


@dataclass(frozen=True)
class _Asks:
    """Decides whether to ask the TPU compiler without the user's request, and prints the reason to stderr.

    A separate process compiles the step (`compile_check`), opens no TPU, and is killed after the time limit. The
    formula decides on several hosts, because an answer in time on only some hosts would give different runs, and for
    runs of several programs, which compile for minutes.
    """

    backend: Backend
    resumes: bool
    auto: bool

    @property
    def reason(self) -> str:
        """Why the compiler is asked, as the printed line says it."""
        return "optim.batch_size is auto" if self.auto else f"the formula is within {NEAR:.0%} of the memory"

    def __call__(self, one: Setting) -> float:
        """Returns the compiler's time limit in seconds for a setting by formula; 0 if it is not asked.

        It is asked only for new runs of one program on one TPU host, `NEAR` the limit or if "auto" chose fitting rows.
        """
        room = one.where
        if self.resumes or room.device_type != "tpu" or room.topology is None or self.backend.hosts.count > 1:
            return 0.0
        near = abs(one.peak_bytes / room.limit - 1) <= NEAR
        if not (near or (self.auto and one.fits)) or one.several:
            return 0.0
        try:
            check_available()
        except CompilerUnavailable:
            return 0.0
        if ASKED_SECONDS:
            text = f"asking the TPU compiler, at most {ASKED_SECONDS:g} s, because {self.reason}"
            print(f"plan             {text}", file=sys.stderr, flush=True)
        return ASKED_SECONDS


def _answer(made: Setting) -> str:
    """Describes the TPU compiler's answer; empty if it was not asked."""
    if made.unverified or not made.compiled:
        return made.unverified
    if "step" in made.compiled:
        return f"by the compiler, it {made.compiled['step']}"
    sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in made.peaks.items())
    verdict = "fits" if made.fits else "does not fit"
    return f"by the compiler, it {verdict} {made.where.limit / GIB:.2f} GiB: {sizes}"
