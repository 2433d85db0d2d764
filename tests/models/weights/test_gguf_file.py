"""GGUF headers: what counts as a GGUF file, of which kind and parts; no header makes the reader use much memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from slipstream import SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.model_files import is_gguf
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
from tests.support.gguf_files import byte_level, write_model
from tests.support.gguf_mutations import Parts

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
LOADINGS = (LoadOptions(), LoadOptions("float32"), LoadOptions("bfloat16", fast=False))
IDS = torch.randint(0, 250, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with whole.gguf, and the same model in parts of 6 tensors each."""
    path = tmp_path_factory.mktemp("gguf")
    for name, size in (("whole", 0), ("split", 6)):
        write_model(path / f"{name}.gguf", part_tensors=size, tie_word_embeddings=False)
    return path


pytestmark = pytest.mark.usefixtures("own_cache")


def changed(file: Path, folder: Path, name: str, value: bytes) -> Path:
    """A copy in which the last bytes of a metadata value are replaced."""
    end, content = read_header(file).spans[name][1], bytearray(file.read_bytes())
    content[end - len(value) : end] = value
    (folder / "changed.gguf").write_bytes(content)
    return folder / "changed.gguf"


def logits(file: Path, options: LoadOptions) -> torch.Tensor:
    return load(str(file), options).backend.forward(IDS, [0], first_slot=0, logits=True)


def check_refusal(file: Path, message: str, loadings: tuple[LoadOptions, ...] = LOADINGS) -> None:
    for options in loadings:
        with pytest.raises(SlipstreamError, match=message) as error:
            load(str(file), options)
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.slow
def test_a_gguf_file_is_recognized_by_its_content(folder: Path, tmp_path: Path) -> None:
    for name in ("model.GGUF", f"sha256-{'0' * 64}", "model.bin", "model.gguf.part"):
        (tmp_path / name).symlink_to(folder / "whole.gguf")
        file = str(tmp_path / name)
        assert is_gguf(file) and inspect_vocabulary(file).head_size == 260, name
    for options in LOADINGS:  # under the last of these names
        assert torch.equal(logits(tmp_path / name, options), logits(folder / "whole.gguf", options))
    decoder = SpeculativeDecoder(str(folder / "whole.gguf"), file, drafter="model")
    assert decoder.draft is not None and decoder.draft.name == file


def test_paths_that_are_no_gguf_file_are_refused_as_what_they_are(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "some.gguf").symlink_to(folder / "whole.gguf")
    (tmp_path / "named.gguf").mkdir()
    (tmp_path / "models" / "gone.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "models" / "loop.gguf").symlink_to("loop.gguf")
    for name, message in (
        (
            "notes.txt",
            r"is a file, but not a GGUF file \(its first four bytes are not 'GGUF'\); allowed: a Hugging Face",
        ),
        ("models", r"has no config.json; did you mean its file some\.gguf\? allowed"),
        ("named.gguf", "has no config.json; allowed"),
        ("absent.gguf", r"does not exist; allowed: a readable \.gguf file$"),
        ("models/sum.gguf", r"does not exist; did you mean some\.gguf\? allowed"),
        ("models/gon.gguf", r"does not exist; did you mean some\.gguf\? allowed"),
        ("models/gone.gguf", r"gone\.gguf' is a symbolic link to no file; allowed: a readable \.gguf file$"),
        ("models/loop.gguf", r"loop\.gguf' is a symbolic link to no file; allowed: a readable \.gguf file$"),
    ):
        assert is_gguf(str(tmp_path / name)) is (name == "absent.gguf" or name.startswith("models/"))
        with pytest.raises(UsageError, match=message):
            resolve(str(tmp_path / name))


@pytest.mark.slow
def test_a_split_model_is_the_whole_one_whichever_part_is_named(folder: Path) -> None:
    parts = sorted(folder.glob("split-*.gguf"))
    assert len(parts) == 4 and [read_header(part).parts for part in parts] == [tuple(parts)] * 4
    assert {read_header(part).digest for part in parts} == {read_header(parts[0]).digest}
    for options in LOADINGS:
        expected = logits(folder / "whole.gguf", options)
        for part in (parts[0], parts[2]):
            assert torch.equal(logits(part, options), expected)
    assert inspect_vocabulary(str(parts[1])).head_size == 260


def test_parts_that_are_absent_renamed_or_of_another_model_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    parts = sorted(folder.glob("split-*.gguf"))
    for part in parts[:3]:
        (tmp_path / part.name).write_bytes(part.read_bytes())
    first = tmp_path / parts[0].name
    absent = rf"split-00001-of-00004.gguf' is part 1 of 4, and {parts[3].name} is not beside it; allowed: all parts in"
    check_refusal(first, absent)
    (tmp_path / parts[3].name).write_bytes(parts[2].read_bytes())
    check_refusal(first, r"has split.no 2 and split.count 4; allowed: 3 and 4, by its name")
    (tmp_path / "third").write_bytes(parts[2].read_bytes())
    check_refusal(
        tmp_path / "third", r"is part 3 of 4, .* cannot be found; allowed: a name that ends in -00003-of-00004\.gg"
    )
    other = changed(parts[3], tmp_path, "split.tensors.count", struct.pack("<i", 20))
    assert read_header(parts[3]).values["split.tensors.count"] == 21
    (tmp_path / parts[3].name).write_bytes(other.read_bytes())
    read_header(first)  # the count of the first part is used
    (tmp_path / parts[0].name).write_bytes(
        changed(parts[0], tmp_path, "split.tensors.count", struct.pack("<i", 20)).read_bytes()
    )
    check_refusal(first, r"its 4 parts have 21 tensors; allowed: 20, as split.tensors.count says")
    wrong = changed(parts[0], tmp_path, "split.count", struct.pack("<H", 0))
    check_refusal(wrong, "split.count is 0; allowed: a whole number from 1 to 65,536")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("adapter", "general.type is 'adapter', changes to another model; allowed: 'model'$"),
        ("mmproj", "general.type is 'mmproj', the image or audio part of another model; allowed: 'model'$"),
        ("imatrix", "general.type is 'imatrix', statistics to quantize another model with; allowed: 'model'$"),
        ("diffusion", "general.type is 'diffusion'; allowed: 'model'$"),
    ],
)
def test_gguf_files_of_another_kind_are_refused_by_their_kind(kind: str, message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "other.gguf", more=lambda writer: writer.add_type(kind))
    check_refusal(tmp_path / "other.gguf", message)


