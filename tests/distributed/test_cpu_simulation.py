"""The rehearsal on XLA:CPU must be as dependable as a test runner: launch after launch, on a busy machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import replica_functions
from tests.support.child_processes import QUICK_XLA_FLAGS
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.launch import LaunchError, launch
from tpu_kit.distributed.replica import cpu_simulation
from tpu_kit.machine.checks import Machine

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    return load_config(overrides=["launch.num_replicas=4", "launch.hang_timeout=120", f"output_dir={tmp_path}"])


def _burn() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other load on the processor, as on a user's machine."""
    # Forked, they would hold this process's pipes; spawned, they are like any other program.
    burners = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(processes)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def check(config: TrainConfig) -> None:
    result = launch(replica_functions.fifty_steps, config)
    assert len(result["hashes"]) == 1, "the replicas' parameters have parted"
    assert result["losses"] == 4 * 50
    assert 0 < result["loss"] < 7  # log(500) is 6.2
    # The start, and one program for all steps; each replica runs both, and the last sync has nothing to do.
    assert result["compiles"] == 2
    assert result["executions"] == 4 * 51
    assert (result["host_syncs"], result["fallbacks"]) == (0, 0)


@needs_xla
@pytest.mark.slow
def test_a_launch_of_fifty_steps_on_a_busy_machine(config: TrainConfig) -> None:
    """`test_hundred_launches` measures this, and other tests launch some dozens more."""
    with busy(2):
        check(config)


@needs_xla
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_hundred_launches(config: TrainConfig) -> None:
    for number in range(100):
        started = time.monotonic()
        with busy(2 if number % 2 else 0):
            check(config)
        print(f"launch {number + 1}: {time.monotonic() - started:.1f} s", flush=True)


@needs_xla
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_donation_is_what_aborts(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells whether the rehearsal still needs donation off; another torch_xla may not."""
    usual = cpu_simulation.environment
    monkeypatch.setattr(
        cpu_simulation, "environment", lambda *a, **k: usual(*a, **k) | {"XLA_ENABLE_PARAM_ALIASING": "1"}
    )
    aborts = 0
    for _ in range(4):
        try:
            with busy(2):
                launch(replica_functions.fifty_steps, config)
        except LaunchError as error:
            assert "SIGABRT" in str(error)
            aborts += 1
    print(f"with donation {aborts} of 4 launches were aborted")
    if not aborts:
        pytest.skip("no abort with donation on: if torch_xla was upgraded, the rehearsal may not need it off any more")


@needs_xla
def test_a_rank_that_returns_early_is_named(config: TrainConfig) -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 has returned, and will not come to another step"):
        launch(replica_functions.leave_rank_1, config)
    assert time.monotonic() - started < 60  # and not after hang_timeout


@needs_xla
def test_replicas_may_import_transformers_at_once(config: TrainConfig) -> None:
    assert launch(replica_functions.import_transformers, config) == "AutoModelForCausalLM"


def meet_in_threads(meeting: cpu_simulation._Rendezvous, ranks: list[int]) -> dict[int, str]:
    outcome: dict[int, str] = {}

    def wait(rank: int) -> None:
        try:
            meeting.wait(rank)
            outcome[rank] = "met"
        except cpu_simulation.MeetingError as error:
            outcome[rank] = str(error)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcome


def test_a_rank_that_does_not_come_is_named() -> None:
    meeting = cpu_simulation._Rendezvous(4, 1.0)
    assert set(meet_in_threads(meeting, [0, 1, 2, 3]).values()) == {"met"}
    started = time.monotonic()
    outcome = meet_in_threads(meeting, [0, 1, 3])
    assert 1.0 <= time.monotonic() - started < 10
    assert len(outcome) == 3
    for text in outcome.values():
        assert text.startswith("rank 2 did not come to the step in 1 s (launch.hang_timeout), where rank ")
    # The others have gone: a late replica must not continue alone.
    assert "rank 2 did not come" in meet_in_threads(meeting, [2])[2]


def test_an_end_sends_all_home(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = cpu_simulation._Rendezvous(3, 600.0)
    monkeypatch.setattr(cpu_simulation, "_rendezvous", meeting)
    timer = threading.Timer(0.5, cpu_simulation.end, args=("rank 1 has returned",))
    timer.start()
    outcome = meet_in_threads(meeting, [0, 2])
    assert set(outcome.values()) == {"rank 1 has returned"}
    with pytest.raises(cpu_simulation.MeetingError, match="rank 1 has returned"):
        cpu_simulation.meet(0)


def test_meetings_follow_one_another() -> None:
    """A quick rank must not enter the next barrier before slow ranks have left this barrier."""
    meeting, rounds = cpu_simulation._Rendezvous(4, 30.0), 200
    done: list[list[int]] = [[] for _ in range(rounds)]

    def walk(rank: int) -> None:
        for number in range(rounds):
            done[number].append(rank)
            meeting.wait(rank)
            assert len(done[number]) == 4
            meeting.wait(rank)

    threads = [threading.Thread(target=walk, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(sorted(ranks) == [0, 1, 2, 3] for ranks in done)


def test_environment() -> None:
    alone = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "JAX_PLATFORMS": "cpu"}  # or JAX opens the machine's TPU
    more = {"CPU_NUM_DEVICES": "8", "XLA_THREAD_POOL_SIZE": "16", "XLA_ENABLE_PARAM_ALIASING": "0", "PJRT_NPROC": "128"}
    assert cpu_simulation.environment(1) == alone
    assert cpu_simulation.environment(8) == alone | more
