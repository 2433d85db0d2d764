"""Large GGUF files: panels mapped from a file, or experts packed when they are used; the text is always the same."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_experts import experts_of
from slipstream.models.cpu.kernel_libraries import block_kernels
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights import gguf_packing, panel_files
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_packing import PackedAhead
from slipstream.models.weights.stored_models import remove_model, stored_models
from tests.support.gguf_architectures import CASES, architecture, write_case
from tests.support.markers import needs_avx2

pytestmark = [
    needs_avx2,
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.skipif(os.name != "posix", reason="files are mapped on POSIX systems"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
IDS = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(2))
Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_files.shutil, "disk_usage", lambda folder: Usage(100, 90, 10))


def write(file: Path, name: str = "qwen3moe", kind: str = "Q4_K") -> Path:
    write_case(file, architecture(name), replace(CASES[name], settings=CASES[name].settings | SIZES), kind)
    return file


def run(file: Path) -> tuple[Tensor, Any]:
    """Logits of a prompt and of two tokens behind it, and the model."""
    loaded = load(str(file), LoadOptions())
    loaded.backend.reserve(1, 64)
    logits = [loaded.backend.forward(IDS, [0], first_slot=0, logits=True)]
    logits += [loaded.backend.forward(IDS[:, i : i + 1], [40 + i], first_slot=0, logits=True) for i in range(2)]
    return torch.cat(logits, 1), loaded.model


def sizes(file: Path) -> dict[str, int]:
    """The bytes of the panels of the matrices that are packed ahead."""
    header = read_header(file)
    packed = [entry for entry in header.tensors.values() if gguf_packing._is_packed(header, entry)]
    return {entry.name: entry.packed_size(block_kernels()) for entry in packed}


def set_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setenv("SLIPSTREAM_MEMORY", str(num_bytes / 1e9))


def make_large(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Let a file take half of the memory."""
    set_memory(monkeypatch, 2 * sum(sizes(file).values()))


def let_some_experts_fit(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Leave memory for all experts of a layer and a fourth of the other layer's."""
    all_sizes = sizes(file)
    of_experts = sum(size for tensor, size in all_sizes.items() if "_exps." in tensor)
    set_memory(monkeypatch, (sum(all_sizes.values()) - of_experts * 3 / 8) / gguf_packing.FILLED)


def packed_files() -> list[Path]:
    return [model.folder for model in stored_models() if model.place == "packed"]


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [("qwen3moe", "Q4_K"), ("gpt-oss", "Q8_0"), ("qwen3", "Q4_0")])
def test_mapped_panels_give_the_same_bits_and_the_second_start_writes_nothing(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "large.gguf", name, kind)
    expected, _ = run(file)
    assert packed_files() == []
    make_large(monkeypatch, file)
    assert torch.equal(run(file)[0], expected)
    (panels,) = packed_files()
    written = panels.stat()
    with monkeypatch.context() as patch:
        patch.setattr(panel_files, "_write", lambda *arguments: pytest.fail("written again"))
        assert torch.equal(run(file)[0], expected)
    assert packed_files() == [panels] and panels.stat().st_mtime_ns == written.st_mtime_ns
    assert sorted(panels.parent.iterdir()) == sorted([panels, panels.with_suffix(".lock")])
    assert remove_model(panels.name).num_bytes == written.st_size and packed_files() == []
    assert "read from the disk" not in caplog.text
    set_memory(monkeypatch, written.st_size / 2)
    assert torch.equal(run(file)[0], expected)
    assert caplog.text.count("more than the 0.0 GB of memory: it is read from the disk repeatedly") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [("qwen3moe", "Q4_K"), ("gpt-oss", "Q8_0"), ("olmoe", "Q4_0")])
def test_experts_that_are_packed_when_they_are_used_give_the_same_bits(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: None
) -> None:
    file = write(tmp_path / "large.gguf", name, kind)
    expected, _ = run(file)
    let_some_experts_fit(monkeypatch, file)
    logits, model = run(file)
    store: Any = experts_of(model)[0].stacks.store
    counted = len(experts_of(model)) * experts_of(model)[0].plan.count
    assert torch.equal(logits, expected) and packed_files() == []
    assert store.struct.count < counted
    assert store.struct.packed > store.struct.count  # some were packed in the place of others
    before = store.struct.packed
    block: Any = experts_of(model)[0]
    block(torch.ones(1, 256))
    block(torch.ones(1, 256))
    assert store.struct.packed - before <= block.plan.used  # those of the second call were in memory


