"""The processes of grammars: what hangs, eats or crashes fails its own requests in time; nobody else notices, and nothing is left."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grammar_clients import Wanted, children, wait
from oarlock_structured_output import client as client_module
from oarlock_structured_output.client import Client

Make = Callable[..., Client]
A = bytes(12) + b"\x02" + bytes(23)  # token 97 of 264


def test_masks_follow_the_tokens_of_each_branch(make: Make) -> None:
    client = make()
    for branch in (1, 2):
        client.ask(branch, Wanted("regex", "aaa"), 0, ())
        assert wait(client, branch) == (A, False, "")
    for at in range(3):
        client.ask(1, Wanted("regex", "aaa"), at, (97,))
        assert wait(client, 1) == (A, at == 2, "")
    client.ask(2, Wanted("regex", "aaa"), 0, (97,))
    assert wait(client, 2) == (A, False, "")
    assert len(children()) == 2, "one process that forks, and one for the one grammar"


def test_a_token_that_was_not_allowed_is_said(make: Make) -> None:
    client = make()
    client.ask(1, Wanted("regex", "aaa"), 0, (98,))
    assert "only a is allowed" in wait(client, 1)[2]


def test_nothing_is_started_before_it_is_needed(make: Make) -> None:
    client = make()
    assert not children() and client.answers(0.0) == []


@pytest.mark.parametrize(("text", "words", "time_s"), [("hang", "not compiled within 1 s", 1.0), ("eat", "memory", 10.0), ("crash", "process ended", 10.0)])
def test_a_compile_that_goes_wrong_fails_its_request_and_blocks_nobody(make: Make, text: str, words: str, time_s: float) -> None:
    client = make(time_s=time_s, memory_bytes=128 << 20)
    client.ask(1, Wanted("regex", "good"), 0, ())
    assert wait(client, 1)[2] == ""
    client.ask(2, Wanted("regex", text), 0, ())
    slowest, problem, token = 0.0, "", 0
    started = time.monotonic()
    while not problem:
        assert time.monotonic() - started < 15
        client.ask(1, Wanted("regex", "good"), token, (97,))
        token += 1
        asked = time.monotonic()
        answered = False
        while not answered:
            for branch, _, _, why in client.answers(0.02):
                answered |= branch == 1
                problem = why if branch == 2 else problem
        slowest = max(slowest, time.monotonic() - asked)
    assert words in problem and slowest < 0.5
    client.forget(2)
    client.ask(3, Wanted("regex", "another"), 0, ())
    assert wait(client, 3)[2] == ""


def test_many_hanging_compiles_end_one_after_another(make: Make) -> None:
    client = make(time_s=0.3)
    for branch in range(5):
        client.ask(branch, Wanted("regex", "hang", whitespace_pattern=str(branch)), 0, ())
    problems: dict[int, str] = {}
    deadline = time.monotonic() + 15
    while len(problems) < 5:
        assert time.monotonic() < deadline
        problems |= {branch: why for branch, _, _, why in client.answers(0.1)}
        assert len(children()) <= 3, "two compile at one time"
    assert all("--grammar-time" in why for why in problems.values())


def test_a_pid_is_given_back_only_between_two_orders(make: Make) -> None:
    """The process that forks once waited for its children in a signal handler, lost one of many, and then ended at an order to kill it."""
    client = make()
    client.ask(1, Wanted("regex", "aaa"), 0, ())
    assert wait(client, 1)[2] == ""
    forker, grammar = sorted(children())
    os.kill(grammar, signal.SIGKILL)
    time.sleep(0.2)
    assert Path(f"/proc/{grammar}/stat").read_text().rpartition(")")[2].split()[:2] == ["Z", str(forker)]
    client.answers(0.1)  # it hears of the end, and orders the next
    client.ask(1, Wanted("regex", "aaa"), 0, ())
    assert wait(client, 1)[2] == "" and not Path(f"/proc/{grammar}").exists()


def test_a_process_that_cannot_be_forked_is_its_own_grammars_fault(make: Make) -> None:
    client = make(argument="no processes")
    client.ask(1, Wanted("regex", "aaa"), 0, ())
    assert wait(client, 1)[2] == ""
    client.ask(2, Wanted("regex", "another"), 0, ())
    assert "no process can be started for it now" in wait(client, 2)[2]
    client.ask(1, Wanted("regex", "aaa"), 0, (97,))
    assert wait(client, 1) == (A, False, "")


def test_a_mask_that_hangs_fails_its_branch(make: Make) -> None:
    client = make(time_s=0.5)
    client.ask(1, Wanted("regex", "mask-hang"), 0, ())
    assert wait(client, 1)[2] == ""
    client.ask(1, Wanted("regex", "mask-hang"), 0, (97,))
    assert "mask was not computed within 0.5 s" in wait(client, 1)[2]


def test_a_lost_process_is_rebuilt_from_the_tokens(make: Make) -> None:
    client = make()
    client.ask(1, Wanted("regex", "aaa"), 0, (97, 97))
    assert wait(client, 1) == (A, False, "")
    grammar = max(children())
    os.kill(grammar, signal.SIGKILL)
    while grammar in children():
        time.sleep(0.01)
    client.answers(0.1)
    client.ask(1, Wanted("regex", "aaa"), 2, (97,))
    assert wait(client, 1) == (A, True, "")
    assert grammar not in children()


def test_the_process_that_forks_may_die_too(make: Make) -> None:
    client = make()
    client.ask(1, Wanted("regex", "aaa"), 0, (97,))
    assert wait(client, 1)[2] == ""
    client.ask(2, Wanted("regex", "hang"), 0, ())
    client.answers(0.1)
    os.kill(min(children()), signal.SIGKILL)
    assert "process of the backend" in wait(client, 2)[2]
    client.ask(1, Wanted("regex", "aaa"), 1, (97, 97))
    assert wait(client, 1) == (A, True, "")
    assert len(children()) == 2, "the one that hung went with its parent"


@pytest.mark.parametrize(("module", "name", "code"), [("tempfile", "TemporaryFile", errno.ENOSPC), ("subprocess", "Popen", errno.EAGAIN), ("socket", "socketpair", errno.EMFILE)])
@pytest.mark.parametrize("has_begun", [False, True])
def test_what_the_system_has_no_more_of_fails_the_requests_that_need_it(make: Make, monkeypatch: pytest.MonkeyPatch, module: str, name: str, code: int, has_begun: bool) -> None:
    """A full disk, no more processes, no more descriptors: the engine lives, and the next request is served when there are some again."""
    client = make()
    if has_begun:
        client.ask(1, Wanted("regex", "first"), 0, ())
        assert wait(client, 1)[2] == ""

    def none_left(*arguments: object, **settings: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as lacking:
        lacking.setattr(getattr(client_module, module), name, none_left)
        client.ask(2, Wanted("regex", "second"), 0, ())
        problem = wait(client, 2)[2]
        assert (os.strerror(code) in problem) if name == "socketpair" or not has_begun else problem == ""  # what has begun needs no file and no process more
        client.forget(2)
    client.ask(3, Wanted("regex", "third"), 0, ())
    assert wait(client, 3)[2] == ""


def test_grammars_that_nobody_uses_make_room(make: Make) -> None:
    client = make(processes=2)
    for branch in range(6):
        client.ask(branch, Wanted("regex", f"text {branch}"), 0, ())
        assert wait(client, branch)[2] == ""
        assert len(children()) <= 3
        client.forget(branch)


def test_grammars_in_use_are_waited_for(make: Make) -> None:
    client = make(processes=1)
    client.ask(1, Wanted("regex", "one"), 0, ())
    assert wait(client, 1)[2] == ""
    client.ask(2, Wanted("regex", "two"), 0, ())
    assert client.answers(0.2) == []
    client.forget(1)
    assert wait(client, 2)[2] == ""


def test_a_request_that_goes_away_ends_its_compile(make: Make) -> None:
    client = make(time_s=60)
    client.ask(1, Wanted("regex", "hang"), 0, ())
    deadline = time.monotonic() + 20
    while len(children()) < 2:
        client.answers(0.05)
        assert time.monotonic() < deadline
    client.forget(1)
    while len(children()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_vocabulary_that_cannot_be_loaded_is_said(make: Make) -> None:
    client = make(argument="broken")
    client.ask(1, Wanted("regex", "aaa"), 0, ())
    assert "the tokenizer is not there" in wait(client, 1)[2]


def test_a_kind_that_a_backend_lacks_is_refused_with_one_that_has_it(make: Make) -> None:
    client = make(backend="outlines")
    client.ask(1, Wanted("grammar", "start: A"), 0, ())
    problem = wait(client, 1)[2]
    assert "outlines has no grammar" in problem and "llguidance" in problem and not children()


def test_waiting_ends_when_it_was_told_to(make: Make) -> None:
    client = make()
    client.ask(1, Wanted("regex", "slow 2"), 0, ())
    started = time.monotonic()
    assert client.answers(0.1) == [] and time.monotonic() - started < 0.5
