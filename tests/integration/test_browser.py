"""JupyterLab in Chromium: run all cells of the training notebook, press the stop button, and continue.

Screenshots are left in runs/browser for people. `make test-slow` installs the Python packages; Chromium and its driver
must be on the PATH.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.child_processes import REPOSITORY, child_environment
from tpu_kit.training.metrics import read_metrics

pytestmark = pytest.mark.slow
TRAIN = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
PICTURES = REPOSITORY / "runs" / "browser"
INSTALL = "needs jupyterlab and selenium: pip install -e '.[browser]'"
STEPS = 200  # half a minute on two idle cores, enough to stop it
CHANGES = {"run_name": '"by-hand"', "max_steps": str(STEPS), "num_replicas": "2", "generate_rows": "20"}
ADDED = (
    'device_type = "xla-cpu"\nlogging_steps = 2\neval_steps = 50\neval_rows = 20\nsave_steps = 500\nmax_length = 128'
)
SETTINGS = {  # no virtual scrolling, so that the page holds all cells; no prompts
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosaveInterval": 5},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a copy of the notebook; its parameters are changed in the cell, unless the request is "as is"."""
    copy = nbformat.read(TRAIN, as_version=4)
    (cell,) = [one for one in copy.cells if "parameters" in one.metadata.get("tags", [])]
    if getattr(request, "param", "") != "as is":
        for name, value in CHANGES.items():
            cell.source = re.sub(rf"^{name} = \S+", f"{name} = {value}", cell.source, flags=re.MULTILINE)
        cell.source += f"\n{ADDED}"
    nbformat.write(copy, tmp_path / "mine.ipynb")
    return tmp_path


