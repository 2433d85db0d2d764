"""OpenAI's files and batches: the client's own calls, access, refusals, and who goes first."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from errno import ENOSPC
from itertools import count
from pathlib import Path
from shutil import rmtree
from threading import get_ident
from typing import Any

import openai
import pytest

from slipstream.apps.server import engine_thread
from slipstream.apps.server.batch_store import MAX_UPLOADS, BatchStore, LinesUnderWay
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Ended, Event, LiveRequest
from slipstream.jobs import job_output
from tests.support.job_cases import by_id, chat, write
from tests.support.job_cases import toy as job_toy
from tests.support.markers import subcases
from tests.support.running_server import PATIENCE, Gate, RunningServer, running_server, toy

LINES = [
    chat(f"c{at}", text, **({"temperature": 0.9} if at % 2 else {"temperature": 0}))
    for at, text in enumerate(("The heron", "A sparrow", "The river does", "So the heron", "It was", "Then"))
]
KEYS = "ann:key-of-ann\nbob:key-of-bob\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(batch_folder=str(tmp_path_factory.mktemp("batches"))) as running:
        yield running


def jsonl(lines: list[Any]) -> bytes:
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()


def begun(client: openai.OpenAI, lines: list[Any], endpoint: Any = "/v1/chat/completions", **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(jsonl(lines))), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(server: RunningServer, client: openai.OpenAI, batch: Any) -> Any:
    server.wait_until(lambda: not server.service.background.store.batches[batch.id].is_unfinished)
    return client.batches.retrieve(batch.id)


def test_a_batch_gives_the_same_lines_as_the_batch_command(server: RunningServer, tmp_path: Path) -> None:
    with server.openai() as client:
        batch = ended(server, client, begun(client, LINES, metadata={"run": "1"}))
        assert batch.status == "completed" and batch.metadata == {"run": "1"} and batch.error_file_id is None
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        (tmp_path / "served.jsonl").write_bytes(client.files.content(batch.output_file_id).content)
        file = client.files.retrieve(batch.output_file_id)
        assert file.purpose == "batch_output" and file.bytes == (tmp_path / "served.jsonl").stat().st_size
        assert batch.id in [listed.id for listed in client.batches.list(limit=1)]
    job_toy(max_batch_size=8, drafter="none").batch(LINES, tmp_path / "job.jsonl")
    assert by_id(tmp_path / "served.jsonl") == by_id(tmp_path / "job.jsonl")


def test_lines_that_cannot_be_answered_are_in_the_error_file(server: RunningServer) -> None:
    lines = [
        LINES[0],
        chat("m", "x", model="gpt-9"),
        chat("t", "x", temperature=-1),
        chat("l", "x", max_tokens=1 << 22),
    ]
    with server.openai() as client:
        batch = ended(server, client, begun(client, lines))
        assert batch.status == "completed" and (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
        errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    failures = {
        error["custom_id"]: (error["line"], error["response"]["status_code"], error["error"]["code"])
        for error in errors
    }
    assert failures["m"] == (2, 404, "model_not_found") and failures["t"] == (3, 400, "invalid_request_error")
    assert failures["l"] == (4, 400, "context_length_exceeded")


def test_metrics_count_the_prompts_of_a_batch_but_not_its_latencies(server: RunningServer) -> None:
    def counted() -> list[float]:
        page = server.http.get("/metrics").text
        names = "prompt_tokens_total", "prefix_cache_queries_total", "time_to_first_token_seconds_count"
        lines = [next(line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")) for name in names]
        return [float(line.rpartition(" ")[2]) for line in lines]

    before = counted()
    with server.openai() as client:
        ended(server, client, begun(client, [chat("p", "12345"), chat("q", "123")]))
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [8, 8, 0]


def test_a_line_with_a_cache_salt_has_its_own_cache(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, shown = set[str](), server.service.engine_status.event

    def note(live: LiveRequest, event: Event) -> None:
        groups.add(live.jobs[event.choice].row.group)
        shown(live, event)

    monkeypatch.setattr(server.service.engine_status, "event", note)
    with server.openai() as client:
        ended(server, client, begun(client, [LINES[0], chat("s", "x", cache_salt="salt")]))
    assert groups == {"", "\nsalt"}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([LINES[0], "{"], "not JSON: Expecting property name"),
        ([LINES[0], LINES[0]], "custom_id 'c0' is that of line 1; allowed: one for each line"),
        ([LINES[0], LINES[1] | {"url": "/v1/completions"}], "url='/v1/completions'; allowed: '/v1/chat/completions'"),
        (
            [LINES[0], {name: value for name, value in LINES[1].items() if name != "custom_id"}],
            "custom_id is missing; allowed: one for",
        ),
        ([LINES[0], {"id": "a", "prompt": "x"}], "url=None; allowed: '/v1/chat/completions', and a custom_id"),
    ],
)
def test_a_file_that_is_not_a_batch_fails_before_any_line_is_run(
    server: RunningServer, lines: list[Any], why: str
) -> None:
    with server.openai() as client:
        batch = ended(server, client, begun(client, lines))
    assert batch.status == "failed" and batch.output_file_id is None and batch.request_counts.completed == 0
    assert batch.errors.data[0].line == 2 and batch.errors.data[0].message.startswith(why)


def test_files_are_listed_in_the_requested_order(server: RunningServer) -> None:
    with server.openai() as client:
        for at in range(3):
            client.files.create(file=(f"{at}.jsonl", jsonl(LINES)), purpose="batch")
        newest, oldest = ([file.id for file in client.files.list(order=order)] for order in ("desc", "asc"))
        assert len(newest) > 2 and oldest == newest[::-1] == [file.id for file in client.files.list()][::-1]
        assert [file.id for file in client.files.list(order="asc", limit=1)] == oldest  # over several pages


def test_files_are_listed_read_and_deleted(server: RunningServer) -> None:
    data = jsonl(LINES) + "ü\r\n--x--\n".encode()
    with server.openai() as client:
        client.files.create(file=("older.jsonl", data), purpose="batch")
        file = client.files.create(file=("../../x\n.jsonl", data), purpose="batch")
        assert client.files.content(file.id).content == data and file.bytes == len(data)
        assert client.files.list().data[0].id == file.id and client.files.list(limit=1).has_more
        assert client.files.list(after=file.id).data[0].id != file.id
        assert client.files.delete(file.id).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)


@subcases(
    "method, path, body, status, why",
    [
        ("POST", "/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions"}, 404, "no file 'file-x'"),
        (
            "POST",
            "/v1/batches",
            {"input_file_id": "x", "endpoint": "/v1/embeddings"},
            400,
            'endpoint="/v1/embeddings"; allowed: ',
        ),
        (
            "POST",
            "/v1/batches",
            {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "1h"},
            400,
            "c",
        ),
        ("GET", "/v1/batches/batch_x", None, 404, "there is no batch 'batch_x'"),
        ("POST", "/v1/batches/batch_x/cancel", None, 404, "there is no batch"),
        ("GET", "/v1/batches?limit=0", None, 400, 'query.limit="0"; allowed: a whole number from 1 to 10000'),
        ("GET", "/v1/batches?limit=x", None, 400, 'query.limit="x"; allowed: a whole number from 1 to 10000'),
        ("GET", "/v1/files?order=bogus", None, 400, "query.order=\"bogus\"; allowed: 'asc' or 'desc'"),
        (
            "POST",
            "/v1/batches",
            {"input_file_id": "x", "endpoint": "/v1/completions", "output_expires_after": {"seconds": 9}},
            400,
            "output_expires_after: files do not expire here",
        ),
        ("GET", "/v1/batches?after=x", None, 400, "after='x'; allowed: an id of this list"),
        ("GET", "/v1/files/..%2f..%2fx/content", None, 404, ""),
        ("POST", "/v1/files", {"file": "x"}, 400, "content-type 'application/json'; allowed: multipart"),
    ],
)
def test_invalid_calls_are_refused(
    server: RunningServer, method: str, path: str, body: Any, status: int, why: str
) -> None:
    answer = server.http.request(method, path, json=body)
    assert answer.status_code == status and why in answer.json()["error"]["message"], answer.text


@subcases(
    "form, why",
    [
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, "purpose='fine-tune'; allowed: 'batch'"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[seconds]": "9"}}, "files do not expire"),
        ({"files": {"file": b"x"}}, "purpose=None; allowed: 'batch'"),
        ({"files": {"file": b""}, "data": {"purpose": "batch"}}, "the file is empty"),
        ({"files": {"purpose": (None, "batch")}}, "the form has no file"),
        ({"files": [("file", b"x"), ("file", b"y")]}, "the form has two files; allowed: one"),
        ({"files": {"file": b"x"}, "data": {"purpose": "b" * 2000}}, "'purpose' is too long"),
        ({"content": b"--a\r\n\r\n", "headers": {"content-type": "multipart/form-data; boundary=a"}}, "a part of th"),
        ({"files": {"file": b"x", "a": (None, "1")}, "data": {"a": "1"}}, "the form has 'a' twice; allowed: each name"),
        ({"files": {"file": b"x", **{str(at): (None, "1") for at in range(20)}}}, "the form has more than 16 parts"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "'multipart/form-data'; allowed"),
        ({"content": b"x" * 9000, "headers": {"content-type": "multipart/form-data; boundary=a"}}, "ends before"),
    ],
)  # fmt: skip
def test_invalid_forms_are_refused_and_leave_no_file(server: RunningServer, form: dict[str, Any], why: str) -> None:
    answer = server.http.post("/v1/files", **form)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    assert not list((server.service.background.store.folder / "uploads").iterdir())


@subcases("size", [1, 2, 3, 7, 64, 100_000])
def test_a_form_may_arrive_in_pieces_of_any_size(size: int, tmp_path: Path) -> None:
    import asyncio

    from slipstream.apps.server.batch_routes import UploadForm

    content = b"one\r\n--b\r\n--boundar\r\n\r\n--\n" * 3
    body = b"preamble\r\n--boundary\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n--boundary\r\n"
    body += b'content-disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    body += content + b"\r\n--boundary--\r\nepilogue"

    async def pieces() -> Any:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    form = UploadForm("multipart/form-data; boundary=boundary", tmp_path / "file")
    asyncio.run(form.read(pieces()))
    assert form.fields == {"purpose": "batch"} and form.filename == "in.jsonl" and form.size == len(content)
    assert (tmp_path / "file").read_bytes() == content


def test_a_large_file_is_refused_by_its_own_limit(tmp_path: Path) -> None:
    with running_server(batch_folder=str(tmp_path), max_file_bytes=20_000, max_body_bytes=5_000) as server:
        form = {"data": {"purpose": "batch"}}
        assert server.http.post("/v1/files", files={"file": b"x" * 12_000}, **form).status_code == 200  # type: ignore[arg-type]
        assert server.http.post("/v1/files", files={"file": b"x" * 21_000}, **form).status_code == 413  # type: ignore[arg-type]
        assert server.http.post("/v1/completions", content=b"x" * 6_000).status_code == 413


def test_without_a_folder_the_endpoints_are_closed() -> None:
    with running_server() as server:
        answer = server.http.get("/v1/files")
        assert answer.status_code == 404 and "start it with --batch-folder FOLDER" in answer.text


def test_a_key_sees_its_own_files_and_batches_only(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    with running_server(batch_folder=str(tmp_path / "b"), api_key_file=str(tmp_path / "keys")) as server:
        with server.openai("key-of-ann") as ann, server.openai("key-of-bob") as bob:
            batch = begun(ann, LINES[:1])
            for call in (lambda: bob.batches.retrieve(batch.id), lambda: bob.files.content(batch.input_file_id)):
                with pytest.raises(openai.NotFoundError):
                    call()
            assert bob.files.list().data == [] and bob.batches.list().data == []
            assert len(ann.files.list().data) >= 1
        assert server.http.get("/v1/files").status_code == 401


def test_interactive_requests_go_before_batches(tmp_path: Path) -> None:
    gate = Gate()
    with running_server(lambda: gate.load(max_batch_size=1), batch_folder=str(tmp_path)) as server:
        order, shown = list[bool](), server.service.engine_status.event

        def note(live: LiveRequest, event: Event) -> None:
            order.extend([live.background] * isinstance(event, Ended))
            shown(live, event)

        server.service.engine_status.event = note
        with server.openai() as client:
            begun(client, LINES)
            assert gate.reached.wait(PATIENCE)  # a row of the batch occupies the only place
            from tests.support.running_server import in_thread

            with in_thread(lambda: server.text("A heron", max_tokens=4)):
                server.wait_until(lambda: len(server.service.live) == 1 and not server.service._preparing)
                gate.opened.set()
        server.wait_until(lambda: order.count(True) == len(LINES))
        assert order.index(False) <= 1  # only the row that already ran may end before it


def test_the_longest_lines_of_a_batch_begin_first(tmp_path: Path) -> None:
    texts = ["The heron", "A sparrow " * 9, "It", "The river does " * 4]
    with running_server(lambda: toy(max_batch_size=1), batch_folder=str(tmp_path)) as server, server.openai() as client:
        lines = [chat(f"c{at}", text, max_tokens=4) for at, text in enumerate(texts)]
        output = client.files.content(ended(server, client, begun(client, lines)).output_file_id)
    assert [json.loads(line)["custom_id"] for line in output.text.splitlines()] == ["c1", "c3", "c0", "c2"]


def test_a_batch_leaves_one_place_to_interactive_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", PATIENCE)
    gate = Gate()
    with running_server(lambda: gate.load(max_batch_size=4), batch_folder=str(tmp_path)) as server:
        running, ended, shown = list[int](), list[str](), server.service.engine_status.event

        def note(live: LiveRequest, event: Event) -> None:
            shown(live, event)
            running.append(server.service.engine_status.num_running)
            ended.extend(["line"] * isinstance(event, Ended))

        server.service.engine_status.event = note
        with server.openai() as client:
            begun(client, LINES)
            server.wait_until(lambda: len(server.service._submitted) == 4)  # more than may run at once
            gate.opened.set()
        server.wait_until(lambda: len(ended) == len(LINES))
        assert max(running) == 3


def test_a_cancelled_batch_ends_and_cannot_be_cancelled_again(tmp_path: Path) -> None:
    gate = Gate()
    with running_server(lambda: gate.load(), batch_folder=str(tmp_path)) as server, server.openai() as client:
        batch = begun(client, LINES)
        assert gate.reached.wait(PATIENCE)
        assert client.batches.cancel(batch.id).status == "cancelling"
        gate.opened.set()
        batch = ended(server, client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at and batch.request_counts.completed == 0
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        assert server.text("A heron", max_tokens=4)


def test_a_batch_that_takes_too_long_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.apps.server.batch_store.WINDOW_S", 0)
    with running_server(batch_folder=str(tmp_path)) as server, server.openai() as client:
        batch = ended(server, client, begun(client, LINES))
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None


def test_a_server_that_shuts_down_leaves_its_batches_to_the_next(tmp_path: Path) -> None:
    gate = Gate()
    with running_server(lambda: gate.load(), batch_folder=str(tmp_path / "b")) as server, server.openai() as client:
        batch = begun(client, LINES)
        assert gate.reached.wait(PATIENCE)
        server.call(server.server.begin_shutdown)
        gate.opened.set()
    with running_server(batch_folder=str(tmp_path / "b")) as server, server.openai() as client:
        again = ended(server, client, batch)
        assert again.status == "completed" and again.request_counts.completed == len(LINES)
        output = write(tmp_path / "o.jsonl", client.files.content(again.output_file_id).text.splitlines())
        assert set(by_id(output)) == {line["custom_id"] for line in LINES}


def test_a_batch_begun_by_another_model_fails_when_it_is_resumed(tmp_path: Path) -> None:
    from slipstream import SpeculativeDecoder
    from slipstream.jobs.job_output import JobOutput

    gate = Gate()
    with running_server(lambda: gate.load(), batch_folder=str(tmp_path)) as server, server.openai() as client:
        batch = begun(client, LINES)
        assert gate.reached.wait(PATIENCE)
        server.call(server.server.begin_shutdown)
        gate.opened.set()
    (record,) = (tmp_path / "batches").glob("*.json")
    with JobOutput(tmp_path / "files" / f"{json.loads(record.read_text())['output']}.jsonl") as output:
        line = {"id": "batch_req_x", "custom_id": "c0", "response": {"body": {"system_fingerprint": "slip-0"}}}
        output.append([line] if "c0" not in output.answered else [])
    with (
        running_server(lambda: SpeculativeDecoder("toy:2"), batch_folder=str(tmp_path)) as server,
        server.openai() as client,
    ):
        failed = ended(server, client, batch)
        assert failed.status == "failed" and "begun by a model with fingerprint slip-" in failed.errors.data[0].message
        assert server.text("A heron", max_tokens=4)


@pytest.mark.parametrize("where", ["run", "_prepared"])
def test_an_unexpected_error_fails_the_batch_and_stays_in_the_log(
    where: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*arguments: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(f"slipstream.apps.server.batch_runner.BatchLines.{where}", fails)
    with server.openai() as client:
        failed = ended(server, client, begun(client, LINES[:2]))
    assert failed.status == "failed" and failed.failed_at
    assert failed.errors.data[0].message == "internal error; the server's log has the details"
    assert server.text("A heron", max_tokens=4)


def test_files_are_registered_on_the_thread_that_lists_them(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    register = BatchStore.register

    def register_noting_thread(*arguments: Any) -> Any:
        threads.append(get_ident())
        return register(*arguments)

    monkeypatch.setattr(BatchStore, "register", register_noting_thread)
    with server.openai() as client:
        file = client.files.create(file=("in.jsonl", jsonl(LINES)), purpose="batch")
        assert client.files.list().data[0].id == file.id
    assert threads == [server.call(get_ident)]


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    from slipstream import SlipstreamError

    with running_server(batch_folder=str(tmp_path)), pytest.raises(SlipstreamError, match="is used by another server"):
        BatchStore(tmp_path, 1 << 30)
    BatchStore(tmp_path, 1 << 30).close()
    assert toy().target.name == "toy"


def test_an_unusable_batch_folder_is_refused_by_name(tmp_path: Path) -> None:
    from slipstream import SlipstreamError, UsageError
    from slipstream.apps.server.launch import serve
    from slipstream.apps.server.server_settings import ServerSettings

    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"batch_folder='.*file' cannot be used: "):
        serve(ServerSettings(port=0, batch_folder=str(tmp_path / "file")), toy, lambda server: None)
    (tmp_path / "interrupted-lines").write_text("5\n")
    with pytest.raises(SlipstreamError, match=r"interrupted-lines' is not what a server has written: "):
        serve(ServerSettings(port=0, batch_folder=str(tmp_path)), toy, lambda server: None)


@pytest.mark.parametrize(("owner", "name"), [(job_output, "append"), (LinesUnderWay, "_note")])
def test_a_full_disk_delays_the_batch_but_no_other_request(
    owner: Any, name: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(owner, name), count()

    def full(*arguments: Any) -> Any:
        if 2 <= next(calls) < 6:
            raise OSError(ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(owner, name, full)
    with monkeypatch.context() as short:
        short.setattr("slipstream.apps.server.batch_runner.FULL_DISK_SECONDS", 0.001)
        with server.openai() as client:
            batch = begun(client, LINES)
            assert server.text("A heron", max_tokens=4)
            completed = ended(server, client, batch)
            answers = list(map(json.loads, client.files.content(completed.output_file_id).text.splitlines()))
    assert next(calls) > 6 and completed.status == "completed"
    assert sorted(answer["custom_id"] for answer in answers) == [line["custom_id"] for line in LINES]


def test_an_unwritable_batch_folder_is_reported_and_keeps_its_files(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(ENOSPC, "No space left on device")

    with server.openai() as client:
        file = client.files.create(file=("in.jsonl", io.BytesIO(jsonl(LINES))), purpose="batch")
        files = server.service.background.store.folder / "files"
        kept = sorted(files.glob("*.jsonl"))
        monkeypatch.setattr("slipstream.apps.server.batch_store._write", full)
        for call in (lambda: client.files.create(file=("x", b"{}"), purpose="batch"), lambda: _batch(client, file)):
            with pytest.raises(openai.InternalServerError, match="cannot be used: no space left on device") as refusal:
                call()
            assert refusal.value.status_code == 507
        assert sorted(files.glob("*.jsonl")) == kept
        monkeypatch.undo()
        assert ended(server, client, _batch(client, file)).status == "completed"
        server.service.background.store.content(file.id).unlink()
        with pytest.raises(openai.NotFoundError, match="no longer in the batch folder"):
            client.files.content(file.id)
        assert client.files.delete(file.id).deleted


@pytest.mark.parametrize("fault", ["input", "output", "foreign", "locked"])
def test_paths_of_the_server_are_in_its_log_but_in_no_answer(
    fault: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = server.service.background.store
    begin = BatchStore.add_batch

    def damaged(*arguments: Any) -> Any:
        record = begin(*arguments)
        output = store.content(record.output)
        if fault == "input":
            store.content(record.input_file_id).unlink()
        elif fault == "output":
            output.mkdir()
        elif fault == "foreign":
            output.write_text("a letter\n")
        else:
            output.with_name(f".{output.name}.lock").mkdir()
        return record

    monkeypatch.setattr(BatchStore, "add_batch", damaged)
    with server.openai() as client:
        failed = ended(server, client, begun(client, LINES[:2]))
    message = failed.errors.data[0].message
    why = {"input": "no such file or directory", "output": "is a directory", "locked": "is a directory"}
    expected = f"the batch folder cannot be used: {why[fault]}" if fault in why else "internal error; the server's log"
    assert failed.status == "failed" and message.startswith(expected)
    assert str(store.folder) not in failed.model_dump_json() and ".jsonl" not in message
    assert f"batch {failed.id} failed: '{store.folder}" in caplog.text


def _batch(client: openai.OpenAI, file: Any) -> Any:
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def test_a_server_shuts_down_even_if_its_batch_folder_is_gone(tmp_path: Path) -> None:
    with running_server(batch_folder=str(tmp_path / "b")) as server:
        rmtree(tmp_path / "b")
        server.call(server.server.begin_shutdown)
        server.wait_until(lambda: server.server.should_exit)


def uploaded(server: RunningServer, disposition: str) -> Any:
    body = (
        f'--B\r\ncontent-disposition: form-data; name="file"; {disposition}\r\n\r\n{{}}\n\r\n'
        '--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B--\r\n'
    ).encode()
    return server.http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=B"})


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ("filename*=unicode_escape''%5Cud800.jsonl", None),
        ("filename*=idna''" + "a" * 300, None),
        ("filename*=zlib''abc", None),
        ("filename*=punycode''%ff", None),
        ("filename*=utf-7''%2B2AA-", None),
        ("filename*=UTF-8''%ed%a0%80.jsonl", "\ufffd\ufffd\ufffd.jsonl"),
        ("filename*=utf-8'en'%e2%82%ac.jsonl", "€.jsonl"),
        ("filename*=iso-8859-1''%e9.jsonl", "é.jsonl"),
        ("filename*0=one; filename*1=two", "onetwo"),
        ('filename="a\x00b\x1b[2Jc"', "a\ufffdb\ufffd[2Jc"),
        ('filename="../../etc/passwd"', "../../etc/passwd"),
        ('filename="' + "x" * 400 + '"', "x" * 255),
        ('filename=""', "file"),
        ("filename*=''%e2%82%ac", "€"),
    ],
)
def test_no_file_name_breaks_the_list_of_files(server: RunningServer, disposition: str, name: str | None) -> None:
    answer = uploaded(server, disposition)
    if name is None:
        assert answer.status_code == 400 and "allowed: utf-8" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200 and answer.json()["filename"] == name
    assert server.http.get("/v1/files").status_code == 200


def test_a_stored_file_name_with_a_lone_surrogate_is_still_listed(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    with running_server(batch_folder=str(folder)) as server:
        id = uploaded(server, "filename=x").json()["id"]
    record = json.loads((folder / "files" / f"{id}.json").read_text())
    (folder / "files" / f"{id}.json").write_text(json.dumps(record | {"filename": "\ud800.jsonl"}))
    with running_server(batch_folder=str(folder)) as server:
        assert [file["filename"] for file in server.http.get("/v1/files").json()["data"]] == ["\ufffd.jsonl"]
        assert server.http.delete(f"/v1/files/{id}").status_code == 200


def test_files_stay_with_their_key_when_another_is_revoked(tmp_path: Path) -> None:
    def files(keys: str, key: str, upload: bool = False) -> list[Any]:
        (tmp_path / "keys").write_text(keys)
        with running_server(batch_folder=str(tmp_path / "b"), api_key_file=str(tmp_path / "keys")) as server:
            server.http.headers["authorization"] = f"Bearer {key}"
            if upload:
                assert uploaded(server, "filename=x").status_code == 200
            return list(server.http.get("/v1/files").json()["data"])

    both_keys = "first-key-A\nsecond-key-B\n"
    assert len(files(both_keys, "first-key-A", upload=True)) == 1
    assert files("second-key-B\n", "second-key-B") == []
    assert len(files("second-key-B\nfirst-key-A\n", "first-key-A")) == 1


def test_one_key_cannot_use_up_the_storage_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(KEYS)
    monkeypatch.setattr("slipstream.apps.server.batch_store.MAX_RECORDS", 2)
    with running_server(
        batch_folder=str(tmp_path / "b"), api_key_file=str(tmp_path / "keys"), max_file_bytes=1024
    ) as server:
        for key, statuses in (("key-of-ann", [200, 200, 400]), ("key-of-bob", [200])):
            server.http.headers["authorization"] = f"Bearer {key}"
            assert [uploaded(server, "filename=x").status_code for _ in statuses] == statuses
        store = server.service.background.store
        server.call(lambda: setattr(store, "max_bytes", 3))  # the size of bob's file
        assert "allowed: fewer than 2 files and 3 bytes" in uploaded(server, "filename=x").text
        with ExitStack() as arriving:
            for _ in range(MAX_UPLOADS):
                arriving.enter_context(store.upload("cat"))
            with pytest.raises(ApiError, match="4 files are arriving already"):
                arriving.enter_context(store.upload("cat"))
        with store.upload("cat"):
            pass
        assert not store._uploads
