"""Checks a run for a slice of several hosts: the slice, its zone, the hosts' image, and the run's inputs."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpu_kit.config.fields import ConfigError, closest
from tpu_kit.config.loader import TrainConfig, as_trained
from tpu_kit.config.sections.data import GENERATED
from tpu_kit.distributed.detection import slice_problems
from tpu_kit.machine.chips import Chip, Topology, parse_accelerator_type
from tpu_kit.machine.host import is_path

CONTAINER = "python:3.12"  # the default image on GKE; an image needs bash, and python3 with pip
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")  # variables that a run reads; files have the names of set ones, not the values
_ON_GKE = ("jobset", "xpk")
_IN_A_ZONE = ("xpk", "gcloud")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # accepted by all four engines: xpk allows 40 characters
_IMAGE = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[\w.-]+|@sha256:[0-9a-f]{64})")


class Offer(NamedTuple):
    """Google Cloud's names for a chip's hosts, and the zones and prices of the chip."""

    runtime: str  # software version of a TPU VM for PyTorch (docs.cloud.google.com/tpu/docs/runtimes)
    label: str  # GKE's node label `cloud.google.com/gke-tpu-accelerator` (xpk 1.16, system_characteristics.py)
    zones: list[str]  # zones with a price in the catalogue of `chips`
    prices: dict[str, tuple[float, float | None]]  # dollars of a chip-hour by region: (on demand, Spot), same catalogue


OFFERS = {
    name: Offer(**offer) for name, offer in json.loads(Path(__file__).with_name("offers.json").read_text()).items()
}
"""Offers by chip, for chips with slices of several hosts."""


@dataclass(frozen=True)
class SliceJob:
    """A run on a slice, checked by `check_job`."""

    config: TrainConfig
    chip: Chip
    topology: Topology  # the slice's shape, and the chips of a host
    zone: str | None  # None: the engine chooses
    image: str  # the hosts' image: a TPU VM's software version, or on GKE a container image
    spot: bool  # whether the slice may be preempted at any time
    secrets: tuple[str, ...]  # the environment variables to pass on

    @property
    def name(self) -> str:
        """The name of the run and of the engine's job."""
        return self.config.run_name

    @property
    def slice(self) -> str:
        """The provider's name of the slice, such as "v5litepod-64"."""
        return self.chip.slice_name(self.topology.chips)

    @property
    def region(self) -> str | None:
        """The region of the zone; None without a zone."""
        return self.zone.rpartition("-")[0] if self.zone else None

    @property
    def rate(self) -> float | None:
        """Dollars per chip-hour in the region, or in us-central if no zone is given; None if unknown."""
        if self.region is None:
            price = self.chip.price
            return price and (price.spot if self.spot else price.on_demand)
        return OFFERS[self.chip.name].prices[self.region][int(self.spot)]

    @property
    def shape(self) -> str:
        """The chips in each direction, such as "8x8"."""
        return self.topology.name.partition(":")[2]


