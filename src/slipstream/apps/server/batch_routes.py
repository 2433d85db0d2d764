"""OpenAI's files and batches, and uploads as forms, written to a file as they arrive, whatever their size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from pydantic import Field

from slipstream.apps.server.batch_runner import BatchRunner
from slipstream.apps.server.batch_store import MAX_NAME_LENGTH, BatchRecord, FileRecord, owned, write_errors_named
from slipstream.apps.server.error_objects import ApiError, refused
from slipstream.apps.server.openai_routes import service_of
from slipstream.apps.server.request_reading import check_extra
from slipstream.apps.server.schemas import Fields, NumberRange
from slipstream.durable_files import sync
from slipstream.errors import did_you_mean

MAX_HEAD_BYTES = 8 << 10  # of a part's headers
MAX_FIELD_BYTES = 1 << 10  # of a field that is no file
MAX_PARTS = 16
CHARSETS = ("utf-8", "iso-8859-1", "us-ascii")  # of `filename*`; Python also has codecs that are not character sets
LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"application/jsonl": {"schema": {"type": "string"}}}}
}
FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary", "description": "requests, a line of JSON each"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                },
            }
        }
    },
}
NO_EXPIRY = "files do not expire here; they stay until they are deleted"


class UploadForm:
    """Reads a form with one file. fields: the other parts; filename: as the client calls it."""

    def __init__(self, content_type: str, destination: Path) -> None:
        head = Message()
        head["content-type"] = content_type
        boundary = head.get_param("boundary")
        if (
            head.get_content_type() != "multipart/form-data"
            or not isinstance(boundary, str)
            or not 0 < len(boundary) <= 200
        ):
            raise refused(
                f"the request body has content-type {content_type!r:.80}; allowed: multipart/form-data with a "
                "boundary, for file and purpose",
                "file",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._between = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._destination = destination
        self._buffer = b"\r\n"  # so that the first boundary looks like the others
        self._name: str | None = None  # of the part that is being read
        self._parts = 0
        self._ended = False

    async def read(self, body: AsyncIterator[bytes]) -> None:
        """Read the whole body; ApiError if it is not a form with one file."""
        with open(self._destination, "wb") as file:
            async for piece in body:
                if not self._ended:  # anything after the last boundary is ignored
                    self._buffer += piece
                    while self._advance(file):
                        pass
        if not self._ended:
            raise refused("the form ends before its last boundary", "file")
        if self.filename is None:
            raise refused("the form has no file; allowed: a part named 'file'", "file")

    def _advance(self, file: BinaryIO) -> bool:
        """Store what precedes the next boundary and begin the next part; False if more bytes are needed."""
        data, boundary = self._buffer, self._buffer.find(self._between)
        if boundary < 0:
            cut = max(0, len(data) - len(self._between) + 1)
            self._put(file, data[:cut])
            self._buffer = data[cut:]
            return False
        head = boundary + len(self._between)
        end = data.find(b"\r\n\r\n", head)
        if data.startswith(b"--", head):
            self._put(file, data[:boundary])
            self._ended, self._buffer = True, b""
            return False
        if end < 0:
            if len(data) > head + MAX_HEAD_BYTES:
                raise refused("the headers of a part of the form are too long", "file")
            return False
        self._put(file, data[:boundary])
        self._begin(data[head:end])
        self._buffer = data[end + 4 :]
        return True

    def _begin(self, head: bytes) -> None:
        message = Message()
        for line in head.decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.lower() == "content-disposition":
                message["content-disposition"] = value.strip()
        part_name = message.get_param("name", header="content-disposition")
        self._name, self._parts = str(part_name), self._parts + 1
        if not isinstance(part_name, str):
            raise refused("a part of the form has no name; allowed: one for each part")
        if part_name in self.fields:
            raise refused(f"the form has {part_name!r:.40} twice; allowed: each name once")
        if self._parts > MAX_PARTS:
            raise refused(f"the form has more than {MAX_PARTS} parts; allowed: file, purpose and a few others")
        if part_name == "file":
            if self.filename is not None:
                raise refused("the form has two files; allowed: one", "file")
            self.filename = _filename(message)
        else:
            self.fields[part_name] = ""

    def _put(self, file: BinaryIO, data: bytes) -> None:
        if self._name == "file":
            file.write(data)
            self.size += len(data)
        elif self._name is not None and data:
            self.fields[self._name] += data.decode("utf-8", "replace")
            if len(self.fields[self._name]) > MAX_FIELD_BYTES:
                raise refused(f"{self._name!r:.40} is too long; allowed: {MAX_FIELD_BYTES} bytes", self._name[:40])


def _filename(message: Message) -> str:
    """The name of a part's file; ApiError for one in a character set that forms do not have."""
    name = message.get_param("filename", "", header="content-disposition")
    if isinstance(name, tuple):  # `filename*`, RFC 8187: character set, language, bytes as Latin-1
        charset = str(name[0] or CHARSETS[0]).lower()
        if charset not in CHARSETS:
            raise refused(f"filename* in {charset!r:.40}; allowed: {', '.join(CHARSETS)}", "file")
        name = str(name[2]).encode("latin-1", "replace").decode(charset, "replace")
    return name[:MAX_NAME_LENGTH] or "file"


