"""Memory after loading a GGUF file: weights in chunks that parts share, and no cache left by trials."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.backend_capabilities import Releasing
from slipstream.models.cpu.huge_pages import ALIGNED, CHUNK, HugePages, address_in, as_tensor
from tests.support.tiny_models import fresh, tokenizer


def test_parts_of_memory_are_aligned_zeroed_and_do_not_overlap() -> None:
    memory = HugePages()
    sizes = [100, 64, 1, 4096, CHUNK // 2, CHUNK // 2, CHUNK + 5, 7]
    parts = [memory.take(size) for size in sizes]
    assert [len(part) for part in parts] == sizes
    assert all(address_in(part) % ALIGNED == 0 and not any(part[-4096:]) for part in parts)
    tensors = [as_tensor(part) for part in parts]
    for number, tensor in enumerate(tensors):
        tensor[:4096], tensor[-1] = number + 1, number + 1
    for number, part in enumerate(parts):
        assert set(part[:4096]) | {part[-1]} == {number + 1}
    assert len({id(part.obj) for part in parts}) == 4  # small parts share a chunk, and its rest is not mapped again
    assert len(as_tensor(memory.take(0))) == 0


@pytest.mark.slow
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