@pytest.fixture
def address(desk: Path) -> Iterator[str]:
    """Yields the address of JupyterLab with the notebook open."""
    pytest.importorskip("jupyterlab", reason=INSTALL)
    for name, values in SETTINGS.items():
        plugin, _, setting = name.partition("/")
        path = desk / "settings" / "@jupyterlab" / plugin / f"{setting}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    port, token = free_port(), secrets.token_hex(16)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={desk}", "--ServerApp.port_retries=0",
    ]  # fmt: skip
    environment = child_environment({"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
    environment |= {"JUPYTERLAB_SETTINGS_DIR": str(desk / "settings"), "JUPYTER_RUNTIME_DIR": str(desk / "runtime")}
    with (desk / "jupyter.log").open("w") as log:
        server = subprocess.Popen(command, cwd=desk, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{port}/api?token={token}"), 120, "JupyterLab does not start")
            yield f"http://127.0.0.1:{port}/lab/tree/mine.ipynb?token={token}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # its kernels end with it
            server.wait(60)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason=INSTALL)
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("needs Chromium and chromedriver (Debian, Ubuntu: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1300,1700"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def wait_for(condition: Callable[[], Any], seconds: float, complaint: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, complaint
        time.sleep(0.3)
    return found


class Page:
    """The notebook page, operated as a user does."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        browser.get(address)
        cells = sum(cell.cell_type == "code" for cell in nbformat.read(TRAIN, as_version=4).cells)
        wait_for(lambda: len(self.find(".jp-Notebook .jp-CodeCell .cm-content")) == cells, 180, "it does not open")
        wait_for(lambda: "Idle" in self.status(), 120, "the kernel does not start")

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def status(self) -> str:
        return " ".join(one.text for one in self.find("#jp-main-statusbar .jp-StatusBar-Left"))

    def choose(self, menu: str, *items: str) -> None:
        """Clicks an item of a menu."""
        self.click(f"//div[contains(@class, 'lm-MenuBar-itemLabel') and text()='{menu}']")
        for item in items:
            self.click(f"//div[contains(@class, 'lm-Menu-itemLabel') and text()='{item}']")

    def click(self, path: str) -> None:
        found = wait_for(lambda: self.browser.find_elements("xpath", path), 30, f"there is no {path}")
        found[-1].click()

    def cell(self, text: str) -> Any:
        """Returns the code cell whose source contains `text`, scrolled into view."""
        (found,) = [
            one for one in self.find(".jp-CodeCell") if text in one.find_element("css selector", ".cm-content").text
        ]
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", found)
        return found

    def enter(self, text: str) -> None:
        """Puts the cursor into a cell, which makes it the target of commands."""
        self.cell(text).find_element("css selector", ".cm-content").click()
        wait_for(lambda: "jp-mod-active" in self.cell(text).get_attribute("class"), 30, "the cell is not entered")

    def outputs(self, text: str) -> str:
        areas = self.cell(text).find_elements("css selector", ".jp-Cell-outputArea")
        return str(areas[0].text) if areas else ""

    def picture(self, name: str, text: str) -> None:
        self.cell(text)
        time.sleep(1)
        self.browser.save_screenshot(str(PICTURES / f"{name}.png"))


def test_run_all_then_stop_then_on(desk: Path, address: str, browser: Any) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page, run = Page(browser, address), desk / "runs" / "by-hand"
    train = "cells.live"
    begun = time.monotonic()
    page.choose("Run", "Run All Cells")
    wait_for(lambda: [one for one in read_metrics(run) if one["step"] >= 10], 500, "training does not begin")
    seen = rf"█.* \d+ of {STEPS} updates"
    wait_for(lambda: re.search(seen, page.outputs(train)), 60, "no progress while it trains")
    assert page.cell(train).find_elements("css selector", "img"), "no plot while it trains"
    page.picture("1-training", train)

    browser.find_element("css selector", "[data-command='notebook:interrupt-kernel'], [title^='Interrupt']").click()
    last = "check_run"  # no cell fails; the last cell prints the advice
    wait_for(lambda: "nothing to check; run the training cell again" in page.outputs(last), 120, "it does not stop")
    shown = page.find(".jp-Notebook")[0].text
    (stopped,) = set(re.findall(rf"stopped at step (\d+) of {STEPS}", shown))
    assert "run this again: the same cell" in shown
    page.picture("2-stopped", train)

    # The stopped cell again, and all cells below.
    page.enter(train)
    page.choose("Run", "Run Selected Cell and All Below")
    wait_for(lambda: (run / "adapter" / "adapter_model.safetensors").is_file(), 500, "it does not go on")
    wait_for(lambda: re.search(r"tuned\s+\d+ of 20", page.outputs("show_answers")), 300, "no answers")
    wait_for(lambda: "Idle" in page.status(), 60, "no end")
    print(f"from Run All to the end, with a stop between: {time.monotonic() - begun:.0f} s")
    assert f"from step {stopped}" in page.outputs(train)
    assert f"{STEPS} of {STEPS} updates" in page.outputs(train)
    assert page.cell(train).find_elements("css selector", "img")
    for name, text in {"3-config": "show_config", "4-lengths": "show_lengths", "5-example": "show_example",
                       "6-trained": train, "7-run": "show_run", "8-answers": "show_answers"}.items():  # fmt: skip
        page.picture(name, text)
    assert re.search(r"status\s+finished", page.outputs("show_run"))
    errors = [one for one in page.find(".jp-OutputArea-output") if "Error" in one.text or "Loading widget" in one.text]
    assert not errors, [one.text for one in errors]
    steps = [one["step"] for one in read_metrics(run) if one["kind"] == "train"]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS


@pytest.mark.parametrize("desk", ["as is"], indirect=True)
def test_one_run_all_from_an_empty_page_to_a_tuned_adapter(desk: Path, address: str, browser: Any) -> None:
    """Five minutes are promised on two cores; a busy machine gets a quarter more."""
    begun = time.monotonic()
    page, run = Page(browser, address), desk / "runs" / "notebook-4"
    page.choose("Run", "Run All Cells")
    wait_for(lambda: (run / "adapter" / "adapter_model.safetensors").is_file(), 375, "no adapter")
    adapter = time.monotonic() - begun
    wait_for(lambda: re.search(r"tuned\s+\d+ of 64", page.outputs("show_answers")), 375 - adapter, "no answers")
    print(f"from an empty page to the adapter {adapter:.0f} s, to answers {time.monotonic() - begun:.0f} s")
    assert "Error" not in page.find(".jp-Notebook")[0].text
