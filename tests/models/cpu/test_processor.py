"""What is read from /proc/cpuinfo, and what is assumed without it."""

from pathlib import Path

import pytest

from slipstream.models.cpu.processor import AMX, Processor, parse, processor

TEXT = """processor\t: 0
model name\t: Some CPU @ 2 GHz: fast
flags\t\t: fpu avx2 avx512f

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


def test_the_first_processor_is_read() -> None:
    first = parse(TEXT)
    assert first == Processor("Some CPU @ 2 GHz: fast", frozenset({"fpu", "avx2", "avx512f"}))
    assert "avx512" not in first.flags


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("AMD EPYC", "AMD EPYC (family 25, model 17)"),
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654 96-Core Processor"),
        ("", ""),
    ],
)
def test_a_virtual_machine_that_hides_the_model_is_told_by_its_numbers(name: str, shown: str) -> None:
    assert parse(f"model name\t: {name}\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: avx2\n").model_name == shown


def test_without_a_readable_file_the_processor_is_unknown(tmp_path: Path) -> None:
    assert processor(tmp_path / "missing") == parse("") == Processor()
    (tmp_path / "odd").write_bytes(b"model name : \xff\n:::\n")
    assert processor(tmp_path / "odd").flags == frozenset()


@pytest.mark.parametrize("permits", [False, True])
def test_tiles_are_used_only_where_the_system_permits_them(
    permits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.cpu.processor.request_tiles", lambda: permits)
    (tmp_path / "info").write_text(f"{TEXT.splitlines()[1]}\nflags : avx2 {' '.join(AMX)}\n")
    reported = processor(tmp_path / "info")
    assert reported == Processor("Some CPU @ 2 GHz: fast", frozenset({"avx2", *(AMX if permits else ())}))
