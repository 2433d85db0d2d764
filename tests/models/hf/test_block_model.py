"""Models built of blocks: every embedding is a table, and what no kernel takes is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models.cpu.block_linear import BlockEmbedding, BlockPart
from slipstream.models.cpu.grouped_blocks import NotInBlocksError, number_format
from slipstream.models.hf.block_model import empty_model, fill
from tests.support.markers import needs_avx2
from tests.support.tiny_models import fresh

pytestmark = needs_avx2


class StoredTensors:
    """A `TensorSource` of tensors in float32."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensors[parameter]

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        raw = self.tensors[parameter].contiguous().view(torch.uint8).numpy()
        return BlockPart(number_format(torch.float32, shape[1]), shape, lambda a, b: raw[a:b], library)

    def parts(self, parameter: str, shape: tuple[int, int], library: Any) -> list[BlockPart]:
        return [self.part(parameter, shape, library)]

    table = part


class ByMask(nn.Embedding):
    """Is looked up by two arguments."""

    def forward(self, mask: Tensor, first: int) -> Tensor:  # type: ignore[override]
        return super().forward(mask + first)


def with_embedding(embedding: nn.Embedding) -> tuple[Any, StoredTensors]:
    """A model without weights that has a second embedding, and its tensors."""
    model = fresh("llama", intermediate_size=64)
    model.model.extra = embedding
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    empty = empty_model(lambda: model.config, RuntimeError)  # type: ignore[arg-type, return-value]
    with torch.device("meta"):
        empty.model.extra = type(embedding)(*embedding.weight.shape)
    return empty, StoredTensors(tensors)


def test_the_rows_of_a_second_embedding_are_looked_up_in_its_table() -> None:
    embedding = nn.Embedding(7, 32)
    model, tensors = with_embedding(embedding)
    filled, ids = fill(model, tensors, "int8"), torch.tensor([[6, 0, 3]])
    assert isinstance(filled.model.extra, BlockEmbedding) and isinstance(filled.model.embed_tokens, BlockEmbedding)
    assert torch.equal(filled.model.extra(ids), embedding(ids))
    assert torch.equal(filled.model.embed_tokens(ids)[0], tensors.tensors["model.embed_tokens.weight"][ids[0]])


def test_an_embedding_with_other_arguments_is_named() -> None:
    model, tensors = with_embedding(ByMask(7, 32))
    with pytest.raises(NotInBlocksError, match=r"model\.extra is an embedding whose forward takes more than token ids"):
        fill(model, tensors, "int8")
