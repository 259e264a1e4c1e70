"""Requirements and unsupported features of `launch.device_type=torch-tpu`, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from tpu_kit.config.schema import TrainConfig
from tpu_kit.machine import torch_tpu
from tpu_kit.machine.checks import Machine, check_holder
from tpu_kit.machine.compatibility import Version, bare, environment_line, installed_version
from tpu_kit.torch_tpu.environment import ELSEWHERE, NAME, other_plugin


def check_machine(at: Machine, replicas: int = 1) -> None:
    """Checks that this machine and its packages can run torch_tpu, without opening the device.

    With another plugin than libtpu (`environment.other_plugin`), it checks only the packages.

    Raises:
        ValueError: a package in `machine.torch_tpu.TESTED` is missing or of another version, or torch_xla is installed.
            Or there is no chip, another process holds it, or `replicas` is neither 1 nor the number of chips.
    """
    if wrong := torch_tpu.mismatches(at.version):
        text = ", ".join(
            f"{name} is {bare(now) if (now := at.version(name)) else 'not installed'}, and must be {tested}"
            for name, tested in wrong.items()
        )
        raise ValueError(
            f"launch.device_type={NAME}: {text}, with which it was tested. This environment has "
            f"{torch_tpu.describe_backends(at.version)}. Make one with torch_tpu:\n  {environment_line(NAME)}"
        )
    if at.version("torch_xla"):
        raise ValueError(
            f"launch.device_type={NAME}: {torch_tpu.describe_backends(at.version)}. Uninstall torch_xla, or make an "
            f"environment with torch_tpu:\n  {environment_line(NAME)}"
        )
    if other_plugin(at.environ):
        return
    if not at.tpus() and not at.nodes():
        raise ValueError(
            f"launch.device_type={NAME}, but this machine has no TPU. On Colab: Runtime > Change runtime type; on "
            "Kaggle: Settings > Accelerator. launch.device_type=cpu trains on this CPU"
        )
    if (chips := len(at.tpus()) or len(at.nodes())) and replicas not in (1, chips):
        raise ValueError(
            f"launch.device_type={NAME}: launch.num_replicas={replicas} with {chips} chip(s): a replica has one chip, "
            f"and a run uses all chips or one; set launch.num_replicas={chips}, or 1"
        )
    if (held := check_holder(at)).status == "failure":
        raise ValueError(f"launch.device_type={NAME}: the chip is {held.found}. {held.fix}")


def tracer(device_type: str) -> str:
    """Returns the package that traces TPU programs: "torch_tpu" for device type torch-tpu, else "torch_xla"."""
    return "torch_tpu" if device_type == NAME else "torch_xla"


def compiler_problem(version: Version = installed_version) -> str:
    """Returns the reason why this backend's compiler cannot be used here, with the fix; empty if it can."""
    wrong = torch_tpu.mismatches(version)
    needed = ", ".join(f"{name} {tested}" for name, tested in wrong.items())
    text = f"the compiler of launch.device_type={NAME} needs {needed}; make an environment: {environment_line(NAME)}"
    return text if wrong else ""


def run_limits(config: TrainConfig) -> list[str]:
    """Returns `problems` for a run on one host, or none if the run is for another backend."""
    return problems(config, 1) if config.launch.device_type == NAME else []


def problems(config: TrainConfig, hosts: int) -> list[str]:
    """Returns a text with a fix for each feature of a run on `hosts` hosts that TorchTPU does not support."""
    return [f"{names}: {text}, which launch.device_type={NAME} does not do yet; {fix}"
            for names, text, fix in _asked(config, hosts)]  # fmt: skip


def _asked(config: TrainConfig, hosts: int) -> Iterator[tuple[str, str, str]]:
    """Yields the settings, the feature in words and the fix for each feature that TorchTPU does not support."""
    if hosts > 1:
        yield "launch.hosts", f"{hosts} hosts train together", f"start it on one host, or {ELSEWHERE}"
    if config.launch.mesh not in (None, "auto"):
        yield "launch.mesh", f"{config.launch.mesh} shards the model", f"remove it, or {ELSEWHERE}"
    if config.recipe != "train":
        yield "the command", f"{config.recipe} is not supervised fine-tuning", ELSEWHERE
    elif config.optim.objective != "supervised":
        yield "optim.objective", f"{config.optim.objective} is not the supervised loss", ELSEWHERE
    if config.lora.dropout and config.optim.remat == "none":
        text = f"lora.dropout={config.lora.dropout:g} outside of a loop"
        yield "optim.remat lora.dropout", text, "set optim.remat=full, which runs the layers as a loop"
    if config.model.images:
        yield "model.images", "the model reads pictures", ELSEWHERE