def test_a_vocabulary_without_weights_is_inspected_but_not_loaded(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "llama")
    writer.add_type("model")
    writer.add_block_count(1)
    byte_level("smollm", {"<end>": 3}, eos="<end>")(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    check_refusal(
        tmp_path / "words.gguf", "holds a vocabulary and no tensors; allowed: a file with the model's weights"
    )
    assert inspect_vocabulary(str(tmp_path / "words.gguf")).end_ids == (258,)


@pytest.mark.parametrize("version", [2, 3])
def test_a_big_endian_file_is_refused_as_such(version: int, folder: Path, tmp_path: Path) -> None:
    file, content = tmp_path / "big.gguf", (folder / "whole.gguf").read_bytes()
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", version, 21, 20) + content[24:])
    check_refusal(file, r"is big-endian; allowed: little-endian, as `gguf-convert-endian FILE little`")
    file.write_bytes(b"GGUF" + struct.pack("<I", 1) + content[8:])
    check_refusal(file, "version 1; allowed: 2, 3$")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("llama.block_count", 1 << 31, "llama.block_count is 2,147,483,648; allowed: 1 to 2, by the file's tensors$"),
        ("llama.block_count", 0, "llama.block_count is 0; allowed: 1 to 2"),
        ("llama.vocab_size", 1 << 31, "llama.vocab_size is 2,147,483,648; allowed: 1 to 512"),
        ("llama.embedding_length", 1 << 31, "llama.embedding_length is 2,147,483,648; allowed: 1 to 512"),
        ("llama.feed_forward_length", 1 << 31, "llama.feed_forward_length is 2,147,483,648; allowed: 0 to 512"),
        ("llama.attention.head_count_kv", 250, r"'blk.0.attn_k.weight' is \[128, 256\]; allowed: \[16000, 256\]"),
        ("llama.rope.dimension_count", 1 << 31, "llama.rope.dimension_count is 2,147,483,648; allowed: 0 to 512"),
    ],
)
def test_metadata_that_the_tensors_contradict_is_refused(
    name: str, value: int, message: str, folder: Path, tmp_path: Path
) -> None:
    file = changed(folder / "whole.gguf", tmp_path, name, struct.pack("<I", value))
    check_refusal(file, message)


