"""The child process behind `oarlock doctor`, on the host's own device."""

from __future__ import annotations

from oarlock.cli import doctor


def test_the_host_device_is_examined_in_a_process_of_its_own() -> None:
    report, problem = doctor.inspect("cpu", threads=1)
    assert report is not None, problem
    assert report["threads"] == 1
    assert report["capabilities"]["host_is_device"] is True
    assert {"rms_norm", "linear", "sample"} <= {op for op, _, _ in report["ops"]}
    assert "GiB" in report["memory"]