def test_a_file_that_is_cut_while_experts_are_used_is_an_error_and_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: None
) -> None:
    file = write(tmp_path / "large.gguf")
    let_some_experts_fit(monkeypatch, file)
    loaded = load(str(file), LoadOptions())
    first, second = experts_of(loaded.model)
    tokens = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    assert second(tokens).isfinite().all()
    os.truncate(file, read_header(file).tensors["blk.1.ffn_up_exps.weight"].start)
    assert first(tokens).isfinite().all()  # in the place of the second layer's
    for _ in range(2):
        with pytest.raises(SlipstreamError, match="experts could not be read when they were needed"):
            second(tokens)
    loaded.backend.reserve(1, 64)
    with pytest.raises(SlipstreamError, match="the file must not change while it is in use"):
        loaded.backend.forward(IDS, [0], first_slot=0, logits=True)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_large_files_whose_scales_are_not_finite_are_refused(
    is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    file = write(tmp_path / "large.gguf")
    place, content = read_header(file).tensors["blk.1.ffn_up_exps.weight"].start, bytearray(file.read_bytes())
    content[place : place + 2] = b"\0\x7c"
    file.write_bytes(content)
    if is_mapped:
        make_large(monkeypatch, file)
        with pytest.raises(
            SlipstreamError, match=r"tensor 'blk\.1\.ffn_up_exps\.weight' holds numbers that are not finite"
        ):
            load(str(file), LoadOptions())
        return
    request.getfixturevalue("full_disk")
    let_some_experts_fit(monkeypatch, file)
    with pytest.raises(SlipstreamError, match="experts hold numbers that are not finite; allowed: finite numbers"):
        run(file)


def test_what_fits_neither_into_memory_nor_on_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: None
) -> None:
    for name in ("qwen3moe", "qwen3"):
        file = write(tmp_path / f"{name}.gguf", name)
        set_memory(monkeypatch, sum(sizes(file).values()) / 3)
        with pytest.raises(SlipstreamError, match=r"takes 0.0 GB of memory at once, .*; allowed: 0.0 GB, 75% of the"):
            load(str(file), LoadOptions())


def changed_content(file: Path) -> None:
    entry = read_header(file).tensors["blk.1.ffn_down_exps.weight"]
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(entry.start + 5)
        stream.write(b"x")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def changed_later(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [changed_content, changed_later])
def test_another_file_with_the_same_header_has_panels_of_its_own(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "large.gguf")
    make_large(monkeypatch, file)
    run(file)
    (first,) = packed_files()
    change(file)
    run(file)
    assert len(packed_files()) == 2 and first in packed_files()


def test_panels_that_something_has_changed_are_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "large.gguf")
    make_large(monkeypatch, file)
    before, _ = run(file)
    (panels,) = packed_files()
    with panels.open("r+b") as stream:
        stream.seek(200)
        stream.write(b"changed")
    assert torch.equal(run(file)[0], before)
    assert b"changed" not in panels.read_bytes()


def test_panels_of_other_kernels_and_interrupted_ones_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "large.gguf")
    make_large(monkeypatch, file)
    run(file)
    (panels,) = packed_files()
    old = panels.with_name(f"{panels.stem[:-8]}00000000.panels")
    shutil.move(panels, old)
    panels.with_name(f".{panels.name}.123.partial").write_bytes(b"interrupted")
    other = panels.with_name("other-model.panels")
    other.write_bytes(b"another model's")
    run(file)
    assert sorted(packed_files()) == sorted([panels, other])
    assert not list(panels.parent.glob(".*"))
    os.truncate(panels, 100)
    run(file)
    assert panels.stat().st_size > 100


def test_a_file_that_is_cut_while_it_is_packed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(write(tmp_path / "large.gguf"))
    make_large(monkeypatch, header.file)
    os.truncate(header.file, header.size + 5000)
    with pytest.raises(SlipstreamError, match="ends within tensor"):
        PackedAhead(header, block_kernels())
    assert [item.suffix for item in (tmp_path / "cache/panels").iterdir()] == [".lock"]
    with pytest.raises(SlipstreamError, match="is truncated"):
        load(str(header.file), LoadOptions())


def test_a_cache_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    header = read_header(write(tmp_path / "large.gguf"))
    (tmp_path / "cache").write_text("a file")
    make_large(monkeypatch, header.file)
    with PackedAhead(header, block_kernels()) as ahead:
        assert ahead.store is not None
    assert f"its panels cannot be kept in {tmp_path / 'cache/panels'}: " in caplog.text
