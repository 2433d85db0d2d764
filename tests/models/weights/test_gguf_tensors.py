"""Rows read from the file and matrices packed ahead equal those that the kernels' panels hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.models import quantized_models
from slipstream.models.cpu import thread_placement
from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.kernel_libraries import block_kernels
from slipstream.models.cpu.structs import FORMATS, BlockFormat
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_file import GGUFHeader, TensorEntry, read_header
from slipstream.models.weights.gguf_packing import PackedAhead
from slipstream.models.weights.gguf_tensors import RowReader, RowsOfFile
from tests.support.gguf_files import part_of, random_blocks, write_model
from tests.support.markers import needs_avx2
from tests.support.tiny_models import tokenizer

pytestmark = needs_avx2
ROWS, INPUTS, BEFORE = 50, 512, 37  # BEFORE: bytes of the file before its rows


def table(folder: Path, block: BlockFormat) -> tuple[RowsOfFile, BlockPart]:
    """The same random rows in a file and in panels."""
    raw, file = random_blocks(block, ROWS, INPUTS, seed=block.number), folder / "rows"
    file.write_bytes(bytes(BEFORE) + raw.tobytes())
    entry = TensorEntry("token_embd.weight", block.number, (ROWS, INPUTS), BEFORE, file)
    return RowsOfFile(entry, block_kernels()), part_of(block, raw, INPUTS, block_kernels())


@pytest.mark.parametrize("block", [b for b in FORMATS if b.number >= 0], ids=lambda block: block.name)
def test_rows_from_the_file_equal_those_of_the_panels(block: BlockFormat, tmp_path: Path) -> None:
    rows, part = table(tmp_path, block)
    for indices in ([0], [49, 3, 3, 17], list(range(ROWS)), []):
        ids = torch.tensor(indices, dtype=torch.int64)
        assert torch.equal(rows.rows(ids), part.rows(ids))
    assert not torch.equal(rows.rows(torch.tensor([1])), part.rows(torch.tensor([2])))


def test_rows_outside_the_table_and_truncated_files_are_refused(tmp_path: Path) -> None:
    rows, _ = table(tmp_path, FORMATS[0])
    for index in (-1, ROWS):
        with pytest.raises(IndexError, match=f"rows from {index} to {index}; allowed: 0 to 49"):
            rows.rows(torch.tensor([index]))
    with (tmp_path / "rows").open("r+b") as stream:
        stream.truncate(BEFORE + 60)
    with pytest.raises(SlipstreamError, match=r"ends within tensor 'token_embd.weight'"):
        rows.rows(torch.tensor([40]))


def test_rows_stay_readable_after_their_file_is_replaced(tmp_path: Path) -> None:
    rows, part = table(tmp_path, FORMATS[0])
    (tmp_path / "other").write_bytes(bytes(10))
    (tmp_path / "other").replace(tmp_path / "rows")
    assert torch.equal(rows.rows(torch.arange(ROWS)), part.rows(torch.arange(ROWS)))


def header_of(folder: Path, tied: bool) -> GGUFHeader:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_model(folder / "model.gguf", "llama", {"": "Q8_0"}, tie_word_embeddings=tied)
    return read_header(folder / "model.gguf")


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_packed_ahead_equal_those_of_the_file(tied: bool, tmp_path: Path) -> None:
    header, library = header_of(tmp_path, tied), block_kernels()
    not_packed = []
    with PackedAhead(header, library) as ahead:
        for name, entry in header.tensors.items():
            part = ahead.part(name)
            if part is None:
                not_packed.append(name)
            else:
                alone = RowReader().part(entry, library, HugePages(), None)
                assert torch.equal(part.data, alone.data)
    matrices = [name for name in not_packed if len(header.tensors[name].shape) == 2]
    reordered = [f"blk.{layer}.attn_{kind}.weight" for layer in range(2) for kind in "qk"]
    assert sorted(matrices) == sorted(reordered + ([] if tied else ["token_embd.weight"]))


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)
def test_matrices_are_packed_on_all_cores_although_openmp_binds_this_thread_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, cores = header_of(tmp_path, True), os.sched_getaffinity(0)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setattr(thread_placement, "first_processors", lambda: frozenset(cores))
    os.sched_setaffinity(0, {min(cores)})
    try:
        with PackedAhead(header, block_kernels()) as ahead:
            assert ahead._threads.submit(os.sched_getaffinity, 0).result() == cores
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("own", [None, tokenizer()])
def test_a_tokenizer_is_read_while_weights_are_packed_unless_the_caller_has_one(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, part, read = list[str](), PackedAhead.part, quantized_models.load_tokenizer
    monkeypatch.setattr(PackedAhead, "part", lambda ahead, name: order.append("waited") or part(ahead, name))
    monkeypatch.setattr(quantized_models, "load_tokenizer", lambda *place: order.append("read") or read(*place))
    loaded = load(str(header_of(tmp_path, True).file), LoadOptions(), own)
    assert order[:2] == (["read", "waited"] if own is None else ["waited", "waited"])
    assert loaded.tokenizer is not None and "read" not in order[1:]


def test_an_error_of_the_packing_thread_is_raised_and_stops_it(tmp_path: Path) -> None:
    header = header_of(tmp_path, True)
    with (tmp_path / "model.gguf").open("r+b") as stream:
        stream.truncate(header.size + 100)
    with PackedAhead(header, block_kernels()) as ahead, pytest.raises(SlipstreamError, match="ends within tensor"):
        ahead.part("blk.0.attn_v.weight")
    assert all(thread.done() for thread in ahead._tasks)


def test_an_untied_model_reads_its_embedding_from_the_file(tmp_path: Path) -> None:
    ids = torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(4))
    for tied, kind in ((False, RowsOfFile), (True, BlockPart)):
        header = header_of(tmp_path, tied)
        model: Any = load(str(header.file), LoadOptions()).model
        assert isinstance(model.get_input_embeddings().part, kind)
        part = RowReader().part(header.tensors["token_embd.weight"], block_kernels(), HugePages(), None)
        assert torch.equal(model.get_input_embeddings()(ids)[0], part.rows(ids[0]))
