"""Batches cancelled before the new server has read what an earlier one answered; partial writes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.apps.server.batch_runner import BatchRunner
from slipstream.apps.server.batch_store import BatchStore, LinesUnderWay
from tests.support.job_cases import chat, write
from tests.support.running_server import toy


def test_a_batch_cancelled_right_after_a_restart_keeps_what_was_answered_before(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1 << 30)
    with store.upload("") as content:
        write(content, [chat(f"c{at}", "x") for at in range(9)])
        source = store.add_file("", "in.jsonl", "batch", content)
    record = store.add_batch("", source.id, "/v1/chat/completions", None)
    store.change(record, "in_progress")
    answers, errors = '{"id": "a"}\n{"id": "b"}\n{"id": "c"}\n', '{"line": 1}\n'
    store.content(record.output).write_text(answers + '{"id":"batch_req_')  # the server was killed during this write
    store.content(record.errors).write_text(errors)
    store.close()

    store = BatchStore(tmp_path, 1 << 30)
    service: Any = SimpleNamespace(decoder=toy())
    asyncio.run(_cancelled(BatchRunner(service, store), record.id))
    status = store.batches[record.id].to_dict()
    assert status["status"] == "cancelled" and status["request_counts"] == {"total": 0, "completed": 3, "failed": 1}
    assert [store.content(status[name]).read_text() for name in ("output_file_id", "error_file_id")] == [
        answers,
        errors,
    ]
    assert store.files[status["output_file_id"]].bytes == len(answers)
    store.close()


async def _cancelled(runner: BatchRunner, id: str) -> None:
    runner.start()
    runner.cancel(runner.store.batches[id])
    while runner.store.batches[id].is_unfinished:
        await asyncio.sleep(0)


def test_a_note_that_was_written_only_in_part_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, write = LinesUnderWay(tmp_path / "notes", ["b"]), os.write

    def entered() -> None:
        with notes.entered(("b", 1)):
            pass

    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(OSError, match="No space left"):
            entered()
    entered()
    notes.close(orderly=False)
    assert LinesUnderWay(tmp_path / "notes", ["b"]).num_ends(("b", 1)) == 0
