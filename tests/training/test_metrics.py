"""Metrics of a run: rates under a controlled clock, and files read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.child_processes import run_python
from tpu_kit.config.loader import ConfigError, TrackingConfig, TrainConfig
from tpu_kit.machine.checks import Machine
from tpu_kit.training.metrics import Evaluations, Tracker, check_tracking, read_metrics


class Clock:
    """A clock that the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def log(tracker: Tracker, step: int, **changed: Any) -> dict[str, Any]:
    values = {"loss": 2.0, "grad_norm": 0.5, "lr": 1e-4, "tokens": 100 * step, "compiles": 2, "epoch": step / 100}
    return tracker.log(step, **(values | changed))


def strictly(path: Path) -> list[dict[str, Any]]:
    """Parses every line; rejects NaN and Infinity, which Python's reader accepts and other readers do not."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_of_equal_accuracies_the_latest_is_the_best_and_no_progress() -> None:
    found = Evaluations(patience=2)
    for step, accuracy in enumerate((0.25, 0.5, 0.5), 1):
        assert not found.stopped
        found.add(step, math.nan, accuracy)
    assert found.best_step == 3 and not found.stopped
    found.add(4, math.nan, 0.25)
    assert found.best_step == 3 and found.stopped
    assert found.reason == "none of the last 2 evaluations was better than step 3 (0.5)"


def test_numbers_of_the_users_take_no_name_of_ours(tmp_path: Path) -> None:
    with Tracker(TrainConfig(), tmp_path) as tracker:
        record = log(tracker, 1, extra={"loss": 7.0, "lr": 1.0, "step": 5.0, "mine": 3.0})
    assert (record["loss"], record["step"], record["mine"]) == (2.0, 1, 3.0)
    assert (record["own/loss"], record["own/lr"], record["own/step"]) == (7.0, 1.0, 5.0)


def test_rates_eta_and_mfu(tmp_path: Path) -> None:
    clock = Clock()
    options = {"total_steps": 40, "flops_per_token": 10**12, "chip_name": "v5e", "num_chips": 2, "clock": clock}
    with Tracker(TrainConfig(), tmp_path, **options) as tracker:
        clock.now += 100  # the compilation
        first = log(tracker, 10)
        assert first["tokens_per_second"] == pytest.approx(10)
        assert first["eta_seconds"] == pytest.approx(30 * 10)  # the only estimate so far
        clock.now += 5
        with tracker.untimed():
            clock.now += 50
            tracker.log_eval(10, loss=1.0, accuracy=0.25)
        second = log(tracker, 20)
        clock.now += 6.5
        third = log(tracker, 30, ahead=1.5)  # a step of the next window was started before this window was read
        clock.now += 3.5
        last = log(tracker, 40)
    assert third["step_seconds"] == last["step_seconds"] == pytest.approx(0.5)
    assert last["seconds"] == pytest.approx(165)
    assert second["tokens_per_second"] == pytest.approx(200)
    assert second["tokens_per_second_per_chip"] == pytest.approx(100)
    assert second["mfu"] == pytest.approx(200 * 1e12 / (2 * 197e12))  # 197 TFLOP/s: Google's page of the v5e
    assert second["step_seconds"] == pytest.approx(0.5)
    assert second["eta_seconds"] == pytest.approx(20 * 0.5)
    assert second["seconds"] == pytest.approx(155)
    assert second["perplexity"] == pytest.approx(math.e**2)
    evaluation = next(r for r in read_metrics(tmp_path) if r["kind"] == "eval")
    assert (evaluation["step"], evaluation["loss"], evaluation["accuracy"]) == (10, 1.0, 0.25)


@pytest.mark.parametrize("options", [{"chip_name": "v5e"}, {"flops_per_token": 10**9}])
def test_no_mfu_without_flops_or_chip(tmp_path: Path, options: dict[str, Any]) -> None:
    with Tracker(TrainConfig(), tmp_path, **options) as tracker:
        record = log(tracker, 1)
    assert record["mfu"] is None
    assert record["eta_seconds"] is None  # without a last step there is no ETA either


def test_a_record_is_on_disk_before_close(tmp_path: Path) -> None:
    tracker = Tracker(TrainConfig(), tmp_path)
    written = log(tracker, 1, skipped=3)
    assert strictly(tmp_path / "metrics.jsonl") == [written]
    assert written["skipped"] == 3
    tracker.close()
    tracker.close()


FULL = """
import resource, sys
from pathlib import Path
from tpu_kit.config.loader import TrainConfig
from tpu_kit.training.metrics import Tracker

