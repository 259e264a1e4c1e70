"""Checks a planned run: for every step of the plan, a function returns all problems.

Add a new check that needs neither model nor data to `of_machine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.data.prepare import Prepared
from tpu_kit.data.rows.own_format import own_function
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.exporting.hub.publish import hub_problems
from tpu_kit.generation.evaluation.held_out_answers import check_answers
from tpu_kit.generation.evaluation.verifiers import verifier_named
from tpu_kit.generation.reference_check import check_training
from tpu_kit.machine.storage.run_folder import adapter_at_hand
from tpu_kit.model import trainable as models
from tpu_kit.model.weights.base_identity import NAME, base_of_adapter
from tpu_kit.training.adapter_files import start_from
from tpu_kit.training.losses.objective_check import check_layers, check_objective
from tpu_kit.training.losses.sampled_updates import check_rollouts
from tpu_kit.training.metrics import check_tracking
from tpu_kit.training.objectives import Objective

if TYPE_CHECKING:
    from tpu_kit.recipes.run_plan import RunPlan


def caught(check: Callable[..., object], *given: Any) -> list[ValueError]:
    """Returns the ValueError that `check(*given)` raises in a list; an empty list if it raises none."""
    try:
        check(*given)
    except ValueError as error:
        return [error]
    return []


def tell(problems: Iterable[ValueError]) -> None:
    """Raises all problems as one ValueError; nothing for none. Problems with the same text count once.

    A single problem is raised unchanged. Several ConfigErrors become one ConfigError, other problems a ValueError.
    """
    found = list({str(problem): problem for problem in problems}.values())
    if len(found) == 1:
        raise found[0]
    if found and all(isinstance(one, ConfigError) for one in found):
        raise ConfigError([text for one in found if isinstance(one, ConfigError) for text in one.problems])
    if found:
        raise ValueError(
            "\n  - ".join([f"{len(found)} problems:", *(str(one).replace("\n", "\n    ") for one in found)])
        )


def of_machine(config: TrainConfig, hosts: Hosts) -> list[ValueError]:
    """Returns the problems of a run that need neither model nor data; empty if there are none.

    It checks the trackers, the verifier and the user's row formats. On host 0 it also asks the hub about the push
    (`hub_problems`). With several hosts, distill.files and checkpoint.source are problems.
    """
    found = [*caught(check_tracking, config), *caught(verifier_named, config.tracking.verifier)]
    found += [error for one in config.data.by_source for error in caught(own_function, one.format)]
    if hosts.count > 1 and config.distill.files:
        text = "distill.files does not work on several hosts: set it to null, so that each host runs the teacher"
        found.append(ValueError(text))
    if hosts.count > 1 and config.checkpoint.source:
        text = "checkpoint.source works on a single host; set output_dir to gs://bucket/run or a shared folder"
        found.append(ValueError(text))
    if not hosts.index and (wrong := hub_problems(config)):
        found.append(ConfigError(wrong))
    return found


def of_model(plan: RunPlan, objective: Objective | None) -> list[ValueError]:
    """Returns the problems of a plan after `with_model`; an empty list if there are none.

    It checks the checkpoint's parameters and weights (`of_resuming`), the objective, and the initial adapter
    lora.adapter. If checkpoint and objective have no problem, it checks TorchTPU's layers, too. `objective` is the
    result of `with_model`; if it is None, the list has the reason.
    """
    found = [*of_resuming(plan), *caught(check_objective, plan.config, objective)]
    found += [] if found else caught(check_layers, plan.config, plan.backend.device_type)
    if plan.config.lora.adapter and objective is not None:
        found += caught(_check_start, plan, plan.config.lora.adapter, objective)
    return found


def of_data(plan: RunPlan, prepared: Prepared, reward_funcs: Sequence[Any] | None) -> list[ValueError]:
    """Checks that held-out rows can be answered and, if the run samples, that rewards can judge the completions."""
    found = caught(check_answers, plan.config, prepared, plan.settings)
    if prepared.tasks:
        found += caught(check_rollouts, plan.config, prepared.tasks.rows.rows, reward_funcs, plan.backend.hosts)
    return found


def of_batch(plan: RunPlan) -> list[ValueError]:
    """Checks the checkpoint's data and batch, and that the model trains as transformers defines it."""
    return of_resuming(plan) or caught(check_training, plan.config, plan.backend.device_type, plan.settings)


def of_resuming(plan: RunPlan) -> list[ValueError]:
    """Returns [error] if the run may not resume from its checkpoint, by the facts that the plan has so far; else []."""
    if (point := plan.resume_point) is None:
        return []
    total = plan.config.optim.max_steps if plan.updates is None else plan.updates
    text = point.refusal(plan.config, plan.record, total, plan.rows_done)
    return [ValueError(text)] if text else []


def _check_start(plan: RunPlan, adapter: str, objective: Objective) -> None:
    """Raises ValueError if `lora.adapter` was trained on other weights, or does not fit the model and its objective."""
    from tpu_kit.model.meta_model import empty_model  # it loads torch's compiler, which takes a second

    config = plan.config
    with adapter_at_hand(adapter) as folder:
        assert folder is not None
        base_of_adapter(config.model, folder, plan.record.identities.get(NAME))
        if config.lora.finds_tokens:  # the rows determine the tokens; a replica compares them
            return
        tokens = models.token_numbers(config.model, config.lora)
        with torch.device("meta"):
            model = models.adapt(empty_model(config), config.lora, config.model.base_dtype, tokens=tokens)
            objective.attach(model, lambda one: empty_model(replace(config, model=plan.pinned(one))))
        start_from(model, folder)
