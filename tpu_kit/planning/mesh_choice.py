"""Chooses between replicas and a mesh, checks a run's mesh, and lists the largest models that fit a slice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpu_kit.config.loader import ConfigError, LaunchConfig, ModelConfig, TrainConfig, load_config
from tpu_kit.config.mesh import Mesh, mesh_size, resolve_mesh
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.slices import TargetSlice, find_slice, services
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.model.shape import Shape, undivided
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.weights.source import shipped_shapes
from tpu_kit.planning.memory.argument_memory import table
from tpu_kit.planning.run_on_slice import Setting, can_shard, largest, with_rows

_UNSET = (None, "auto")


def find_places(launch: LaunchConfig, names: Sequence[str]) -> list[TargetSlice]:
    """Returns the slices for names of chips (their smallest slice for `launch`), slices or services.

    Raises ValueError as `find_slice`.
    """
    if launch.mesh in _UNSET:
        return [find_slice(name, launch.num_replicas) for name in services(names)]
    size = mesh_size(launch.mesh)  # a chip name alone means the smallest slice with that many devices
    return [find_slice(name, None if re.search(r"[-_:]\d", name) else size) for name in services(names)]


def placed(
    config: TrainConfig, shape: Shape, where: TargetSlice, *, one_row: bool = False
) -> tuple[TrainConfig, TargetSlice, str]:
    """Returns (run, slice, reason): the run and the slice with a mesh, or with replicas (launch.mesh=None).

    A mesh that is given in launch.mesh is kept, and the reason is "". For None and "auto", replicas are kept with the
    reason "" if launch.num_replicas is set or the slice has one device. Otherwise the function chooses, and gives a
    reason.

    It chooses replicas on one host if the run fits one device or cannot be sharded. Else it takes the first mesh that
    holds the run: the fewest fsdp devices come first, then the smallest context axis, whose devices share the tokens of
    rows. If no mesh holds it, it takes fsdp over a slice's devices. On several slices, the data axis spans them.

    Args:
        config: the run.
        shape: the model's shape.
        where: the slice, with a replica on each device.
        one_row: whether the run counts as fitting a device if one row does, as with optim.batch_size=auto.

    Raises:
        ConfigError: as `check_mesh`.
        ValueError: the mesh has another number of devices, its rules do not fit the model, or on several hosts
            launch.num_replicas is set or the run cannot be sharded.
    """
    launch, devices = config.launch, where.replicas
    if launch.mesh not in _UNSET:
        mesh = check_mesh(config, devices, shape, where.slices)
        table(shape, config, mesh)
        return config, where.sharded(mesh), ""
    config = replace(config, launch=replace(launch, mesh=None))
    rows = 1 if one_row or config.optim.batch_size == "auto" else config.optim.batch_size
    if launch.num_replicas is not None and where.hosts > 1:
        raise ValueError(
            f"launch.num_replicas={launch.num_replicas}: {where.name} is trained by a mesh; set launch.mesh="
            f"data={where.slices},fsdp=-1 instead"
        )
    if devices == 1 or launch.num_replicas is not None:
        return config, where, ""
    one = Setting(config if config.optim.batch_size == rows else with_rows(config, rows), shape, where)
    asked, text = f"launch.mesh={launch.mesh or 'null'}", f"{one.peak_bytes / GIB:.2f} of {where.limit / GIB:.2f} GiB"
    if one.fits and where.hosts == 1:
        return config, where, f"{asked}: a replica on each of the {devices} devices, which takes {text}"
    if not can_shard(config):
        if where.hosts > 1:
            raise ValueError(f"{where.name}: several hosts are trained by a mesh, and this run cannot be sharded")
        return config, where, f"{asked}: replicas, which take {text}; this run cannot be sharded over a mesh"
    found = list(_meshes(one))
    whole = [each for each in found if each.where.mesh and each.where.mesh.context == 1]
    best = next((each for each in found if each.fits), whole[-1])
    verdict = "which holds it in" if best.fits else "the largest fsdp axis, which does not hold it in"
    note = (
        f"{asked}: a replica on each device takes {text}, so mesh={best.where.mesh}, {verdict} "
        f"{best.peak_bytes / GIB:.2f} GiB; predicted: {best.time.seconds:.2f} s a step, {best.time.all_reduce:.2f} "
        f"s of them in exposed collectives, and {one.time.seconds:.2f} s with replicas"
    )
    return replace(config, launch=best.config.launch), best.where, note


def _meshes(one: Setting) -> Iterator[Setting]:
    """Yields the run on possible meshes of data and fsdp, smallest fsdp axis first, then with a context axis."""
    where, launch = one.where, one.config.launch
    devices = where.replicas // where.slices
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    texts = [f"data={where.replicas // size},fsdp={size}" for size in sizes if size > 1 or where.hosts > 1]
    texts += [f"data={where.slices},fsdp={devices // size},context={size}" for size in sizes if size > 1]
    for text in texts:
        sharded = replace(one.config, launch=replace(launch, mesh=text))
        try:
            mesh = check_mesh(sharded, where.replicas, one.shape, where.slices)
        except ConfigError:  # the layers or the length of the rows allow no context axis
            continue
        table(one.shape, one.config, mesh)
        yield Setting(replace(sharded, launch=replace(launch, mesh=str(mesh))), one.shape, where.sharded(mesh))


def check_mesh(config: TrainConfig, devices: int, shape: Shape | None, slices: int = 1) -> Mesh:
    """Returns the run's mesh on `devices` devices in all of `slices` slices; `launch.mesh` must be set.

    If `shape` is None (not known), the model is not checked.

    Raises:
        ConfigError: the mesh does not divide the attention heads or the tokens, or the slices do not divide its data
            axis. Or the model or the rows do not support its axes, or optim.batch_size is "auto" and `shape` None.
        ValueError: the mesh has another number of devices.
    """
    assert config.launch.mesh is not None
    mesh = resolve_mesh(config.launch.mesh, devices, config.launch.mesh_rules)
    problems = shape.mesh_problems(mesh) if shape else []
    if config.data.max_length % mesh.context:
        problems.append(
            f"data.max_length: {config.data.max_length} tokens do not divide by the context axis of launch.mesh={mesh}"
            f"; use {-(-config.data.max_length // mesh.context) * mesh.context}, or another size of context"
        )
    if mesh.context > 1 and inputs_of(config) is not None:
        problems.append(
            f"launch.mesh: {mesh}: model.images=true is not supported with an axis that shards tokens; use fsdp instead"
        )
    if mesh.data % slices:
        problems.append(
            f"launch.mesh={mesh}: the data axis spreads over the {slices} slices, and data={mesh.data} does not divide "
            f"by {slices}; the other axes would gather weights over the data center network. Use data={slices},fsdp=-1"
        )
    if shape is None and config.optim.batch_size == "auto":
        problems.append(f'optim.batch_size: "auto" is not chosen for launch.mesh={mesh}; give the rows of a shard')
    if problems:
        raise ConfigError(problems)
    return mesh


def largest_models(where: TargetSlice) -> list[dict[str, object]]:
    """Finds by formula the largest shipped model that LoRA r=16 trains on a slice, sharded over all devices, by dtype.

    Returns:
        A row of a table for each dtype (bf16, int8, int4) for which a model fits. The columns are "base_dtype",
        "model", "parameters", "GiB of a device" (text, for one row of 1,024 tokens) and "largest batch_size" (per
        device, at most 4,096).
    """
    mesh = Mesh(fsdp=where.replicas)
    on = where.sharded(mesh) if where.replicas > 1 else where
    shapes = {name: read_shape(ModelConfig(name=name)) for name in shipped_shapes()}
    found: list[dict[str, object]] = []
    for dtype in ("bf16", "int8", "int4"):
        for name, shape in sorted(shapes.items(), key=lambda one: -one[1].parameters):
            values = {"model.name": name, "base_dtype": dtype, "max_length": 1024, "batch_size": 1}
            one = Setting(load_config(None, {**values, "mesh": str(mesh)} if on.mesh else values), shape, on)
            if dtype == "int4" and undivided(shape.widths, one.config.model.quant_group):
                continue
            if most := largest(lambda rows: one.changed("optim.batch_size", rows).fits, 4096):  # noqa: B023  at once
                size = f"{one.peak_bytes / GIB:.2f} of {on.limit / GIB:.2f}"
                found.append({"base_dtype": dtype, "model": name, "parameters": f"{shape.parameters / 1e9:.1f}e9",
                              "GiB of a device": size, "largest batch_size": most})  # fmt: skip
                break
    return found