def check_job(
    config: TrainConfig, slice_name: str, engine: str, zone: str | None, image: str | None, spot: bool
) -> SliceJob:
    """Checks that an engine of `ENGINES` can run a configuration on a slice such as "v4-32"; returns the job.

    Its `secrets` are the variables of `SECRETS` that are set in the environment, its `config` is `as_trained(config)`.

    Args:
        config: the run, with its `output_dir` in gs://.
        slice_name: the slice, with one host or several; "xpk" needs several.
        engine: a name in `ENGINES`; not checked.
        zone: None is the engine's choice, but "xpk" and "gcloud" need a zone.
        image: None is the engine's default; only "jobset" and "xpk" take another image.
        spot: whether to ask for Spot capacity.

    Raises:
        ConfigError: the run's name does not suit engines, the run may not resume, its command runs on one host only, or
            its device is no TPU. Or it needs files or modules of this machine, or WANDB_API_KEY, which is not set. Or
            slice, zone or image are unknown or not offered, or `slice_problems` has a text. The error has all problems,
            but an unknown slice ends the check.
    """
    config = as_trained(config)
    problems = [*_run_problems(config), *_place_problems(config, in_own_image=image is not None and engine in _ON_GKE)]
    secrets = tuple(name for name in SECRETS if os.environ.get(name))
    if config.tracking.wandb == "online" and "WANDB_API_KEY" not in secrets:
        problems.append("tracking.wandb: online needs WANDB_API_KEY on the hosts; set it in this environment")
    try:
        chip, chips = parse_accelerator_type(slice_name)
    except ValueError as error:
        raise ConfigError([*problems, f"--slice: {error}"]) from None
    if chip.name not in OFFERS:
        raise ConfigError([*problems, f"--slice: {slice_name}: files are written for {', '.join(OFFERS)}"])
    if (topology := chip.topologies.get(chips)) is None:
        known = ", ".join(map(chip.slice_name, sorted(chip.topologies)))
        raise ConfigError([*problems, f"--slice: the topology of {slice_name} is not known; use {known}"])
    offer = OFFERS[chip.name]
    if topology.hosts > 1:
        problems += slice_problems(config)
    elif engine == "xpk":
        problems.append(f"--with: xpk needs several hosts, but {slice_name} has one; use skypilot, jobset or gcloud")
    if zone is None and engine in _IN_A_ZONE:
        problems.append(f"--zone: {engine} needs a zone; {chip.name} is offered in {', '.join(offer.zones)}")
    elif zone is not None and zone not in offer.zones:
        near = " or ".join(closest(zone, offer.zones))
        advice = f"did you mean {near}? " if near else ""
        problems.append(f"--zone: {zone} has no {chip.name}; {advice}It is offered in {', '.join(offer.zones)}")
    image = image or (CONTAINER if engine in _ON_GKE else offer.runtime)
    if engine not in _ON_GKE and image != offer.runtime:
        needed = f"the hosts need the software version {offer.runtime} of TPU VMs; leave --image out"
        problems.append(f"--image: {image}: {needed}")
    elif engine in _ON_GKE and not _IMAGE.fullmatch(image):
        needed = f"write it with its tag, such as {CONTAINER}"
        problems.append(f"--image: {image} is not the name of a container image; {needed}")
    if problems:
        raise ConfigError(problems)
    return SliceJob(config, chip, topology, zone, image, spot, secrets)


def _run_problems(config: TrainConfig) -> list[str]:
    """Returns a problem for every parameter with which a run cannot be started or restarted on several hosts."""
    problems, name = [], config.run_name
    if not _NAME.fullmatch(name):
        near = re.sub(r"^[-0-9]+", "", re.sub(r"[^a-z0-9]+", "-", name.lower()))[:40].rstrip("-") or "my-run"
        rule = "engines take at most 40 lowercase letters, digits and dashes, a letter first"
        problems.append(f"run_name: {name!r}: {rule}; set run_name={near}")
        name = near
    if not config.remote:
        where = "the hosts' disks are lost with the hosts, so a restarted host could not resume"
        problems.append(f"output_dir: {config.output_dir!r}: {where}; set output_dir=gs://BUCKET/{name}")
    if config.checkpoint.resume == "never":
        lost = "a restarted host would begin at step 0, and the second restart would delete the checkpoints"
        problems.append(f"checkpoint.resume: 'never': {lost}; set resume=auto")
    if config.launch.device_type not in ("auto", "tpu"):
        problems.append(f"launch.device_type: {config.launch.device_type!r}: the hosts have TPUs; set device_type=tpu")
    if config.on_policy:
        name, command = ("distill.on_policy",) * 2 if config.distill.on_policy else ("rl", "grpo")
        text = f"the files run `train` or `dpo`, but {command} runs only on one host; start it there, or remove {name}"
        problems.append(f"{name}: {text}")
    return problems


def _place_problems(config: TrainConfig, in_own_image: bool) -> list[str]:
    """Returns a problem for every parameter that names something on this machine, which the hosts cannot read.

    A module of the user's functions is a problem unless `in_own_image`: the user's image may have it.
    """
    problems = []
    copy = f"copy it (gcloud storage cp -r ... {config.remote or 'gs://BUCKET/run'}/) and give its gs:// address"
    for name, place, advice in (
        *(("data.source", str(one.source), copy) for one in config.data.by_source),
        *((name, config[name], copy) for name in ("data.eval_source", "lora.adapter")),
        *((name, config[name], "give its name on the Hugging Face hub") for name in ("model.name", "distill.teacher")),
        ("distill.files", config.distill.files, "set distill.files=null"),
    ):
        if place is None or place in (*GENERATED, "synthetic") or "://" in place:
            continue
        if is_path(name, place) or Path(place).exists():
            problems.append(f"{name}: {place!r} is on this machine, but the hosts cannot read it; {advice}")
    named = [(name, config[name]) for name in ("optim.objective", "tracking.verifier")]
    for name, value in [*named, *(("data.format", one.format) for one in config.data.by_source)]:
        if re.fullmatch(r"[\w.]+:\w+", value) and not value.startswith("regex:") and not in_own_image:
            advice = "use --with jobset or xpk, and --image with an image that has it"
            problems.append(f"{name}: the hosts do not have the module of {value}; {advice}")
    return problems