history = [{"kind": "eval", "step": 1, "seconds": 1.0}] * int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
try:
    with Tracker(TrainConfig(), Path(sys.argv[1]), history=history) as tracker:
        for step in range(1, 100):
            tracker.log_eval(step, loss=1.0)
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("records", [0, 100], ids=["in a record", "at the start"])
def test_a_log_for_which_there_is_no_room_is_told_with_what_to_do(tmp_path: Path, records: int) -> None:
    told = run_python(["-c", FULL, str(tmp_path), str(records)]).stdout.splitlines()[-1]
    assert told.startswith(f"[Errno 27] File too large: {tmp_path}/metrics.jsonl could not be written. Make room there")


def test_what_is_not_finite_is_null_and_remembered(tmp_path: Path) -> None:
    with Tracker(TrainConfig(), tmp_path) as tracker:
        log(tracker, 1, loss=math.nan, grad_norm=math.inf)
        log(tracker, 2, loss=1e9)
        log(tracker, 3)
    nan, overflow, fine = strictly(tmp_path / "metrics.jsonl")
    assert nan["loss"] is None
    assert nan["nonfinite"] == {"loss": "nan", "perplexity": "nan", "grad_norm": "inf"}
    assert (overflow["loss"], overflow["perplexity"], overflow["nonfinite"]) == (1e9, None, {"perplexity": "inf"})
    assert "nonfinite" not in fine


