"""Memory after loading a GGUF file: weights in chunks that parts share, and no cache left by trials."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.backend_capabilities import Releasing
from slipstream.models.cpu.huge_pages import ALIGNED, CHUNK, HugePages
from slipstream.models.cpu.kernel_libraries import block_kernels
from slipstream.models.weights import gguf_tensors
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_tensors import PackedAhead
from tests.support.gguf_files import write_model
from tests.support.tiny_models import fresh, tokenizer


def test_parts_of_memory_are_aligned_zeroed_and_do_not_overlap() -> None:
    memory = HugePages()
    sizes = [100, 64, 1, 4096, CHUNK // 2, CHUNK // 2, CHUNK + 5, 7]
    parts = [memory.zeros(size) for size in sizes]
    assert [len(part) for part in parts] == sizes
    assert all(part.data_ptr() % ALIGNED == 0 and not part[-4096:].any() for part in parts)
    for number, part in enumerate(parts):
        part[:4096], part[-1] = number + 1, number + 1
    for number, part in enumerate(parts):
        assert set(part[:4096].tolist()) | {int(part[-1])} == {number + 1}
    shared = {part.untyped_storage().data_ptr() for part in parts}
    assert len(shared) == 4  # small parts share a chunk, and the rest of a chunk is not mapped again


def test_a_new_decoder_holds_no_cache_and_a_released_one_generates_the_same_text() -> None:
    decoder = SpeculativeDecoder(fresh("llama"), tokenizer=tokenizer(), drafter="none")
    backend = decoder.target.backend
    assert isinstance(backend, Releasing)
    assert backend.cache.shape == (0, 0) and all(layer.keys is None for layer in backend.cache.layers)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = decoder.generate([5, 6, 7], params).token_ids
    assert backend.cache.shape > (0, 0)
    decoder.forget()
    backend.release()
    assert decoder.generate([5, 6, 7], params).token_ids == first


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_tensor_names_are_those_that_transformers_maps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import modeling_gguf_pytorch_utils as reader

    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    file = tmp_path / f"{name}.gguf"
    write_model(file, name)
    header = read_header(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(described(header)))
    calls: list[str] = []
    map_names = reader.get_gguf_hf_weights_map
    monkeypatch.setattr(reader, "get_gguf_hf_weights_map", lambda *a, **k: calls.append("") or map_names(*a, **k))
    with PackedAhead(header, block_kernels()) as ahead:
        tensors = gguf_tensors.GGUFTensors(header, model, ahead)
    num_calls = len(calls)
    expected = {theirs: ours for ours, theirs in map_names(model, tensors._processor).items()}
    assert {key: tensors._names[key] for key in model.state_dict()} == {k: expected[k] for k in model.state_dict()}
    assert num_calls <= 8 < len(calls)  # transformers maps names once per module
