"""Chooses between replicas and a mesh for a run, and checks the run's mesh; the largest models of a slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tpu_kit.config.loader import ConfigError, ModelConfig, TrainConfig, load_config
from tpu_kit.config.mesh import Mesh, resolve_mesh
from tpu_kit.hardware.chips import GIB
from tpu_kit.hardware.slices import TargetSlice
from tpu_kit.models.architecture import Shape, shipped_shapes, undivided
from tpu_kit.models.shape_cache import read_shapes
from tpu_kit.planning.advice import can_shard, largest, with_rows
from tpu_kit.planning.argument_memory import table
from tpu_kit.planning.cost import StepTime, predict_time
from tpu_kit.planning.memory_estimate import estimate_on

_UNSET = (None, "auto")


def placed(
    config: TrainConfig, shape: Shape, where: TargetSlice, *, one_row: bool = False
) -> tuple[TrainConfig, TargetSlice, str]:
    """Returns the run and the slice with the run's mesh, or with one that is chosen for it, and why.

    If the user has set neither launch.mesh nor launch.num_replicas, or launch.mesh=auto, that is replicas where the run
    fits one device, else the mesh with the fewest fsdp devices that holds it, or all of them. On several hosts it is a
    mesh in any case, whose data axis spreads over the slices.

    Args:
        config: the run.
        shape: of its model.
        where: the slice, with a replica on each device.
        one_row: whether one row of a device is enough, as it is with optim.batch_size=auto.

    Raises:
        ConfigError: the mesh does not divide the attention heads, or the slices do not divide its data axis.
        ValueError: the mesh is of another number of devices, or its rules do not fit the model; or several hosts are
            to have replicas.
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
    peak, time = _predicted(config, shape, where, rows)
    limit = where.budget
    asked, text = f"launch.mesh={launch.mesh or 'null'}", f"{peak / GIB:.2f} of {where.limit / GIB:.2f} GiB"
    if peak <= limit and where.hosts == 1:
        return config, where, f"{asked}: a replica on each of the {devices} devices, which takes {text}"
    if not can_shard(config):
        if where.hosts > 1:
            raise ValueError(f"{where.name}: several hosts are trained by a mesh, and this run cannot be sharded")
        return config, where, f"{asked}: replicas, which take {text}; this run cannot be sharded over a mesh"
    found = list(_meshes(config, shape, where, rows))
    chosen, on, least, step = next((one for one in found if one[2] <= limit), found[-1])
    verdict = "which holds it in" if least <= limit else "the mesh of least memory, which does not hold it in"
    note = (
        f"{asked}: a replica on each device takes {text}, so mesh={on.mesh}, {verdict} {least / GIB:.2f} GiB; "
        f"predicted are {step.seconds:.2f} s a step, {step.all_reduce:.2f} s of them collectives that are not hidden, "
        f"against {time.seconds:.2f} s by replicas"
    )
    return chosen, on, note


def _meshes(
    config: TrainConfig, shape: Shape, where: TargetSlice, rows: int
) -> Iterator[tuple[TrainConfig, TargetSlice, int, StepTime]]:
    """The run on each mesh of data and fsdp, fewest devices in fsdp first, with its peak and time."""
    for size in range(1 if where.hosts > 1 else 2, where.replicas // where.slices + 1):
        if where.replicas % (size * where.slices) == 0:
            data = where.replicas // size
            mesh = resolve_mesh(f"data={data},fsdp={size}", where.replicas, config.launch.mesh_rules)
            table(shape, config, mesh)
            on = where.sharded(mesh)
            sharded = replace(config, launch=replace(config.launch, mesh=str(mesh)))
            yield sharded, on, *_predicted(sharded, shape, on, rows)


def _predicted(config: TrainConfig, shape: Shape, where: TargetSlice, rows: int) -> tuple[int, StepTime]:
    if config.optim.batch_size != rows:
        config = with_rows(config, rows)
    return estimate_on(config, shape, where).total_bytes, predict_time(config, shape, where)


def check_mesh(config: TrainConfig, devices: int, shape: Shape | None, slices: int = 1) -> Mesh:
    """Returns the run's mesh on so many devices of so many slices.

    Raises:
        ConfigError: the mesh does not divide the attention heads, the slices do not divide its data axis, or the batch
            size is open and the shape of the model is not known.
        ValueError: the mesh is of another number of devices.
    """
    assert config.launch.mesh is not None
    mesh = resolve_mesh(config.launch.mesh, devices, config.launch.mesh_rules)
    problems = shape.mesh_problems(mesh) if shape else []
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
    """The largest shipped model that a LoRA of r=16 trains on a slice, sharded over all devices, for each base dtype.

    Returns:
        Rows of a table, with the memory of a device for one row of 1,024 tokens, and the most rows that fit.
    """
    mesh = Mesh(fsdp=where.replicas)
    on = where.sharded(mesh) if where.replicas > 1 else where
    names = [*shipped_shapes()]
    shapes = dict(zip(names, read_shapes([ModelConfig(name=name) for name in names]), strict=True))
    found: list[dict[str, object]] = []
    for dtype in ("bf16", "int8", "int4"):
        for name, shape in sorted(shapes.items(), key=lambda one: -one[1].parameters):
            values = {"model.name": name, "base_dtype": dtype, "max_length": 1024, "batch_size": 1}
            config = load_config(None, {**values, "mesh": str(mesh)} if on.mesh else values)
            if dtype == "int4" and undivided(shape.widths, config.model.quant_group):
                continue

            def peak(rows: int, config: TrainConfig = config, shape: Shape = shape) -> int:
                return estimate_on(with_rows(config, rows), shape, on).total_bytes

            if most := largest(lambda rows: peak(rows) <= on.budget, 4096):
                size = f"{peak(1) / GIB:.2f} of {on.limit / GIB:.2f}"
                found.append({"base_dtype": dtype, "model": name, "parameters": f"{shape.parameters / 1e9:.1f}e9",
                              "GiB of a device": size, "largest batch_size": most})  # fmt: skip
                break
    return found
