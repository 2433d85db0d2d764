"""Files of a job with torn lines, with lines of another job, or in use by another process."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.jobs.job_output import JobOutput
from tests.support.job_cases import by_id, counts, read, requests, toy, write
from tests.support.processes import started

LINES = requests(9)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return toy()


@pytest.fixture(scope="module")
def whole(decoder: SpeculativeDecoder, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("job") / "out.jsonl"
    decoder.batch(LINES, path)
    return path.read_bytes()


@pytest.mark.slow
def test_a_job_continues_from_an_output_cut_anywhere_to_the_same_lines(
    decoder: SpeculativeDecoder, whole: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "reference.jsonl").write_bytes(whole)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [0, 1, 5, ends[0] - 1, ends[0], ends[0] + 1, ends[3] + 9, ends[-1] - 1, ends[-1]]:
        out.write_bytes(whole[:cut])
        report = decoder.batch(LINES, out)
        kept = sum(end <= cut for end in ends)
        assert counts(report) == (9, kept, 9 - kept, 0)
        assert out.read_bytes().startswith(whole[: ends[kept - 1] if kept else 0])
        assert by_id(out) == by_id(tmp_path / "reference.jsonl")


@pytest.mark.parametrize("torn", [b"", b'{"id":"'])
def test_zero_bytes_at_the_end_after_a_power_failure_are_cut_off(
    torn: bytes, decoder: SpeculativeDecoder, whole: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(whole + torn + bytes(4096))
    assert counts(decoder.batch(LINES, out)) == (9, 9, 0, 0)
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    ["a letter to somebody", "a letter\n", '{"name": 1}\n', '{"id": "r0"}\n', "[]\n", "[" * 100_000 + "\n", "\0" * 9],
)
def test_a_file_that_no_job_has_written_is_refused_and_unchanged(
    content: str, decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    for name in ("out.jsonl", "out.errors.jsonl"):
        file = tmp_path / name
        file.write_text(content)
        if name == "out.jsonl" or content.endswith("\n"):
            with pytest.raises(UsageError, match="line 1: not a line of a job's output; allowed: a new file, or"):
                decoder.batch(LINES, tmp_path / "out.jsonl")
            assert file.read_text() == content
        file.unlink()
        (tmp_path / "out.jsonl").unlink(missing_ok=True)


def test_the_output_of_another_job_is_refused(decoder: SpeculativeDecoder, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(whole)
    with pytest.raises(
        UsageError, match=r"line \d: id 'r\d' is not in 'the list of requests'; allowed: a new file, or"
    ):
        decoder.batch(LINES[:5], out)
    changed = [line | {"prompt": "another"} if line["id"] == "r4" else line for line in LINES]
    with pytest.raises(UsageError, match=r"line \d: id 'r4' has been answered to another request, or under other"):
        decoder.batch(changed, out)
    with pytest.raises(UsageError, match="has been answered to another request, or under other options"):
        decoder.batch(LINES, out, SamplingParams(top_k=3))
    with pytest.raises(
        UsageError, match=r"line \d: the answer came from the model with fingerprint slip-\w+, but slip-\w+ is loaded"
    ):
        SpeculativeDecoder("toy:2", acceptance="match").batch(LINES, out)
    assert out.read_bytes() == whole
    assert counts(decoder.batch([*LINES, {"id": "new", "prompt": "x", "max_tokens": 2}], out)) == (10, 9, 1, 0)


def test_a_refused_job_keeps_the_error_file_of_the_last_run(
    decoder: SpeculativeDecoder, whole: bytes, tmp_path: Path
) -> None:
    (tmp_path / "out.jsonl").write_bytes(whole)
    errors, earlier = tmp_path / "out.errors.jsonl", '{"line": 3, "id": "r2", "error": "of the last run"}\n'
    errors.write_text(earlier)
    bad = {"prompt": "a line without an id"}
    with pytest.raises(UsageError, match="is not in 'the list of requests'"):
        decoder.batch([bad, *LINES[:5]], tmp_path / "out.jsonl")
    assert errors.read_text() == earlier
    assert counts(decoder.batch([bad, *LINES], tmp_path / "out.jsonl")) == (10, 9, 0, 1)  # the control
    assert [line["line"] for line in read(errors)] == [1]


def test_an_output_with_a_duplicate_id_is_refused(decoder: SpeculativeDecoder, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match=r"line 10: id '\w+' is that of line 1; allowed: each id once"):
        decoder.batch(LINES, out)


def test_two_processes_cannot_write_one_output(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    hold = (
        "import pathlib; from slipstream.jobs.job_output import JobOutput; "
        f"held = JobOutput(pathlib.Path({str(out)!r})); print(1, flush=True); input()"
    )
    with started("-c", hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(SlipstreamError, match=r"out.jsonl' is being written by another process"):
            decoder.batch(LINES, out)
        other.kill()
    assert decoder.batch(LINES, out).answered == 9


def test_file_names_are_checked_before_anything_is_written(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", LINES)
    for output, errors, why in (
        (source, None, "is the output and the input; allowed: two files"),
        (tmp_path / "out.jsonl", source, "is the error file and the input"),
        (tmp_path / "out.jsonl", tmp_path / "out.jsonl", "is the error file and the output"),
        (tmp_path, None, "cannot be written: it is a folder"),
        (tmp_path / "absent" / "out.jsonl", None, "cannot be written: the folder"),
        (tmp_path / "out.parquet", None, "out.parquet' is a Parquet file; allowed: JSON lines, or in Python a list"),
    ):
        with pytest.raises(UsageError, match=why):
            decoder.batch(source, output, errors=errors)
    with pytest.raises(
        UsageError, match=r"absent.jsonl' cannot be read: no such file; allowed: a file with one request per line"
    ):
        decoder.batch(tmp_path / "absent.jsonl", tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("content", ["", "\n  \n\t\r\n"])
def test_a_file_without_lines_is_refused_and_nothing_is_written(
    content: str, decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    with pytest.raises(UsageError, match=r"in\.jsonl' holds no requests; allowed: at least one line$"):
        decoder.batch(source, tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == [source]
    assert counts(decoder.batch([], tmp_path / "out.jsonl")) == (0, 0, 0, 0)  # like generate([]), which is empty


def test_an_answer_is_synced_to_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append((tmp_path / "out.jsonl").stat().st_size))
    with closing(JobOutput(tmp_path / "out.jsonl")) as output:
        output.append([{"id": "a"}, {"id": "b"}])
        output.append([])
        output.append([{"id": "c"}])
    assert synced == [0, 22, 33]
