"""The kernels' thread team: callers side by side, a forked child, another number of threads, and no work when idle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

pytestmark = pytest.mark.kernels


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_call():
    from oarlock_cpu import ops

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 256, generator=generator), ops.pack(torch.randn(512, 256, generator=generator))
    return lambda: ops.linear(x, weight)


def test_callers_side_by_side_get_their_own_results(two_threads):
    call = make_call()
    want, wrong = call(), []

    def caller() -> None:
        for _ in range(200):
            if not torch.equal(call(), want):
                wrong.append(1)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_number_of_threads_may_change(two_threads):
    call = make_call()
    want = call()
    for threads in (1, 4, 2, 7, 1):
        torch.set_num_threads(threads)
        assert all(torch.equal(call(), want) for _ in range(20))


def test_a_forked_child_makes_a_team_of_its_own():
    code = (
        "import os, sys, torch; torch.set_num_threads(2)\n"
        "from oarlock_cpu import ops\n"
        "x, w = torch.ones(16, 256), ops.pack(torch.ones(512, 256)); ops.linear(x, w)\n"
        "child = os.fork()\n"
        "ok = all(bool((ops.linear(x, w) == 256).all()) for _ in range(50))\n"
        "if child == 0: os._exit(0 if ok else 1)\n"
        "print(ok, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.stdout.split() == ["True", "0"]


def test_idle_threads_use_no_processor_time(two_threads):
    call = make_call()
    for _ in range(50):
        call()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.01
