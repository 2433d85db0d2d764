"""Loads damaged GGUF files of every type: each runs, or is refused in one line.

python -m tests.models.weights.check_mutations 10000
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import BlockLinear
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.kernel_libraries import block_kernels, kernels
from slipstream.models.cpu.structs import FORMATS
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.quantized_models import load_in_blocks
from slipstream.models.weights.gguf_architectures import settings_of
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_tensors import PackedAhead, check_kind, check_single
from tests.support.gguf_architectures import CASES, architecture, write_case
from tests.support.gguf_files import write_model
from tests.support.gguf_mutations import MUTATIONS, Parts

ROOMY = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
MIXTURES = ("qwen3moe", "gpt-oss", "glm4moe", "lfm2moe", "deepseek2", "gemma4-experts")
IDS = torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(1))
WHOLE = 40  # of so many files one is loaded to the end, with its trials


def files(kind: str, folder: Path) -> Iterator[Path]:
    """The files that are damaged in this way."""
    if kind in ("experts", "metadata", "tensors"):
        for name in CASES if kind == "metadata" else MIXTURES:
            case = CASES[name]
            write_case(folder / f"{name}.gguf", architecture(name), case, "Q8_0" if case.in_blocks else "F32")
            yield folder / f"{name}.gguf"
    else:
        sizes = replace(CASES["qwen3moe"], settings=CASES["qwen3moe"].settings | ROOMY)
        write_case(folder / "mixture.gguf", "qwen3moe", sizes, "Q4_K")
        yield folder / "mixture.gguf"
    if kind == "numbers":
        for block in FORMATS:
            if block.number >= 0:
                write_model(folder / f"{block.name}.gguf", kinds=block.name)
                yield folder / f"{block.name}.gguf"


def refusal(file: Path, is_whole: bool) -> str | None:
    """The line that refuses a file; None if it runs. Any other exception is a fault."""
    try:
        quantized = None if is_whole else load_in_blocks(str(file), LoadOptions())
        model = load(str(file), LoadOptions()).model if quantized is None else quantized.model
        with torch.inference_mode():
            logits = model(input_ids=IDS, use_cache=False).logits
        assert logits.shape[:2] == IDS.shape
    except SlipstreamError as error:
        return one_line(error)
    return None


def one_line(error: SlipstreamError) -> str:
    line = str(error)
    assert line and "\n" not in line and len(line) < 5000, line
    return line


def readers_refusal(file: Path, is_whole: bool) -> str | None:
    """The line with which the readers alone refuse a file; None if its matrices could be packed and multiplied."""
    try:
        header = read_header(file)
        header.check_model()
        settings_of(header)
        check_single(header)
        for entry in header.tensors.values():
            if len(entry.shape) > 1:
                check_kind(entry)
        with PackedAhead(header, block_kernels()) as ahead:
            for name in header.tensors:
                if (part := ahead.part(name)) is not None:
                    BlockLinear([part], None, "int8")(torch.ones(2, part.inputs))
    except NotInBlocksError as error:
        return str(error)
    except SlipstreamError as error:
        return one_line(error)
    return None


def faults(
    kind: str, count: int, seed: int = 0, refusal: Callable[[Path, bool], str | None] = refusal
) -> tuple[list[str], Counter[str]]:
    """What is neither a refusal nor a model that runs, of `count` damaged files; and how many were what."""
    found, counted, random = [], Counter[str](), Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = [Parts.of(file) for file in files(kind, Path(folder))]
        file = Path(folder, "damaged.gguf")
        for number in range(count):
            file.write_bytes(MUTATIONS[kind](random, copy.deepcopy(whole[number % len(whole)])))
            try:
                line = refusal(file, number % WHOLE == WHOLE - 1)
                counted["runs" if line is None else "refused"] += 1
            except Exception as error:
                found.append("".join(traceback.format_exception(error)[-3:]))
                counted[f"{type(error).__name__}: {str(error)[:80]}"] += 1
    return found, counted


def main() -> None:
    count, kinds = int(sys.argv[1]), sys.argv[2:] or list(MUTATIONS)
    logging.getLogger("slipstream").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    wrong = 0
    block_kernels()  # compiled before the cache folder is another
    kernels()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SLIPSTREAM_MODELS"] = cache
        for kind in kinds:
            found, counted = faults(kind, count)
            print(kind, dict(counted), flush=True)
            for text in list(dict.fromkeys(found))[:20]:
                print(text, flush=True)
            wrong += len(found)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
