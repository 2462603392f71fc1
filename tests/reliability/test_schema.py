"""/openapi.json describes the routes, and what schemathesis makes of it gets no 5xx."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
from test_security import whole_server

SCHEMATHESIS = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
FLAGS = ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "1", "--generation-database", "none", "--no-color", "--request-timeout", "30"]


@pytest.mark.asyncio
async def test_every_part_of_a_path_is_a_parameter_and_every_model_is_named() -> None:
    async with whole_server() as toy:
        schema = (await toy.http.get("/openapi.json")).json()
    names, ids = 0, []
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            ids.append(operation["operationId"])
            given = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path" and one["required"]}
            assert given == set(re.findall(r"{(\w+)}", path)), path
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if "model" in body.get("properties", {}):
                assert body["properties"]["model"] == {"type": "string", "enum": ["toy-model"]}
                names += 1
    assert names >= 7 and len(set(ids)) == len(ids)


def test_schemathesis_gets_no_5xx(tmp_path: Path) -> None:
    with fuzz.fuzzed_server("null", tmp_path) as server:
        before = server.alive()
        done = subprocess.run([*SCHEMATHESIS, f"{server.base_url}/openapi.json", *FLAGS], capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        counts = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert counts is not None and counts[1] == counts[2] and int(counts[1]) > 1000, done.stdout[-1000:]
        assert server.alive() == before and "Traceback" not in server.output()
        server.kv_idle()
