"""Cases of bank.yaml: the offline API, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from real_server import RealServer

OPTIONS = "dtype='float32', kv_cache_memory='16MiB', max_num_seqs=8, threads=1"


def python(code: str, model: Path | str, *, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MODEL": str(model)}
    prelude = f"import os, sys, json\nfrom oarlock import LLM, SamplingParams\ndef make(): return LLM(os.environ['MODEL'], {OPTIONS})\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


LIFECYCLE = """
import gc, signal, threading, time
from pathlib import Path
before = signal.getsignal(signal.SIGINT)
def state():
    gc.collect()
    rss = int(Path('/proc/self/statm').read_text().split()[1]) * 4096
    children = [p for p in Path('/proc').iterdir() if p.name.isdigit() and (p / 'stat').exists() and (p / 'stat').read_text().rpartition(')')[2].split()[1] == str(os.getpid())]
    return rss, len(children)
seen = []
for i in range(3):
    llm = make()
    (out,) = llm.generate(['hi'], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert len(out.outputs[0].token_ids) <= 4
    del llm
    seen.append(state())
assert signal.getsignal(signal.SIGINT) is before
print(json.dumps({'rss': [s[0] for s in seen], 'children': [s[1] for s in seen], 'threads': threading.active_count()}))
"""


def test_offline_lifecycle(tiny_model: Path) -> None:
    facts = result(python(LIFECYCLE, tiny_model))
    assert facts["children"] == [0, 0, 0]
    assert facts["rss"][2] - facts["rss"][0] < 16 << 20  # the first engine also pays for the libraries; the third adds nothing


def test_offline_lifecycle_after_an_exception(tiny_model: Path) -> None:
    done = python("llm = make()\nllm.generate(['hi'], SamplingParams(max_tokens=2), use_tqdm=False)\nraise SystemExit('stopped by the user')", tiny_model)
    assert done.returncode == 1 and "stopped by the user" in done.stderr and "Traceback" not in done.stderr
    done = python("with make() as llm:\n    raise RuntimeError('inside')", tiny_model)
    assert done.returncode == 1 and done.stderr.strip().endswith("RuntimeError: inside")


def test_offline_lifecycle_import_is_quick_and_starts_nothing(tiny_model: Path) -> None:
    code = "import threading\nprint(json.dumps(['torch' in sys.modules, threading.active_count(), SamplingParams().temperature]))"
    assert result(python(code, tiny_model, timeout_s=10)) == [False, 1, 1.0]


ORDER = """
llm = make()
prompts = [f'prompt {i} ' + 'word ' * (i % 7) for i in range(50)]
params = [SamplingParams(max_tokens=1 + i % 5, temperature=0, ignore_eos=True) for i in range(50)]
outs = llm.generate(prompts, params, use_tqdm=False)
report = {'prompts': [o.prompt for o in outs] == prompts, 'lengths': [len(o.outputs[0].token_ids) for o in outs], 'texts': [o.outputs[0].text for o in outs]}
def refusal(*arguments):
    try:
        llm.generate(*arguments, use_tqdm=False)
    except Exception as error:
        return [isinstance(error, ValueError), str(error)]
report['wrong_length'] = refusal(prompts, params[:49])
report['too_long'] = refusal([*prompts[:31], 'word ' * 5000, *prompts[32:]], params)
report['empty_ids'] = refusal([*prompts[:7], {'prompt_token_ids': []}, *prompts[8:]], params)
report['bad_params'] = refusal(prompts[:3], [params[0], SamplingParams(stop_token_ids=[9999]), params[2]])
report['again'] = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)] == report['texts']
print(json.dumps(report))
"""


def test_offline_order_and_errors(tiny_model: Path, server: RealServer) -> None:
    report = result(python(ORDER, tiny_model))
    assert report["prompts"] and report["again"]
    assert report["lengths"] == [1 + i % 5 for i in range(50)]
    for name, index in (("wrong_length", "49"), ("too_long", "31"), ("empty_ids", "7"), ("bad_params", "1")):
        is_value_error, message = report[name]
        assert is_value_error and index in message, (name, message)
    for i in range(0, 50, 5):
        prompt = f"prompt {i} " + "word " * (i % 7)
        body = server.cmp(prompt=prompt, max_tokens=1 + i % 5, temperature=0, ignore_eos=True)
        assert body["choices"][0]["text"] == report["texts"][i]


PROCESSORS = """
import torch
llm = make()
good = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
def run(processor):
    bad = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logits_processors=[processor])
    outs = llm.generate(['a', 'b', 'c'], [good, bad, good], use_tqdm=False)
    return [o.outputs[0].finish_reason for o in outs] + [outs[1].error and outs[1].error.message, outs[0].outputs[0].token_ids]
def raising(error):
    def processor(generated, logits):
        raise error
    return processor
report = {'ValueError': run(raising(ValueError('boom')))}
report['shape'] = run(lambda generated, logits: logits[:5])
report['nan'] = run(lambda generated, logits: logits.fill_(float('nan')))
ends = []
for error in (KeyboardInterrupt(), SystemExit(3)):
    try:
        ends.append(run(raising(error)))
    except BaseException as raised:
        ends.append(type(raised).__name__)
report['ends'] = ends
report['alone'] = llm.generate(['a'], good, use_tqdm=False)[0].outputs[0].token_ids
print(json.dumps(report))
"""


def test_logits_processor_fails_only_its_own_request(tiny_model: Path) -> None:
    report = result(python(PROCESSORS, tiny_model))
    alone = report.pop("alone")  # the engine serves on after each of these
    assert report.pop("ends") == ["KeyboardInterrupt", "SystemExit"], "what ends a program reaches the caller"
    assert sorted(report) == ["ValueError", "nan", "shape"]
    for name, (first, bad, last, message, ids) in report.items():
        assert (first, bad, last, ids) == ("length", "error", "length", alone), name
        assert name == "nan" or message.startswith("logits_processors: "), name


FORKED = """
llm = make()
ask = lambda: llm.generate(['a'], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)[0].outputs[0].token_ids
before = ask()
child = os.fork()
if not child:
    sys.exit(7)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps([ended, ask() == before]))
"""


def test_forked_child_exits_as_any_process_does(tiny_model: Path) -> None:
    assert result(python(FORKED, tiny_model, timeout_s=60)) == [7, True]
