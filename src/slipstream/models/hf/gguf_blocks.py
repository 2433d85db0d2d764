"""A model that computes with the blocks of its GGUF file: nothing is unpacked, and no second file is written.

`block_model.py` builds it; `gguf_description.py` has the configuration and the tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.models.hf.block_model import check_kernels, empty_model, fill
from slipstream.models.hf.gguf_conversion import unreadable_gguf
from slipstream.models.hf.gguf_header import GGUFHeader
from slipstream.models.hf.gguf_packing import PackedAhead
from slipstream.models.hf.gguf_rope import scale_positions
from slipstream.models.hf.gguf_tensors import GGUFTensors, check_kind


def check_blocks(header: GGUFHeader) -> None:
    """Raise `NotInBlocksError` where the kernels are missing or a matrix is of a type that they do not take."""
    check_kernels()
    for entry in header.tensors.values():
        if len(entry.shape) > 1:
            check_kind(entry)


def model_of_blocks(header: GGUFHeader, folder: Path, activations: str, ahead: PackedAhead) -> Any:
    """The model of a file, from its configuration in `folder`; see `block_model.fill`.

    header: one that both checks passed. activations: "int8" or "int15". ahead: its matrices.
    """

    def config() -> Any:
        from transformers import AutoConfig

        made = AutoConfig.from_pretrained(folder)
        made.tie_word_embeddings = "output.weight" not in header.tensors
        scale_positions(made, header)
        return made

    model = empty_model(config, lambda error: unreadable_gguf(header.file, error))
    tensors = GGUFTensors(header, model, ahead)
    filled = fill(model, tensors, activations)
    tensors.check_unused()
    return filled