def test_special_tokens_outside_the_vocabulary_are_ignored(folder: Path, tmp_path: Path) -> None:
    wrong = folder / "whole.gguf"
    for name in ("padding", "eos"):
        wrong = changed(wrong, tmp_path, f"tokenizer.ggml.{name}_token_id", struct.pack("<I", 1 << 31))
    for options in LOADINGS:
        assert load(str(wrong), options).end_ids == (256,)  # <eos>, by its text


@pytest.mark.parametrize("options", LOADINGS, ids=["blocks", "float32", "unpacked"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1 << 58,), r"is truncated: .* tensor 'rope_freqs\.weight' ends at byte"),
        ((0, 1 << 58), r"tensor 'rope_freqs\.weight' is \[0, \d+\]; allowed: dimensions of at least 1"),
        ((0,), r"tensor 'rope_freqs\.weight' is \[0\]; allowed: dimensions of at least 1"),
        ((1 << 40, 1 << 40, 1 << 40, 1 << 40), "is truncated"),
    ],
)
def test_a_tensor_larger_than_the_file_is_refused_before_it_is_read(
    shape: tuple[int, ...], message: str, options: LoadOptions, tmp_path: Path
) -> None:
    def factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", numpy.ones((1,) * len(shape), numpy.float32))

    write_model(tmp_path / "some.gguf", more=factors)
    content, name = (tmp_path / "some.gguf").read_bytes(), b"rope_freqs.weight"
    offset = content.index(name) + len(name) + 4
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    (tmp_path / "huge.gguf").write_bytes(content[:offset] + sizes + content[offset + len(sizes) :])
    check_refusal(tmp_path / "huge.gguf", message, (options,))


@pytest.mark.slow
def test_a_damaged_header_is_refused_in_one_line_without_using_much_memory(folder: Path, tmp_path: Path) -> None:
    content, damage = (folder / "whole.gguf").read_bytes(), random.Random(7)
    size, file, num_read = read_header(folder / "whole.gguf").size, tmp_path / "damaged.gguf", 0
    for _ in range(400):
        data = bytearray(content)
        if damage.random() < 0.2:
            del data[damage.randrange(4, size) :]
        for _ in range(damage.choice((1, 1, 2, 8))):
            data[damage.randrange(4, min(size, len(data)) + 1) - 1] ^= 1 << damage.randrange(8)
        file.write_bytes(data)
        tracemalloc.start()
        try:
            read_header(file).check_model()
            num_read += 1
        except SlipstreamError as error:
            assert "\n" not in str(error) and len(str(error)) < 5000
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak_bytes < 4 * len(content)
    assert 0 < num_read < 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("general.architecture", b"no-su"),
        ("tokenizer.ggml.model", b"none"),
        ("tokenizer.ggml.tokens", b"\xff" * 8),
        ("tokenizer.ggml.merges", b"   "),
        ("tokenizer.ggml.token_type", b"\x09\x00\x00\x00"),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", float("nan"))),
    ],
)
def test_other_wrong_values_are_refused_in_one_line_or_load(
    name: str, value: bytes, folder: Path, tmp_path: Path
) -> None:
    file = changed(folder / "whole.gguf", tmp_path, name, value)
    for options in LOADINGS:
        try:
            load(str(file), options)
        except SlipstreamError as error:
            assert "\n" not in str(error)


def test_the_size_of_a_tensor_of_a_foreign_type_is_checked(tmp_path: Path) -> None:
    write_model(tmp_path / "two.gguf", kinds={"": "Q8_0", "1.ffn_down": "Q2_K"})
    content, name = (tmp_path / "two.gguf").read_bytes(), b"blk.1.ffn_down.weight"
    offset = content.index(name) + len(name) + 12  # the field of its rows
    (tmp_path / "more.gguf").write_bytes(content[:offset] + struct.pack("<Q", 1 << 40) + content[offset + 8 :])
    check_refusal(tmp_path / "more.gguf", r"is truncated: .* tensor 'blk.1.ffn_down.weight' ends at byte")


def test_an_array_of_arrays_is_refused_where_numbers_are_needed(folder: Path, tmp_path: Path) -> None:
    parts = Parts.of(folder / "whole.gguf")
    inner = struct.pack("<IQI", 4, 1, 2)
    value = next(value for value in parts.values if value[0] == b"llama.attention.head_count_kv")
    value[1] = struct.pack("<IIQ", 9, 9, 1) + inner
    (tmp_path / "nested.gguf").write_bytes(parts.written())
    check_refusal(
        tmp_path / "nested.gguf", "head_count_kv is an array of arrays; allowed: an array of numbers or of texts"
    )
