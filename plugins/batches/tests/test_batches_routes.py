"""Files and batches over a scripted engine: what is kept, what is answered, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import oarlock_batches
import pytest
from oarlock_batches import routes
from oarlock_batches.lines import LineError, read_line
from oarlock_batches.multipart import parse_form
from toy_frontend import says
from toy_server import MODEL, LateClient, Toy, refused, strict, toy_server

pytestmark = pytest.mark.asyncio

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SIZES = {"batches_max_files": 8, "batches_max_mib": 1, "batches_max_lines": 100, "batches_max_batches": 3, "batches_concurrency": 3}


@contextlib.asynccontextmanager
async def toy(text: str = "hello", *, step_s: float = 0.0, max_waiting: int | None = None, **sizes: int) -> AsyncIterator[Toy]:
    options = SIZES | {f"batches_{name}": value for name, value in sizes.items()}
    async with toy_server(says(text), options=options, step_s=step_s, routes=(routes.add,), max_model_len=256) as here:
        if max_waiting is not None:
            here.state.max_prompts_inside = max_waiting
        yield here


def line(custom_id: Any, **fields: Any) -> dict[str, Any]:
    """A request for a completion; fields of its body."""
    return {"custom_id": custom_id, "method": "POST", "url": PLAIN, "body": {"model": MODEL, "prompt": "hi", **fields}}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def upload(here: Toy, data: bytes, name: str = "in.jsonl", purpose: str = "batch") -> dict[str, Any]:
    response = await here.http.post("/v1/files", files={"file": (name, data)}, data={"purpose": purpose})
    assert response.status_code == 200, response.text
    return response.json()


async def create(here: Toy, key: str, **fields: Any) -> httpx.Response:
    return await here.http.post("/v1/batches", json={"input_file_id": key, "endpoint": PLAIN, "completion_window": "24h", **fields})


async def finished(here: Toy, key: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while (batch := (await here.http.get(f"/v1/batches/{key}")).json())["status"] in routes.OPEN:
            await asyncio.sleep(0.005)
    return batch


async def run(here: Toy, data: bytes, **fields: Any) -> dict[str, Any]:
    """A batch from its file to its end."""
    response = await create(here, (await upload(here, data))["id"], **fields)
    assert response.status_code == 200, response.text
    return await finished(here, response.json()["id"])


async def lines_of(here: Toy, key: str | None) -> list[dict[str, Any]]:
    if key is None:
        return []
    return [strict(text) for text in (await here.http.get(f"/v1/files/{key}/content")).text.splitlines()]


# ---------------------------------------------------------------- files
async def test_a_file_comes_back_as_it_went() -> None:
    data = b"\r\n--x\r\n\x00\xff\r--\r\n\n\n" * 50
    async with toy() as here:
        file = await upload(here, data, "../../../name with \u00e9.jsonl")
        assert file["object"] == "file" and file["bytes"] == len(data) and file["purpose"] == "batch" and file["filename"].startswith("../")
        assert (await here.http.get(f"/v1/files/{file['id']}")).json() == file
        content = await here.http.get(f"/v1/files/{file['id']}/content")
        assert content.content == data and content.headers["content-type"] == "application/octet-stream"
        assert (await here.http.delete(f"/v1/files/{file['id']}")).json() == {"id": file["id"], "object": "file", "deleted": True}
        for path in ("", "/content"):
            refused(await here.http.get(f"/v1/files/{file['id']}{path}"), "file_id", 404)


async def test_files_are_listed_in_pages() -> None:
    async with toy() as here:
        ids = [(await upload(here, b"x"))["id"] for _ in range(5)]
        listed = (await here.http.get("/v1/files")).json()
        assert [file["id"] for file in listed["data"]] == ids[::-1] and not listed["has_more"] and listed["first_id"] == ids[-1]
        second = (await here.http.get(f"/v1/files?limit=2&order=asc&after={ids[0]}")).json()
        assert [file["id"] for file in second["data"]] == ids[1:3] and second["has_more"]
        assert (await here.http.get("/v1/files?purpose=other")).json()["data"] == []
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("limit=99999", "limit"), ("after=x", "after"), ("order=up", "order"), ("where=1", "where")):
            refused(await here.http.get(f"/v1/files?{query}"), param)


async def test_files_are_bounded_in_number_and_bytes() -> None:
    async with toy(max_files=2) as here:
        file = await upload(here, b"x" * 700_000)
        response = await here.http.post("/v1/files", files={"file": ("b", b"x" * 700_000)}, data={"purpose": "batch"})
        assert refused(response, "file")["code"] == "files_full" and "--batches-max-mib" in response.text
        await upload(here, b"x")
        assert "--batches-max-files" in (await here.http.post("/v1/files", files={"file": ("b", b"x")}, data={"purpose": "batch"})).text
        await here.http.delete(f"/v1/files/{file['id']}")
        await upload(here, b"x" * 700_000)


async def test_bad_forms_are_refused() -> None:
    async with toy() as here:
        post = here.http.post
        refused(await post("/v1/files", files={"file": ("a", b"x")}), "purpose")
        refused(await post("/v1/files", files={"other": ("a", b"x")}, data={"purpose": "batch"}), "other")
        refused(await post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "fine-tune"}), "purpose")
        refused(await post("/v1/files", files={"file": ("a" * 300, b"x")}, data={"purpose": "batch"}), "file")
        refused(await post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch", "expires_after[seconds]": "5"}), "expires_after[seconds]")
        refused(await post("/v1/files", json={"purpose": "batch"}), None)
        for body in (b"", b"--b", b"--b\r\n\r\n--b--", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--", b"--b\r\nX: \xff\r\n\r\nx\r\n--b--"):
            refused(await post("/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"}), None)
        many = b"--b\r\n" + b"Content-Disposition: form-data; name=x\r\n\r\ny\r\n--b\r\n" * 100
        refused(await post("/v1/files", content=many, headers={"Content-Type": "multipart/form-data; boundary=b"}), None)
        twice = b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n1\r\n" * 2 + b"--b--"
        refused(await post("/v1/files", content=twice, headers={"Content-Type": "multipart/form-data; boundary=b"}), None)
        refused(await post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data; boundary=" + "b" * 99}), None)


async def test_a_form_keeps_every_byte_of_a_part() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="n"\r\n\r\n\r\n-b\r\n--\r\n\r\n--b--\r\n'
    (part,) = parse_form("multipart/form-data; boundary=b", body).values()
    assert part.data == b"\r\n-b\r\n--\r\n" and part.filename == "n"


# ---------------------------------------------------------------- lines
@pytest.mark.parametrize(
    ("body", "words"),
    [('{"prompt": "\\ud800"}', "surrogate"), ('{"temperature": 1e999}', "1e999"), ('{"temperature": NaN}', "NaN"), (f'{{"stop": {"[" * 200 + "]" * 200}}}', "100 levels"), ('{"a": 1, "a": 2}', "twice")],
)
def test_a_line_that_could_not_be_sent_on_as_it_is_is_refused(body: str, words: str) -> None:
    with pytest.raises(LineError, match=words):
        read_line(f'{{"custom_id": "r", "method": "POST", "url": "{PLAIN}", "body": {body}}}'.encode())


async def test_a_line_that_is_no_text_fails_its_batch_and_is_named() -> None:
    async with toy() as here:
        data = jsonl(line("good")) + jsonl(line("bad")).replace(b'"hi"', b'"\\ud800"') + jsonl(line("x")).replace(b'"x"', b'"\\udc00"')
        batch = await run(here, data)
        assert batch["status"] == "failed" and [error["line"] for error in batch["errors"]["data"]] == [2, 3]


# ---------------------------------------------------------------- batches
async def test_every_line_is_answered_as_its_route_answers() -> None:
    async with toy() as here:
        requests = [line(f"r{n}", max_tokens=n + 1) for n in range(10)]
        batch = await run(here, jsonl(*requests), metadata={"a": "b"})
        assert (batch["object"], batch["status"], batch["endpoint"], batch["metadata"]) == ("batch", "completed", PLAIN, {"a": "b"})
        assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0} and batch["error_file_id"] is None and batch["errors"] is None
        answers = await lines_of(here, batch["output_file_id"])
        assert [answer["custom_id"] for answer in answers] == [f"r{n}" for n in range(10)], "in the order of the lines"
        for request, answer in zip(requests, answers, strict=True):
            own = (await here.http.post(PLAIN, json=request["body"])).json()
            got = answer["response"]
            assert got["status_code"] == 200 and answer["error"] is None
            assert got["body"]["choices"] == own["choices"] and got["body"]["usage"] == own["usage"]
        assert here.state.num_prompts == 0


async def test_what_a_route_refuses_is_in_the_error_file() -> None:
    async with toy() as here:
        batch = await run(here, jsonl(line("good"), line("bad", temperature=9), line("other", model="other"), line("fine")))
        assert batch["status"] == "completed" and batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
        assert [answer["custom_id"] for answer in await lines_of(here, batch["output_file_id"])] == ["good", "fine"]
        errors = {answer["custom_id"]: answer["response"] for answer in await lines_of(here, batch["error_file_id"])}
        assert errors["bad"]["status_code"] == 400 and errors["bad"]["body"]["error"]["param"] == "temperature"
        assert errors["other"]["status_code"] == 404 and errors["other"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("raw", "param", "word"),
    [
        (b"{", None, "JSON"), (b"[]", None, "object"), (b"\xff", None, "UTF-8"), (b'{"a":1,"a":2}', None, "twice"), (b'{"a":NaN}', None, "NaN"),
        (b"[" * 100_000, None, "nested"), (b'{"a":' + b"9" * 5000 + b"}", None, "number"), (jsonl(line(5)), "custom_id", "string"), (jsonl(line("x" * 600)), "custom_id", "512"),
        (jsonl({**line("x"), "method": "GET"}), "method", "POST"), (jsonl({**line("x"), "url": "/metrics"}), "url", "url"),
        (jsonl({**line("x"), "url": CHAT}), "url", "batch is for"), (jsonl({**line("x"), "body": []}), "body", "object"), (jsonl(line("x", stream=True)), "body.stream", "stream"),
        (jsonl({**line("x"), "extra": 1}), "extra", "Unknown"), (jsonl(line("first")), "custom_id", "twice"),
    ],
)  # fmt: skip
async def test_a_line_that_is_no_request_fails_the_batch_before_anything_is_answered(raw: bytes, param: str | None, word: str) -> None:
    async with toy() as here:
        batch = await run(here, jsonl(line("first")) + b"\n  \n" + raw.strip() + b"\n")
        (error,) = batch["errors"]["data"]
        assert batch["status"] == "failed" and (error["line"], error["param"]) == (4, param) and word in error["message"], error
        assert not here.engine.submitted and batch["output_file_id"] is None and batch["failed_at"]


async def test_batches_are_bounded() -> None:
    async with toy(max_lines=5) as here:
        batch = await run(here, jsonl(*(line(str(n)) for n in range(6))))
        assert batch["errors"]["data"][0]["code"] == "too_many_lines" and "--batches-max-lines" in batch["errors"]["data"][0]["message"]
        batch = await run(here, b"\n\n")
        assert batch["errors"]["data"][0]["code"] == "empty_file"
    async with toy() as here:
        batch = await run(here, b"x\n" * 300)
        assert len(batch["errors"]["data"]) == routes.MAX_ERRORS
    async with toy(text="h" * 200) as here:
        await upload(here, b"x" * 1_040_000)
        batch = await run(here, jsonl(*(line(str(n), max_tokens=200) for n in range(20))))
        assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "no_room"
        assert len(await lines_of(here, batch["output_file_id"])) == batch["request_counts"]["completed"] > 0, "what was answered is kept"
        assert here.state.num_prompts == 0


async def test_no_more_at_once_than_allowed_and_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "RETRY_S", 0.01)
    async with toy(step_s=0.001) as here:
        file = (await upload(here, jsonl(*(line(str(n)) for n in range(9)))))["id"]
        for response in [await create(here, file), await create(here, file)]:
            assert (await finished(here, response.json()["id"]))["request_counts"]["completed"] == 9
        assert here.engine.most_open == 3, "of both batches together"
    async with toy(step_s=0.001, max_waiting=1) as here:
        batch = await run(here, jsonl(*(line(str(n)) for n in range(9))))
        assert batch["request_counts"] == {"total": 9, "completed": 9, "failed": 0} and here.engine.most_open == 1


async def test_a_line_that_waited_too_long_in_the_queue_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "RETRY_S", 0.01)
    async with toy(concurrency=1) as here:
        here.engine.__class__ = LateClient
        batch = await run(here, jsonl(line("a"), line("b")))
        assert here.engine.late == 0 and batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_batch_is_cancelled_with_what_it_has() -> None:
    async with toy(text="hello " * 20, step_s=0.002) as here:
        key = (await create(here, (await upload(here, jsonl(*(line(str(n), max_tokens=30) for n in range(50)))))["id"])).json()["id"]
        path = f"/v1/batches/{key}"
        while (await here.http.get(path)).json()["request_counts"]["completed"] < 4:
            await asyncio.sleep(0.005)
        file = (await here.http.get(path)).json()["input_file_id"]
        assert refused(await here.http.delete(f"/v1/files/{file}"), "file_id")["code"] == "file_in_use"
        assert (await here.http.post(path + "/cancel")).json()["status"] == "cancelling"
        batch = await finished(here, key)
        assert batch["status"] == "cancelled" and batch["cancelled_at"] and 4 <= batch["request_counts"]["completed"] < 50
        assert len(await lines_of(here, batch["output_file_id"])) == batch["request_counts"]["completed"]
        refused(await here.http.post(path + "/cancel"), "batch_id")
        assert (await here.http.delete(f"/v1/files/{file}")).status_code == 200
        async with asyncio.timeout(5):
            while here.engine.open or here.state.num_prompts:
                await asyncio.sleep(0.01)


async def test_the_oldest_batch_that_has_ended_is_dropped_and_open_ones_are_not() -> None:
    async with toy(text="hello " * 20, step_s=0.01, max_files=20) as here:
        ids = [(await run(here, jsonl(line("x", max_tokens=1))))["id"] for _ in range(4)]
        refused(await here.http.get(f"/v1/batches/{ids[0]}"), "batch_id", 404)
        listed = (await here.http.get("/v1/batches?limit=2")).json()
        assert [batch["id"] for batch in listed["data"]] == [ids[3], ids[2]] and listed["has_more"]
        file = (await upload(here, jsonl(line("x", max_tokens=100))))["id"]
        opened = [(await create(here, file)).json()["id"] for _ in range(3)]
        response = await create(here, file)
        assert refused(response, None, 429)["code"] == "queue_full" and "--batches-max-batches" in response.text
        for key in opened:
            await here.http.post(f"/v1/batches/{key}/cancel")
            assert (await finished(here, key))["status"] == "cancelled"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/metrics"}, "endpoint"), ({"endpoint": "/v1/embeddings"}, "endpoint"), ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"), ({"input_file_id": 5}, "input_file_id"), ({"metadata": {"a": 1}}, "metadata"), ({"metadata": []}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"), ({"priority": 5}, "priority"), ({"endpoint": None}, "endpoint"),
    ],
)  # fmt: skip
async def test_bad_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    async with toy() as here:
        refused(await create(here, (await upload(here, jsonl(line("x"))))["id"], **fields), param)
        assert (await here.http.get("/v1/batches")).json()["data"] == []


async def test_answers_count_as_files_before_the_next_batch() -> None:
    async with toy(max_files=2) as here:
        file = (await upload(here, jsonl(line("x"))))["id"]
        batch = await finished(here, (await create(here, file)).json()["id"])
        assert refused(await create(here, file), "input_file_id")["code"] == "files_full"
        await here.http.delete(f"/v1/files/{batch['output_file_id']}")
        assert (await create(here, file)).status_code == 200


async def test_an_output_is_no_input() -> None:
    async with toy() as here:
        batch = await run(here, jsonl(line("x")))
        refused(await create(here, batch["output_file_id"]), "input_file_id")


async def test_the_end_of_the_server_fails_the_lines_that_are_open() -> None:
    async with toy(text="hello " * 20, step_s=0.01, concurrency=2) as here:
        key = (await create(here, (await upload(here, jsonl(line("a", max_tokens=100), line("b", max_tokens=100))))["id"])).json()["id"]
        while len(here.engine.open) < 2:
            await asyncio.sleep(0.01)
        here.shut_down()
        batch = await finished(here, key)
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        assert {answer["response"]["body"]["error"]["code"] for answer in await lines_of(here, batch["error_file_id"])} == {"shutting_down"}


async def test_options_beyond_their_bounds_are_said_before_the_model_is_read() -> None:
    def said(**options: int) -> list[str]:
        return [problem.text for problem in oarlock_batches.check_model(None, SimpleNamespace(device=SimpleNamespace(options=options)), None)]

    assert said() == said(batches_max_mib=1) == []
    assert said(batches_max_mib=0, batches_concurrency=-1) == [f"--batches-{name} is {value}, and it must be at least 1" for name, value in (("max-mib", 0), ("concurrency", -1))]
