"""Packing that begins before PyTorch is imported, and that the loader takes over."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.models import quantized_models
from slipstream.models.cpu.kernel_libraries import block_kernels
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.quantized_models import GGUFFile
from slipstream.models.weights import gguf_conversion, gguf_packing
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_packing import PackedAhead, begun, packing_begins
from tests.support.gguf_architectures import CASES, write_case
from tests.support.gguf_files import write_model
from tests.support.markers import needs_avx2

pytestmark = [needs_avx2, pytest.mark.skipif(sys.platform == "win32", reason="Windows packs when PyTorch is there")]
START = """
import hashlib, sys
from slipstream.models.weights import gguf_packing
with gguf_packing.packing_begins(sys.argv[1]):
    (ahead,) = gguf_packing._begun.values()
    for thread in ahead._tasks:
        thread.result()
    print(hashlib.sha256(b"".join(ahead._panels.values())).hexdigest(), "torch" in sys.modules)
    from slipstream import SpeculativeDecoder
    def refuse(*arguments):
        raise AssertionError("packed twice")
    gguf_packing.PackedAhead.__init__ = refuse
    SpeculativeDecoder(sys.argv[1], draft="none")
    assert not gguf_packing._begun
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_model(tmp_path / "model.gguf", "llama", {"": "Q8_0"})
    return tmp_path / "model.gguf"


def digest(panels: Mapping[str, memoryview]) -> str:
    return hashlib.sha256(b"".join(panels.values())).hexdigest()


@pytest.mark.slow
def test_the_loader_takes_over_what_was_packed_before_pytorch_was_imported(file: Path) -> None:
    started = subprocess.run([sys.executable, "-c", START, str(file)], capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr
    with PackedAhead(read_header(file), block_kernels()) as ahead:
        for thread in ahead._tasks:
            thread.result()
        assert started.stdout.split() == [digest(ahead._panels), "False"]
        next(iter(ahead._panels.values()))[0] ^= 1
        assert digest(ahead._panels) not in started.stdout


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_packing, "sys", SimpleNamespace(modules={}))


@pytest.mark.usefixtures("without_torch")
def test_packing_stops_at_the_end_if_no_loader_takes_it_over(file: Path) -> None:
    with packing_begins(str(file)):
        (ahead,) = gguf_packing._begun.values()
    assert all(thread.done() for thread in ahead._tasks) and ahead._threads._shutdown
    assert begun(file) is None


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("case", ["truncated", "large", "float", "merged", "missing", "a name", "PyTorch is there"])
def test_nothing_is_packed_early_that_the_loader_may_not_want(
    case: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(file)
    if case == "truncated":
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 100)
    elif case == "large":
        monkeypatch.setattr(gguf_packing, "memory_bytes", lambda: 1000)
    elif case == "float":
        write_model(file, "llama", {"": "BF16"})
    elif case == "merged":  # keys and values are made from two tensors
        write_case(file, "deepseek2", CASES["deepseek2"], "Q8_0")
    elif case == "missing":
        source = str(tmp_path / "other.gguf")
    elif case == "a name":
        source = "smollm2"
    else:
        monkeypatch.undo()
    with packing_begins(source):
        assert not gguf_packing._begun
    if case in ("truncated", "missing"):
        with pytest.raises(SlipstreamError, match=r"is truncated|does not exist|no file"):
            load(source, LoadOptions())


@pytest.mark.parametrize("replaced", ["before the tokenizer is read", "before the vectors are read"])
def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(
    replaced: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(file, other)  # the same header, so that the two would mix without a word
    where, name = (GGUFFile, "_filled") if "vectors" in replaced else (quantized_models, "described")
    method = getattr(where, name)

    def later(*arguments: Any) -> Any:
        other.replace(file)
        return method(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, later)
        with pytest.raises(SlipstreamError, match="it was changed while it was read; allowed: a file that does not"):
            load(str(file), LoadOptions())
    assert bool(list((own_cache / "gguf").iterdir())) == ("vectors" in replaced)
    assert load(str(file), LoadOptions()).name == str(file)


def test_a_conversion_of_a_file_that_is_replaced_leaves_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(file, other)

    def later(*arguments: Any) -> Any:
        other.replace(file)
        return dequantized(*arguments)

    monkeypatch.setattr(gguf_conversion, "dequantized", later)
    with pytest.raises(SlipstreamError, match="it was changed while it was read"):
        gguf_conversion.convert_gguf(file)
    assert not [name for name in own_cache.iterdir() if name.is_dir()]