def test_resume_holds_each_step_once(tmp_path: Path) -> None:
    clock = Clock()
    with Tracker(TrainConfig(), tmp_path, clock=clock) as tracker:
        for step in (10, 20, 30):
            clock.now += 7
            log(tracker, step)
            tracker.log_eval(step, loss=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # killed during a write

    clock.now += 1e6  # a long time until the run is resumed
    history = [record for record in read_metrics(tmp_path) if record["step"] <= 25]
    with Tracker(TrainConfig(), tmp_path, 25, history, resume_tokens=2500, clock=clock) as tracker:
        clock.now += 5
        resumed = log(tracker, 30)
    records = strictly(tmp_path / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in records] == [
        ("train", 10), ("eval", 10), ("train", 20), ("eval", 20), ("train", 30),
    ]  # fmt: skip
    assert resumed["tokens_per_second"] == pytest.approx(100)
    assert resumed["seconds"] == pytest.approx(14 + 5)


def test_a_new_run_keeps_the_file_of_the_one_before(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        with Tracker(TrainConfig(), tmp_path) as tracker:
            log(tracker, 1, loss=loss)
    assert [r["loss"] for r in read_metrics(tmp_path)] == [2.0]
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.previous.jsonl")] == [1.0]
    assert read_metrics(tmp_path / "none") == []


def test_the_bar_is_plain_text_for_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Tracker(TrainConfig(run_name="demo"), tmp_path, total_steps=20) as tracker:
        tracker.tick(5)
        log(tracker, 20, loss=1.5)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.isascii()
    last = err.rstrip().split("\r")[-1]
    assert last.startswith("demo: 100%|")
    assert "20/20" in last
    assert "loss 1.5000" in last


def test_the_bar_does_not_wait_as_a_notebook_lets_other_bars_wait() -> None:
    code = "from tpu_kit.distributed.progress import open_bar; print(open_bar('demo', 2).delay)"
    assert run_python(code, env={"TQDM_DELAY": "5"}).stdout.strip() == "0"


def test_steps_only_grow(tmp_path: Path) -> None:
    with Tracker(TrainConfig(), tmp_path) as tracker:
        log(tracker, 2)
        with pytest.raises(AssertionError, match="step 2 was logged after step 2"):
            log(tracker, 2)


def test_wandb_online_needs_a_key(tmp_path: Path) -> None:
    online = TrainConfig(tracking=TrackingConfig(wandb="online"))
    nowhere = {"NETRC": str(tmp_path / "netrc")}
    with pytest.raises(ConfigError, match="set WANDB_API_KEY, or wandb=offline"):
        check_tracking(online, Machine(environ=nowhere))
    check_tracking(online, Machine(environ=nowhere | {"WANDB_API_KEY": "0" * 40}))
    check_tracking(online, Machine(environ=nowhere | {"WANDB_MODE": "offline"}))
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    check_tracking(online, Machine(environ=nowhere))  # as `wandb login` writes it


def test_a_package_that_is_missing_is_named() -> None:
    both = TrainConfig(tracking=TrackingConfig(wandb="offline", tensorboard=True))
    with pytest.raises(ConfigError) as caught:
        check_tracking(both, Machine(version=lambda package: None))
    assert len(caught.value.problems) == 2
    assert "pip install wandb, or wandb=off" in str(caught.value)
    assert "pip install tensorboard, or tensorboard=false" in str(caught.value)


TRACKED = """
import sys
from pathlib import Path
from tpu_kit.config.loader import TrackingConfig, TrainConfig
from tpu_kit.training.metrics import Tracker
for start, wandb in ((0, "offline"), (1, "online")):
    config = TrainConfig(tracking=TrackingConfig(wandb=wandb, tensorboard=True))
    before = (tracker.history[:1], tracker.wandb_id) if start else (None, None)
    with Tracker(config, "run", start, before[0], wandb_id=before[1]) as tracker:
        for step in (2,) if start else (1, 2):
            tracker.log(step, loss=float("nan"), grad_norm=1.0, lr=0.1, tokens=step, compiles=1, epoch=0.0)
        tracker.log_eval(2, loss=1.25)

print("the result", file=sys.stderr, flush=True)
from tpu_kit.config.loader import load_config
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.generation.evaluation.comparison import Evaluation, Sample, compare
from tpu_kit.training.metrics import log_result
config = load_config(None, {"wandb": "offline", "tensorboard": True, "wandb_adapter": True, "output_dir": "result"})
Path("result/adapter").mkdir(parents=True)
Path("result/adapter/adapter_model.safetensors").write_text("weights")
base, tuned = (
    Evaluation(Accuracy.of(n, 1), 0.5, 7.0, 0.0, 64, (Sample("1 | 1?", "2", f"says {n}", bool(n)),)) for n in (0, 1)
)
with Tracker(config, "result") as tracker:
    tracker.log(3, loss=1.0, grad_norm=1.0, lr=0.1, tokens=9, compiles=1, epoch=0.0)
metrics = {"accuracy_before": 0.0, "accuracy_after": 1.0, "eval_loss": float("nan")}
log_result(config, 3, metrics, compare(base, tuned), "result/adapter")
"""
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of `TRACKED`, and its output."""
    folder = tmp_path_factory.mktemp("tracked")
    # The second part asks for online, but WANDB_MODE=offline in the tests' environment takes precedence.
    done = run_python(TRACKED, env={"WANDB_API_KEY": KEY}, cwd=folder)
    return folder, done.stdout + done.stderr


def test_wandb_offline_and_tensorboard(tracked: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tmp_path, printed = tracked
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    run_id = (tmp_path / "run" / "wandb_run_id").read_text()
    assert runs
    assert {path.stem for path in runs} == {f"run-{run_id}"}  # the resumed part belongs to the same run
    assert any(b"train/grad_norm" in path.read_bytes() for path in runs)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert KEY not in printed
    assert not any(KEY.encode() in content for content in written)

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/lr")] == [1, 2]  # no step twice, though step 2 was run twice
    assert events.Scalars("eval/loss")[0].value == 1.25


def test_trackers_get_the_result(tracked: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tmp_path, printed = tracked
    assert "warning" not in printed.partition("the result")[2]
    events = EventAccumulator(str(tmp_path / "result" / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("result/accuracy_after")] == [1.0]
    assert [e.step for e in events.Scalars("train/loss")] == [3]
    (answers,) = events.Tensors("answers/text_summary")
    assert rb"1 \| 1?|2|says 0|False|says 1|True" in answers.tensor_proto.string_val[0]
    assert b"lora.r" in events.summary_metadata["_hparams_/session_start_info"].plugin_data.content

    folder = tmp_path / "result" / "wandb"
    assert len({path.stem for path in folder.glob("offline-run-*/run-*.wandb")}) == 1  # a single run on W&B
    (table,) = folder.glob("offline-run-*/files/media/table/answers*.table.json")
    assert json.loads(table.read_text())["data"] == [["1 | 1?", "2", "says 0", "False", "says 1", "True"]]
    written = b"".join(path.read_bytes() for path in folder.glob("offline-run-*/run-*.wandb"))
    assert b"result/accuracy_before" in written and b"result/accuracy_after" in written
    assert b"adapter-" in written and b"adapter_model.safetensors" in written
