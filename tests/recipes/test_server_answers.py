"""Answers of a server with OpenAI's interface are judged like a model's answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.object_store import free_port
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.cli import main
from tpu_kit.recipes.evaluation import server_answers

EVALUATE = ["evaluate", "embedded-cot", "run_name=my run", "generate_rows=6", "generate_tokens=64", "adapter=null"]


class Recorded(ThreadingHTTPServer):
    """Answers in the format of vLLM 0.32; `answers` maps questions to answers."""

    answers: dict[str, dict[str, Any]]
    asked: list[tuple[str, dict[str, Any], str]]
    models = ("base", "my-run")
    failures = 0


class Handler(BaseHTTPRequestHandler):
    server: Recorded

    def do_GET(self) -> None:
        self._say(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"] or ""))
        if self.server.failures:
            self.server.failures -= 1
            return self._say(503, {"error": {"message": "busy"}})
        usage = {"prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if self.path == "/v1/completions":
            choice["text"] = "no idea"
        elif not (message := self.server.answers.get(body["messages"][-1]["content"])):
            return self._say(400, {"error": {"message": "maximum context length is 64", "code": 400}})
        else:
            choice |= {"message": {"role": "assistant", **message}}
        self._say(200, {"id": "x", "choices": [choice], "usage": usage})

    def _say(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Recorded]:
    with Recorded(("127.0.0.1", 0), Handler) as made:
        made.asked, made.answers = [], {}
        for number, row in enumerate(cot_rows("eval", 2000)):
            reasoned = {"content": row["answer"], "reasoning_content": row["reasoning"]}
            plain = {"content": f"<think>\n{row['reasoning']}\n</think>\n{row['answer']}"}
            made.answers[row["question"]] = [reasoned, plain, {"content": "no idea"}][number % 3]
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def address(server: Recorded) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_answers_of_a_server_are_judged(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-12345")
    server.failures = 2
    assert main([*EVALUATE, f"server={address(server)}/v1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["served"]
    questions = {body["messages"][-1]["content"] for _, body, _ in server.asked}
    right = sum(server.answers[question]["content"] != "no idea" for question in questions)
    assert 0 < right < len(questions) == said["accuracy"]["total"] == 6 and len(server.asked) == 8
    assert said["accuracy"]["correct"] == right and said["mean_tokens"] == 12
    assert said["format_adherence"] == said["accuracy"]["share"] and said["perplexity"] is None
    path, body, key = server.asked[-1]
    assert (path, body["model"], body["temperature"], body["max_tokens"]) == ("/v1/chat/completions", "my-run", 0, 64)
    assert key == "Bearer sk-12345"


def test_a_system_prompt_is_sent_and_begun_answers_are_continued(
    server: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*EVALUATE, f"server={address(server)}", "system_prompt=Be brief."]) == 0
    assert all(
        [turn["role"] for turn in body["messages"]] == ["system", "user"]
        and body["messages"][0]["content"] == "Be brief."
        and "continue_final_message" not in body
        for _, body, _ in server.asked
    )
    capsys.readouterr()
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}]
    sent = server_answers._chat({"messages": turns, "tools": None})
    assert sent == {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}


def test_plain_text_is_continued(server: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EVALUATE, f"server={address(server)}", "chat=false", "served_model=base"]) == 0
    assert capsys.readouterr().out.startswith(f"base of {address(server)}\ncorrect (95 % interval)  0 of 6 = 0.0%")
    path, body, key = server.asked[0]
    assert path == "/v1/completions" and all(isinstance(token, int) for token in body["prompt"]) and not key


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["server=localhost:8000"], "server=localhost:8000: give a URL, such as http://localhost:8000"),
        (["served_model=x"], "served_model=x: it has no effect without server=http://..."),
    ],
)
def test_what_names_no_server(settings: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EVALUATE, *settings]) == 2
    assert text in capsys.readouterr().err


def test_servers_that_do_not_answer_are_named(server: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    where = address(server)
    assert main([*EVALUATE, f"server={where}", "run_name=other"]) == 1
    assert f"server={where} serves base, my-run, not other: give served_model=NAME, or" in capsys.readouterr().err
    server.answers.clear()
    assert main([*EVALUATE, f"server={where}"]) == 1
    told = capsys.readouterr().err
    assert f"server={where} refuses chat/completions (status 400): " in told and "maximum context length is 64" in told
    assert main([*EVALUATE, f"server=http://127.0.0.1:{free_port()}"]) == 1
    assert "cannot be reached ([Errno 111] Connection refused): start one with the com" in capsys.readouterr().err
