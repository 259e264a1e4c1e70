"""The command line: what it prints, what it returns, what it loads."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import tpu_kit
from tpu_kit.__main__ import COMMANDS, main
from tpu_kit.config import ConfigError, TrainConfig
from tpu_kit.parameters import parameters
from tpu_kit.testing import run_python


class Result(NamedTuple):
    status: str


class LaunchError(RuntimeError):
    pass


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[TrainConfig]]:
    """Puts a function in the place of tpu_kit.sft.train, and returns the list of configurations it gets."""

    def install(outcome: str | Exception) -> list[TrainConfig]:
        received = []
        asked: list[bool] = []

        def train(config: TrainConfig, *, exact: bool) -> Result:
            received.append(config)
            asked.append(exact)
            if isinstance(outcome, Exception):
                raise outcome
            return Result(outcome)

        launch, sft = types.ModuleType("tpu_kit.launch"), types.ModuleType("tpu_kit.sft")
        launch.LaunchError, sft.train, sft.asked = LaunchError, train, asked  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tpu_kit.launch", launch)
        monkeypatch.setitem(sys.modules, "tpu_kit.sft", sft)
        return received

    return install


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 0), ("preempted", 75)])
def test_train(training: Any, capsys: pytest.CaptureFixture[str], status: str, code: int) -> None:
    received = training(status)
    assert main(["train", "embedded-cot", "batch_size=2", "run_name=x"]) == code
    (config,) = received
    assert (config.optim.batch_size, config.run_name, config.data.format) == (2, "x", "cot")
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines()}
    assert lines["optim.batch_size"] == ["2", "command", "line"]
    assert lines["data.format"] == ["'cot'", "file"]
    assert printed.endswith(f"Result(status='{status}')\n")


def test_train_without_arguments_is_the_default_run(training: Any) -> None:
    received = training("finished")
    assert main(["train"]) == 0
    assert received == [TrainConfig()]
    assert sys.modules["tpu_kit.sft"].asked == [False]


def test_train_exact_asks_the_compiler(training: Any) -> None:
    received = training("finished")
    assert main(["train", "embedded-cot", "--exact", "batch_size=auto"]) == 0
    assert received[0].optim.batch_size == "auto"
    assert sys.modules["tpu_kit.sft"].asked == [True]


def test_launch_error_is_told_once(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    training(LaunchError("replica 3 failed: out of memory"))
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "replica 3 failed: out of memory\n"


def test_other_errors_keep_their_traceback(training: Any) -> None:
    training(KeyError("x"))
    with pytest.raises(KeyError):
        main(["train"])


def test_config_error_of_a_later_check(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    training(ConfigError(["optim.global_batch_size: 7"]))
    assert main(["train"]) == 2
    assert "optim.global_batch_size: 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bach_size=2", "lr=1"],
         "2 problems in the configuration:\n"
         "  - bach_size: no such parameter (given '2'); did you mean optim.batch_size?\n"
         "  - lr: no such parameter (given '1'); did you mean optim.learning_rate?\n"),
        (["nowhere.yaml"], "nowhere.yaml: no such configuration file; "),
        (["batch_size", "2"], "batch_size, 2: one configuration file at most; the others are key=value"),
        (["--verbose"], "'--verbose' is not key=value, such as optim.batch_size=4"),
    ],
)  # fmt: skip
def test_bad_config(training: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    received = training("finished")
    assert main(["train", *arguments]) == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert not printed.out
    assert not received


def test_bad_config_is_told_without_loading_torch() -> None:
    code = """
import sys
from tpu_kit.__main__ import main
assert main(["train", "bach_size=2"]) == 2
assert main(["train", "--help"]) == 0
assert main(["plan", "batch_size=2", "max_steps=10", "--chip", "v6e", "--json"]) == 0
assert main(["plan", "--chip", "v66e"]) == 2
assert main(["--version"]) == 0
assert "torch" not in sys.modules
"""
    run_python(code)


def test_doctor_gets_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tpu_kit.doctor")
    module.main = lambda arguments: {(): 0, ("a",): 1}[tuple(arguments)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tpu_kit.doctor", module)
    assert main(["doctor"]) == 0
    assert main(["doctor", "a"]) == 1


def test_plan_gets_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tpu_kit.plans")
    module.main = lambda arguments: {(): 0, ("--chip", "x"): 2}[tuple(arguments)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tpu_kit.plans", module)
    assert main(["plan"]) == 0
    assert main(["plan", "--chip", "x"]) == 2


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_overview(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in printed
        assert command.summary in printed


def test_no_arguments_come_from_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tpu_kit", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"tpu_kit {tpu_kit.__version__}\n"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"python -m tpu_kit {name}")
    assert "Exit codes: 0" in printed


def test_help_of_train_explains_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "batch_size=2", "--help"])
    printed = capsys.readouterr().out
    for parameter in parameters().values():
        assert parameter.help in printed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trian", "trian: no such command; did you mean train?\n"),
        ("zzz", f"zzz: no such command; there are {', '.join(COMMANDS)}\n"),
    ],
)
def test_unknown_command(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(text)


def test_public_names() -> None:
    assert set(tpu_kit.__all__) <= set(dir(tpu_kit))
    assert tpu_kit.TrainConfig is TrainConfig
    with pytest.raises(AttributeError, match="module 'tpu_kit' has no attribute 'trian'; it has ConfigError, "):
        _ = tpu_kit.trian


def test_the_version_is_that_of_the_package() -> None:
    import tomllib

    from tpu_kit.testing import REPOSITORY

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == tpu_kit.__version__
