"""The claims of the README on this machine, and the text to paste."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kit.config.loader import load_config
from tpu_kit.machine.checks import Check
from tpu_kit.notebook import verify
from tpu_kit.notebook.claims import Claims, check_claims, paste

CPU = ["device_type=cpu", "num_replicas=1"]


def test_a_model_that_has_not_learned_fails_its_claim(tmp_path: Path) -> None:
    few = {"max_steps": 1, "warmup_steps": 0, "split": "train[:200]", "generate_tokens": 4, "logging_steps": 1}
    claims = Claims(load_config(None, CPU).launch, tmp_path, questions=2, settings=few)
    (_, learns), (_, reads), (_, compiles), *_ = claims.run()
    held, found = learns()
    assert not held and "0 of 2 before, 0 after; held-out loss " in found
    assert reads() == (None, "counted only on XLA") and compiles() == (None, "nothing is compiled here")


def test_what_is_pasted_has_every_row_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-of-the-hub-4711")
    rows = [Check("Cores", "ok", "sum of 1..1"), Check("Memory", "skipped", "not measured")]
    exports = Check("it exports", "failure", f"{Path.home()}/x: canary-of-the-hub-4711")
    claims = [Check("it resumes", "ok", "equal\nadapters (3 s)"), exports, Check("it compiles", "skipped", "not here")]
    text = paste(load_config(None, CPU), rows, claims)
    assert "tpu_kit verify --report: 1 of 2 claims of the README hold here\ndevice_type=cpu, 1 replica(s)" in text
    for line in ("✓ Cores: sum of 1..1", "✓ it resumes: equal adapters (3 s)", "– it compiles: not here"):  # noqa: RUF001
        assert f"\n{line}\n" in text
    assert "✗ it exports: ~/x: " in text and "canary" not in text and str(Path.home()) not in text


@pytest.mark.slow  # quick siblings: the tests above
def test_the_claims_hold_on_the_plain_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verify.print_report(load_config(None, CPU), "report.json", claims=True) == 0
    said = capsys.readouterr().out
    assert "3 of 3 claims of the README hold here" in said
    assert [check.status for check in check_claims(load_config(None, CPU), questions=20)].count("ok") == 3
