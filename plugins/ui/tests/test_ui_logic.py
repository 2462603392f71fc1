"""The page's functions that need no document, in a JavaScript engine without one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from oarlock_ui.routes import PAGE

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no JavaScript engine is here: node runs the page's functions")
LOGIC = re.search(r'<script id="logic">(.*?)</script>', PAGE.read_text(), re.DOTALL)
METRICS = """# HELP a_total Words {x="1"} 2
# TYPE a_total counter
a_total{model_name="odd \\"na\\\\me\\" {x}, y=\\n"} 3.0
a_total{model_name="b"} 1e+03
plain 7
h_bucket{le="0.1",model_name="b"} 2.0
h_bucket{le="1.0",model_name="b"} 6.0
h_bucket{le="+Inf",model_name="b"} 8.0
"""


def run(expression: str, **given: Any) -> Any:
    """The JSON value of an expression; `given` are its variables."""
    assert LOGIC is not None and NODE is not None
    names = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())
    script = f"{LOGIC[1]}\n{names}console.log(JSON.stringify(({expression}) ?? null));"
    done = subprocess.run([NODE, "-e", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_page_of_metrics_is_read() -> None:
    samples = run("readMetrics(text)", text=METRICS)
    assert samples[0] == {"name": "a_total", "labels": {"model_name": 'odd "na\\me" {x}, y=\n'}, "value": 3}
    assert [sample["name"] for sample in samples] == ["a_total", "a_total", "plain", "h_bucket", "h_bucket", "h_bucket"]
    assert run("[total(readMetrics(text), 'a_total'), total(readMetrics(text), 'plain'), total([], 'x')]", text=METRICS) == [1003, 7, None]
    assert run("number(readMetrics(text)[5].labels.le) === Infinity && number('-Inf') === -Infinity", text=METRICS) is True


def test_quantiles_are_linear_in_their_bucket() -> None:
    shares = {0.0: 0.0, 0.125: 0.05, 0.25: 0.1, 0.5: 0.1 + 0.9 * 2 / 4, 0.75: 1.0, 0.9: 1.0, 1.0: 1.0}
    got = run("shares.map(share => quantile(buckets(readMetrics(text), 'h'), share))", text=METRICS, shares=list(shares))
    assert got == pytest.approx(list(shares.values()))
    assert run("quantile([], 0.5)") is None and run("quantile(buckets(readMetrics(text), 'h', readMetrics(text)), 0.5)", text=METRICS) is None


def test_rates() -> None:
    before, now = [{"name": "x", "labels": {}, "value": 10}], [{"name": "x", "labels": {}, "value": 30}]
    assert run("[rate(n, b, 'x', 4), rate(b, n, 'x', 4), rate(n, b, 'y', 4), rate(n, b, 'x', 0)]", n=now, b=before) == [5, None, None, None]


def test_events_are_the_same_however_they_are_cut() -> None:
    text = 'data: {"a": 1}\r\n\r\n: comment\ndata: two\ndata:lines\n\nevent: x\ndata: [DONE]\n\ndata: unfinished'
    whole = ['{"a": 1}', "two\nlines", "[DONE]"]
    script = "(() => { const r = new EventReader(); return pieces.flatMap(p => r.feed(p)); })()"
    for length in (1, 2, 3, 7, 1000):
        assert run(script, pieces=[text[i : i + length] for i in range(0, len(text), length)]) == whole


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", []),
        ("words\nand more\n", []),
        ("So:\n```python\nx = 1\n```\nDone.", ["```python\nx = 1\n```\n"]),
        ("```\nnot ended", ["```\nnot ended"]),
        ("```a\n1\n```\n```b\n2\n```", ["```a\n1\n```\n", "```b\n2\n```"]),
        ("inline ``` is no fence\n   ```\nx\n   ```\n", ["   ```\nx\n   ```\n"]),
    ],
)
def test_a_text_is_cut_at_its_fences_and_nothing_is_lost(text: str, code: list[str]) -> None:
    pieces = run("cut(text)", text=text)
    assert "".join(piece for _, piece in pieces) == text and [piece for is_code, piece in pieces if is_code] == code


def look(steps: float, tokens: float) -> str:
    return f"oarlock_steps_total {steps}\noarlock_engine_tokens_total {tokens}\n"


def test_what_is_older_than_the_window_is_forgotten_and_so_is_what_was_before_a_restart() -> None:
    script = "(() => { const l = new Looks(10000); for (const [ms, text] of seen) l.add(readMetrics(text), ms); return [l.first().ms, l.rates('oarlock_engine_tokens_total')]; })()"
    seen: list[Any] = [(1000 * at, look(at, 10 * at)) for at in range(0, 30, 5)]
    assert run(script, seen=seen[:1]) == [0, []]
    assert run(script, seen=seen) == [15000, [[20000, 10], [25000, 10]]]
    assert run(script, seen=[*seen, (30000, look(1, 3)), (32000, look(2, 13))]) == [30000, [[32000, 5]]]


def test_sizes_and_seconds_are_readable() -> None:
    assert run("[0, 1023, 2048, 1.5 * 2 ** 20, 200 * 2 ** 20, 3 * 2 ** 30].map(size)") == ["0 B", "1023 B", "2 KiB", "1.50 MiB", "200 MiB", "3.00 GiB"]
    assert run("[undefined, 0.0042, 0.25, 3].map(seconds)") == ["–", "4.2 ms", "250 ms", "3.00 s"]
