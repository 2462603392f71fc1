"""`oarlock conformance --perf`: what is measured, shares of the run's own peaks, comparison with an older run."""

from __future__ import annotations

import json

import pytest
from oarlock.cli import conformance as command
from oarlock.conformance import perf
from oarlock.conformance.perf_report import Figure, PerfReport
from oarlock.errors import ConfigError


def test_figures_are_written_and_compared_with_an_older_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(perf, "MEASURE_S", 0.002)
    monkeypatch.setattr(perf, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(perf, "SIZES", {**perf.SIZES, "hidden": 64, "vocab": 500})
    monkeypatch.setattr(perf, "_matmul_rate", lambda subject, dtype: 1e9)
    file = tmp_path / "old.json"
    chosen = ["--device", "sim-static", "--perf", "--ops", "rms_norm,index_update,paged_attention", "-k", "float32.*(=1,|rows=32)"]
    assert command.main([*chosen, "--format", "json", "--out", str(file)]) == 0
    data = json.loads(file.read_text())
    ids = [f["id"] for f in data["figures"]]
    assert "rms_norm[float32,tokens=1,hidden=64]" in ids and "index_update[float32,rows=32,width=128]" in ids
    assert "paged_attention[float32,rows=1,new=1,context=1024]" in ids
    assert all(f["seconds"] > 0 and f["served"] == "reference" for f in data["figures"])
    data["figures"][0]["seconds"] = 1000.0
    file.write_text(json.dumps(data))
    capsys.readouterr()
    assert command.main([*chosen, "--baseline", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(x for x in lines if x.startswith(ids[0])).split()[-3:-1] == ["1000000000.0", "0.00"]


def test_steps_launches_and_start_up_are_measured(monkeypatch):
    monkeypatch.setattr(perf, "MEASURE_S", 0.002)
    monkeypatch.setattr(perf, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(perf, "_matmul_rate", lambda subject, dtype: 1e9)
    monkeypatch.setattr(perf, "MODEL", {**perf.MODEL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "vocab_size": 131})
    from oarlock.plugins import select_device

    found = [f.id for f in perf.run(select_device("cpu"), (), r"^(start|step|launch|copy)\[").figures]
    kinds = {text.partition("[")[0] for text in found}
    assert kinds == {"start", "step", "launch", "copy"} and sum("decode" in text for text in found) == 3


def test_a_share_is_the_larger_of_arithmetic_and_bandwidth():
    report = PerfReport("d", "x", "2", peaks={"float32": 100.0}, bandwidth=10.0)
    assert report.share(Figure("a", 2.0, flops=100, bytes=1, dtype="float32")) == pytest.approx(0.5)
    assert report.share(Figure("a", 2.0, flops=1, bytes=18, dtype="float32")) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--timeout", "0"], "seconds above 0"),
        (["--perf", "--format", "junit"], "table or json"),
        (["--perf", "--level", "2"], "--level would have no effect"),
        (["--baseline", "x.json"], "give --perf with it"),
        (["--perf", "--baseline", "no-such-file.json"], "no-such-file"),
    ],
)
def test_what_would_have_no_effect_is_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        command.main(["--device", "sim-static", *more])
