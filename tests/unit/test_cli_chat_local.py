"""`oarlock chat MODEL` and `oarlock complete --model MODEL`: the engine is in this process (here a scripted one)."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

import pytest
from oarlock.cli.answers import LocalSource
from oarlock.cli.main import main
from oarlock.errors import InvalidParameter
from oarlock.model_summary import ModelSummary
from toy_frontend import SUMMARY, ScriptedClient, ToyTokenizer, says


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedClient:
    made = ScriptedClient(says("héllo"))
    monkeypatch.setattr("oarlock.engine.launch.launch_inprocess", lambda config, summary: made)
    monkeypatch.setattr("oarlock.model_summary.load_summary", lambda config: SUMMARY)
    monkeypatch.setattr("oarlock.frontend.tokenizer.load_tokenizer", lambda summary, config: ToyTokenizer())
    return made


def prompt_of(client: ScriptedClient, at: int = 0) -> str:
    return bytes(client.submitted[at].prompt_token_ids).decode()


def test_chat_uses_the_template(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["chat", "toy", "--system", "Be brief.", "--temperature", "0.5", "--seed", "3"]) == 0
    assert prompt_of(client) == "[system]Be brief.[user]hi[assistant]"
    params = client.submitted[0].params
    assert (params.temperature, params.seed) == (0.5, 3)
    assert params.max_tokens == 64 - len(client.submitted[0].prompt_token_ids)  # the rest of the context
    assert capsys.readouterr().out == "héllo\n"
    assert client.num_shutdowns == 1


def test_complete_continues_and_ends_at_a_stop_string(client: ScriptedClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "say ", "--model", "toy", "--stop", "lo", "--max-tokens", "9"]) == 0
    assert prompt_of(client) == "say "
    assert capsys.readouterr().out == "hél\n"
    assert [a.reason for a in client.aborts] == ["stop"] and not client.open


def test_a_chat_without_a_template_names_what_can_be_typed_instead(
    monkeypatch: pytest.MonkeyPatch, client: ScriptedClient, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oarlock.frontend.chat.load_chat_template", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    assert main(["chat", "toy"]) == 1
    assert "has no chat template; `oarlock complete TEXT --model MODEL`" in capsys.readouterr().err and not client.submitted


def test_the_checkpoint_decides_what_was_not_typed(monkeypatch: pytest.MonkeyPatch, client: ScriptedClient) -> None:
    summary = ModelSummary(path="/toy", architecture="Toy", vocab_size=272, generation_config={"temperature": 0.25, "top_k": 7, "max_new_tokens": 1})
    monkeypatch.setattr("oarlock.model_summary.load_summary", lambda config: summary)
    with LocalSource({"model": "toy"}) as source:
        list(source.complete("x", {}))
        list(source.complete("x", {"top_k": 3, "max_tokens": 9}))
    nothing, something = [request.params for request in client.submitted]
    assert (nothing.temperature, nothing.top_k) == (0.25, 7)
    assert nothing.max_tokens == 63  # a limit that nobody typed does not cut an answer
    assert (something.temperature, something.top_k, something.max_tokens) == (0.25, 3, 9)


def test_an_interrupt_is_noticed_between_steps_and_leaves_the_engine_idle(client: ScriptedClient) -> None:
    client.script = lambda request, index: [97]
    steps_under_way = []
    step = client.step

    def interrupted_step() -> Any:
        steps_under_way.append(True)
        if len(steps_under_way) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        steps_under_way[-1] = False
        return outputs

    client.step = interrupted_step  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    with LocalSource({"model": "toy"}) as source:
        pieces = []
        with pytest.raises(KeyboardInterrupt):
            pieces += source.complete("x", {"max_tokens": 50})
        assert not any(steps_under_way), "a step was ended halfway"
        assert not client.open and signal.getsignal(signal.SIGINT) is before
        client.script = says("on")
        assert "".join(source.complete("y", {"max_tokens": 9})) == "on"


def test_a_request_that_is_refused_leaves_the_source_usable(client: ScriptedClient) -> None:
    with LocalSource({"model": "toy"}) as source:
        with pytest.raises(InvalidParameter, match="top_p"):
            list(source.complete("x", {"top_p": 3.0}))
        assert "".join(source.complete("x", {})) == "héllo"


def test_the_terminal_needs_the_tokenizer(client: ScriptedClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "x", "--model", "toy", "--skip-tokenizer-init"]) == 2
    assert "--skip-tokenizer-init: the terminal needs the tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_help_says_what_a_model_is_for_and_promises_no_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "file of a model to load here; with --url, which of the server's models" in text and "opt-125m" not in text
