"""The command line: output, exit codes, and loaded modules."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tpu_kit
from tests.support.child_processes import run_python
from tpu_kit.cli import COMMANDS, main
from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.config.schema import parameters


class Result(NamedTuple):
    status: str


class LaunchError(RuntimeError):
    pass


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[TrainConfig]]:
    """Puts a function in the place of tpu_kit.recipes.sft.train, and returns the list of configurations it gets."""

    def install(outcome: str | Exception) -> list[TrainConfig]:
        received = []
        asked: list[bool] = []

        def train(config: TrainConfig, *, exact: bool) -> Result:
            received.append(config)
            asked.append(exact)
            if isinstance(outcome, Exception):
                raise outcome
            return Result(outcome)

        launch, sft = types.ModuleType("tpu_kit.distributed.launch"), types.ModuleType("tpu_kit.recipes.sft")
        launch.LaunchError, sft.train, sft.asked = LaunchError, train, asked
        monkeypatch.setitem(sys.modules, "tpu_kit.distributed.launch", launch)
        monkeypatch.setitem(sys.modules, "tpu_kit.recipes.sft", sft)
        return received

    return install


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 0), ("preempted", 75)])
def test_train(training: Any, capsys: pytest.CaptureFixture[str], status: str, code: int) -> None:
    received = training(status)
    assert main(["train", "embedded-cot", "batch_size=2", "run_name=x"]) == code
    (config,) = received
    assert (config.optim.batch_size, config.run_name, config.data.max_length) == (2, "x", 256)
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines()}
    assert lines["optim.batch_size"] == ["2", "command", "line"]
    assert lines["data.max_length"] == ["256", "file"]
    assert printed.endswith(f"Result(status='{status}')\n")


def test_train_without_arguments_is_the_default_run(training: Any) -> None:
    received = training("finished")
    assert main(["train"]) == 0
    assert received == [TrainConfig()]
    assert sys.modules["tpu_kit.recipes.sft"].asked == [False]


def test_train_exact_asks_the_compiler(training: Any) -> None:
    received = training("finished")
    assert main(["train", "embedded-cot", "--exact", "batch_size=auto"]) == 0
    assert received[0].optim.batch_size == "auto"
    assert sys.modules["tpu_kit.recipes.sft"].asked == [True]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LaunchError("replica 3 failed: out of memory"), "replica 3 failed: out of memory\n"),
        (OSError(28, "No space left on device: make room"), "[Errno 28] No space left on device: make room\n"),
    ],
)
def test_an_error_that_says_what_to_do_is_told_once(
    training: Any, capsys: pytest.CaptureFixture[str], error: Exception, text: str
) -> None:
    training(error)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == text


@pytest.mark.parametrize("error", [KeyError("x"), OSError(28, "No space left on device")])
def test_other_errors_keep_their_traceback(training: Any, error: Exception) -> None:
    training(error)
    with pytest.raises(type(error)):
        main(["train"])


def test_config_error_of_a_later_check(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    training(ConfigError(["optim.global_batch_size: 7"]))
    assert main(["train"]) == 2
    assert "optim.global_batch_size: 7" in capsys.readouterr().err


OPTIONS = "-h, --help, --exact, --dry-run, --json"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bach_size=2", "lr=1"],
         "2 problems in the configuration:\n"
         "  - bach_size: no such parameter (given '2'); did you mean optim.batch_size?\n"
         "  - lr: no such parameter (given '1'); did you mean optim.learning_rate?\n"),
        (["nowhere.yaml"], "nowhere.yaml: no such configuration file; "),
        (["batch_size", "2"], "batch_size, 2: one configuration file at most; write parameters as key=value"),
        (["--verbose"], f"--verbose: no such option; there are {OPTIONS}; a parameter is key=value"),
        (["--learning_rate", "1e-3"], "--learning_rate: no such option; "),
        (["--batch-size=4"], f"--batch-size=4: no such option; there are {OPTIONS}; a parameter is key=value"),
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
from tpu_kit.cli import COMMANDS, main
assert main(["train", "bach_size=2"]) == 2
assert main(["train", "--help"]) == 0
assert main(["plan", "batch_size=2", "max_steps=10", "--chip", "v6e", "--json"]) == 0
assert main(["plan", "--chip", "v66e"]) == 2
assert main(["--version"]) == 0
for command in COMMANDS:
    assert main([command, "--help"]) == 0
assert main(["pod", "--slice", "v4-32", "--with", "xpk"]) == 2
assert main(["export", "run", "format=xyz"]) == 2
assert main(["export", "run", "--format", "xyz"]) == 2
assert main(["generate", "n=0"]) == 2
assert main(["search", "prompt=a", "beam=0"]) == 2
assert "torch" not in sys.modules
"""
    shape = "from tpu_kit.config.loader import load_config; from tpu_kit.model.shape_cache import read_shape; "
    run_python(
        shape + "read_shape(load_config().model)"
    )  # needs torch, once for each change of the code that derives it
    run_python(code)


def test_doctor_gets_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tpu_kit.notebook.doctor")
    module.print_findings = lambda config, as_json: int(config.optim.batch_size == 2 and as_json)
    monkeypatch.setitem(sys.modules, "tpu_kit.notebook.doctor", module)
    assert main(["doctor", "batch_size=2"]) == 0
    assert main(["doctor", "--json", "embedded-cot", "batch_size=2"]) == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_overview(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in printed
        assert command.description in printed


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
    assert printed.startswith(f"usage: python -m tpu_kit {name}")
    assert "Exit codes: 0" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["checkpoints"], "the following arguments are required: OUTPUT_DIR; write python -m tpu_kit checkpoints"),
        (["checkpoints", "a", "b"], "b: not expected; write python -m tpu_kit checkpoints"),
        (["checkpoints", "run", "--force"], "--force: no such option; there are -h, --help, --verify, --json"),
        (["doctor", "a.yaml", "b.yaml"], "a.yaml, b.yaml: one configuration file at most"),
        (["doctor", "num_replica=2"], "did you mean launch.num_replicas?"),
        (["export", "run", "format=xyz"], "format=xyz: the formats are adapter, merged"),
        (["export", "run", "dtype=int4"], "dtype=int4: the types are bf16"),
        (["generate", "--prompt", "a b"], "--prompt: no such option"),
    ],
)
def test_bad_usage(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_a_folder_with_an_equals_sign_is_no_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "learning_rate=0.001-1a2b3c"
    run.mkdir()
    assert main(["export", str(run)]) == 1
    assert f"{run} has no config.yaml" in capsys.readouterr().err


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


def test_the_version_stands_in_one_place() -> None:
    import tomllib

    from tests.support.child_processes import REPOSITORY

    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "version" not in settings["project"] and settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tpu_kit.__version__"}


def test_every_problem_of_a_commands_own_options_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "prompt=x", "n=0", "rows=0", "max_length=3"]) == 2
    told = capsys.readouterr().err
    assert "n: 0 is out of range" in told and "rows: 0 is out of range" in told and "no such" not in told


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [
        (SystemExit(143), 143, "ended by SIGTERM"),
        (SystemExit(0), 1, "sys.exit(0) in the code"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_exit_within_a_command_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: BaseException, status: int, text: str
) -> None:
    def report(*_: object) -> int:
        raise end

    monkeypatch.setattr("tpu_kit.notebook.doctor.print_findings", report)
    assert main(["doctor"]) == status
    assert text in capsys.readouterr().err
