"""A GGUF file as a model in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.errors import UsageError
from slipstream.models.cpu.kernel_libraries import block_kernels
from slipstream.models.hf.gguf_blocks import check_blocks, model_of_blocks
from slipstream.models.hf.gguf_description import described
from slipstream.models.hf.gguf_header import read_header
from slipstream.models.hf.gguf_packing import PackedAhead
from slipstream.models.loaded import LoadOptions


class GGUFFile:
    """See `block_loading.Quantised`."""

    def __init__(self, source: str, options: LoadOptions) -> None:
        if options.rounding != "none":
            raise UsageError(
                f"quantize={options.rounding!r}, but model {source!r} is quantised already, in GGUF; allowed: 'none'"
            )
        self.file = Path(source).expanduser()

    @property
    def name(self) -> str:
        """The file's."""
        return self.file.name

    def in_blocks(self, activations: str) -> tuple[str, Any]:
        """See `Quantised.in_blocks`."""
        header = read_header(self.file)
        header.check_model()
        check_blocks(header)
        with PackedAhead(header, block_kernels()) as ahead:
            folder = described(header)
            return str(folder), model_of_blocks(header, folder, activations, ahead)

    def unpacked(self, options: LoadOptions) -> None:
        """`weights.load_model` converts the file."""
