"""The functions whose processes `tests.benchmarks.step` measures: our `fine_tune`, and TRL's `SFTTrainer`.

Both are read in the same way, at the beginning of chosen steps, while the device is idle: the counters of torch_xla,
and the processor time of the whole process, including XLA's threads.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.backends import SimulatedRuntime
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.recipes import sft
from tpu_kit.training import trainer as trainer_module

WARM_UP = 4  # steps before measuring; the first of them compile


@dataclass(frozen=True)
class Measured:
    """The measurements of a run. Counts are per replica, for steps without logging and evaluation.

    Attributes:
        programs: Compiled for set-up, for training, for evaluation, and in the last step, which also logs and saves.
        executions: Programs started per optimizer step.
        host_syncs: Device values that the host waited for, per step.
        device_reads: Transfers to the host, per step.
        cpu_seconds: Processor time per step of all replicas, including evaluations between steps.
        loss: Mean over all steps, in nats per token.
    """

    programs: tuple[int, int, int, int]
    executions: float
    host_syncs: float
    device_reads: float
    cpu_seconds: float
    loss: float


class Meter:
    """Reads the counters at the beginning of steps.

    Args:
        rt: The replica's runtime.
        steps: The total number of steps.
        eval_steps: Steps between evaluations; None: no evaluations.
    """

    def __init__(self, rt: Runtime, steps: int, eval_steps: int | None = None) -> None:
        assert steps > WARM_UP + 1, steps
        self._rt, self._steps, self._every = rt, steps, eval_steps
        self._step = 0
        self._readings: dict[int, tuple[dict[str, int], float]] = {}

    def begin_step(self) -> None:
        """Must be called on all replicas before any of the step is traced."""
        self._step += 1
        # Each reading waits for the device, so a timed run takes only the necessary readings.
        if self._every or self._step in (1, 2, WARM_UP + 1, self._steps):
            import torch_xla.core.xla_model as xm

            xm.wait_device_ops()
            self._rt.barrier()
            self._readings[self._step] = self._rt.counters(), time.process_time()

    def measured(self, loss: float) -> Measured:
        """Returns the measurements at the end of the run."""
        marks = sorted(self._readings)
        setup, last = (self._readings[step][0]["compiles"] for step in (1, self._steps))
        programs = {False: 0, True: 0}  # keyed by whether the steps include an evaluation
        counts, quiet_steps = dict.fromkeys(self._readings[1][0], 0), 0
        for start, end in pairwise(marks):
            before, after = self._readings[start][0], self._readings[end][0]
            evaluates = self._every is not None and start % self._every == 0
            programs[evaluates] += after["compiles"] - before["compiles"]
            if start > WARM_UP and not evaluates:
                quiet_steps += end - start
                counts = {name: counts[name] + after[name] - before[name] for name in counts}
        per_step = {name: count / quiet_steps / self._rt.world_size for name, count in counts.items()}
        seconds = self._readings[self._steps][1] - self._readings[WARM_UP + 1][1]
        return Measured(
            (setup, programs[False], programs[True], self._rt.counters()["compiles"] - last),
            per_step["executions"],
            per_step["host_syncs"],
            per_step["device_reads"],
            seconds / (self._steps - WARM_UP - 1),
            loss,
        )


_meters: dict[int, Meter] = {}
_lock = threading.Lock()
_train_step = trainer_module.train_step


def _metered(*args: Any, **kwargs: Any) -> None:
    _meters[runtime.current().rank].begin_step()
    _train_step(*args, **kwargs)


def ours(config: TrainConfig) -> Measured:
    """Runs `fine_tune` in a replica, as `train` does; the run's result is rank 0's."""
    rt = runtime.current()
    assert config.optim.max_steps is not None
    meter = Meter(rt, config.optim.max_steps, config.optim.eval_steps)
    with _lock:  # replicas of XLA:CPU are threads
        _meters[rt.rank] = meter
        trainer_module.train_step = _metered
    result = sft.fine_tune(config)
    return meter.measured(result.metrics["loss"] if result is not None else float("nan"))


def stock(folder: str, rows: str, config: TrainConfig) -> Measured:
    """Runs `SFTTrainer` with the settings of `config`, in this process.

    Args:
        folder: The model and its tokenizer.
        rows: JSON lines with a text in each row.
        config: The run; features that stock lacks on XLA must be off.
    """
    import torch
    import torch_xla
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    optim = config.optim
    assert not optim.ema_decay and not config.data.packing and optim.eval_steps is None
    assert optim.max_steps is not None
    meter = Meter(SimulatedRuntime(0, 1, torch_xla.device()), optim.max_steps)

    class Callback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.begin_step()

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        peft_config=LoraConfig(
            r=config.lora.r,
            lora_alpha=config.lora.alpha,
            target_modules=config.lora.targets,
            task_type="CAUSAL_LM",
        ),
        args=SFTConfig(
            output_dir=str(config.output_path),
            max_steps=optim.max_steps,
            per_device_train_batch_size=optim.batch_size,
            gradient_accumulation_steps=optim.gradient_accumulation,
            learning_rate=optim.learning_rate,
            lr_scheduler_type=optim.schedule,
            max_grad_norm=optim.max_grad_norm,
            max_length=config.data.max_length,
            packing=False,
            shuffle_dataset=False,
            train_sampling_strategy="sequential",
            optim="adamw_torch",  # its default is fused, which XLA lacks
            bf16=True,
            use_cpu=False,
            gradient_checkpointing=False,  # torch's fails on XLA
            dataloader_drop_last=True,
            dataloader_pin_memory=False,
            logging_steps=optim.max_steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        callbacks=[Callback()],
    )
    trainer.train()
    return meter.measured(float(trainer.state.log_history[0]["loss"]))


if __name__ == "__main__":
    from tpu_kit.config.loader import load_config

    settings = load_config(json.loads(sys.argv[1]))
    print(json.dumps(asdict(stock(settings.model.name, settings.data.source, settings))))