router = APIRouter(prefix="/v1")
Listed = TypeVar("Listed", FileRecord, BatchRecord)
Limit = Annotated[int, Query(), NumberRange(1, 10_000, from_text=True)]
Order = Literal["asc", "desc"]


class BatchFields(Fields):
    """Body of `POST /v1/batches`: an uploaded file of requests, and the endpoint that they are for."""

    input_file_id: Annotated[str, Field(max_length=100)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    REFUSED: ClassVar[Mapping[str, str]] = {"output_expires_after": NO_EXPIRY}

    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None


def _runner(http: Request) -> BatchRunner:
    service_of(http).check_ready()
    runner: BatchRunner | None = http.app.state.batches
    if runner is None:
        raise ApiError(404, "this server keeps no files; start it with --batch-folder FOLDER", code="no_batch_folder")
    return runner


@router.post("/files", response_model=None, openapi_extra={"requestBody": FORM})
async def upload(http: Request) -> dict[str, Any]:
    """Keep a file of requests: a form with `file` and `purpose=batch`."""
    store = _runner(http).store
    with store.upload(http.state.owner) as content:
        form = UploadForm(http.headers.get("content-type", ""), content)
        await form.read(http.stream())
        if form.fields.get("purpose") != "batch":
            near = did_you_mean(form.fields.get("purpose", ""), "batch")
            raise refused(f"purpose={form.fields.get('purpose')!r:.80}; allowed: 'batch'{near}", "purpose")
        for name in form.fields:
            if name.startswith("expires_after"):
                raise refused(f"{name:.80}: {NO_EXPIRY}", "expires_after")
        if not form.size:
            raise refused("the file is empty; allowed: at least one line", "file")
        await asyncio.to_thread(sync, content)
        return store.add_file(http.state.owner, form.filename or "", "batch", content).to_dict()


@router.get("/files", response_model=None)
async def files(
    http: Request, purpose: str = "", limit: Limit = 10000, after: str = "", order: Order = "desc"
) -> dict[str, Any]:
    """The caller's files, the newest first unless `order` is asc."""
    shown = {id: record for id, record in _runner(http).store.files.items() if purpose in ("", record.purpose)}
    return _page(shown, http.state.owner, limit, after, order)


@router.get("/files/{file_id}", response_model=None)
async def file(http: Request, file_id: str) -> dict[str, Any]:
    """A file's name, size and age."""
    return owned(_runner(http).store.files, file_id, http.state.owner, "file").to_dict()


@router.delete("/files/{file_id}", response_model=None)
async def delete(http: Request, file_id: str) -> dict[str, Any]:
    """Remove a file that no unfinished batch needs."""
    store = _runner(http).store
    with write_errors_named():
        store.delete_file(owned(store.files, file_id, http.state.owner, "file"))
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/files/{file_id}/content", response_class=FileResponse, responses=LINES)
async def content(http: Request, file_id: str) -> FileResponse:
    """The content of a file."""
    store = _runner(http).store
    record = owned(store.files, file_id, http.state.owner, "file")
    path = store.content(record.id)
    if not path.exists():  # somebody has removed it
        raise ApiError(404, f"the content of file {file_id!r} is no longer in the batch folder", param="file_id")
    return FileResponse(path, media_type="application/jsonl")


@router.post("/batches", response_model=None)
async def create(http: Request, fields: BatchFields) -> dict[str, Any]:
    """Begin a batch over a file."""
    runner, owner = _runner(http), http.state.owner
    check_extra(fields)
    service_of(http).count_unknown(fields)
    source = owned(runner.store.files, fields.input_file_id, owner, "file")
    with write_errors_named():
        record = runner.store.add_batch(owner, source.id, fields.endpoint, fields.metadata)
    runner.begin(record)
    return record.to_dict()


@router.get("/batches", response_model=None)
async def batches(http: Request, limit: Limit = 20, after: str = "") -> dict[str, Any]:
    """The caller's batches, the newest first."""
    return _page(_runner(http).store.batches, http.state.owner, limit, after)


@router.get("/batches/{batch_id}", response_model=None)
async def batch(http: Request, batch_id: str) -> dict[str, Any]:
    """A batch and how many of its lines are answered."""
    return owned(_runner(http).store.batches, batch_id, http.state.owner, "batch").to_dict()


@router.post("/batches/{batch_id}/cancel", response_model=None)
async def cancel(http: Request, batch_id: str) -> dict[str, Any]:
    """End a batch; its finished answers stay."""
    runner = _runner(http)
    record = owned(runner.store.batches, batch_id, http.state.owner, "batch")
    if record.status not in ("validating", "in_progress"):
        raise ApiError(409, f"batch {batch_id!r} is {record.status}; allowed: a batch under way", param="batch_id")
    with write_errors_named():
        runner.cancel(record)
    return record.to_dict()


def _page(records: dict[str, Listed], owner: str, limit: int, after: str, order: Order = "desc") -> dict[str, Any]:
    """One page of a list. after: the id that the page before ended with; order: by age, desc from the newest."""
    sorted_records = records.values() if order == "asc" else reversed(records.values())
    listed = [record for record in sorted_records if record.owner == owner]
    ids = [record.id for record in listed]
    if after and after not in ids:
        raise refused(f"after={after!r:.100}; allowed: an id of this list", "after")
    begin = ids.index(after) + 1 if after else 0
    data = [record.to_dict() for record in listed[begin : begin + limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": begin + limit < len(listed)} | ends
