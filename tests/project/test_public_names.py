"""The public interface is the one listed in `public_names.txt`, so that every change to it shows in that file.

`python -m tests.project.test_public_names > tests/project/public_names.txt` rewrites the file.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from slipstream.sampling.params import SamplingOptions, SamplingParams

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("public_names.txt")
MODULES = ("slipstream", "slipstream.integrations.reference")
STREAMS = ("Stream", "AsyncStream")  # what `stream` and `astream` return


def listing() -> str:
    """Every public name with its signature, and its members with theirs."""
    lines = "\n".join(line for module in MODULES for line in _module(module))
    return re.sub(r" object at 0x\w+", "", lines) + "\n"


def _module(name: str) -> Iterator[str]:
    module = import_module(name)
    yield f"# {name}"
    for public in sorted(module.__all__):
        yield from _object(public, getattr(module, public))
    if name == "slipstream":
        for public in STREAMS:
            yield from _object(public, getattr(import_module("slipstream.text.results"), public))
    yield ""


def _object(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, type):
        yield f"{name}{inspect.signature(value)}" if callable(value) else name
        return
    bases = [
        base.__name__ for base in value.__mro__[1:] if base.__module__.startswith("slipstream") or base in BUILT_IN
    ]
    yield f"{name}({', '.join(bases)})" if bases else name
    is_protocol = getattr(value, "_is_protocol", False)
    if not is_protocol and not issubclass(value, Exception):
        yield f"    __init__{inspect.signature(value.__init__)}"
    for member in _members(value):
        yield f"    {_described(value, member)}"


BUILT_IN = (Exception, ValueError, TypeError)


def _members(cls: type) -> list[str]:
    bases = [base for base in cls.__mro__ if base.__module__.startswith("slipstream")]
    names = {name for base in bases for name in (*vars(base), *_annotations(base))}
    return sorted(name for name in names if not name.startswith("_"))


def _described(cls: type, member: str) -> str:
    value = inspect.getattr_static(cls, member, None)
    if isinstance(value, property):
        return f"{member}: {inspect.signature(value.fget).return_annotation}" if value.fget else member
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {member}{inspect.signature(value.__func__)}"
    if inspect.isfunction(value):
        return f"{member}{inspect.signature(value)}"
    types = next((_annotations(base) for base in cls.__mro__ if member in _annotations(base)), {})
    return f"{member}: {types[member]}" if member in types else member


def _annotations(cls: type) -> dict[str, Any]:
    return inspect.get_annotations(cls)


def test_the_public_interface_equals_public_names_txt() -> None:
    current = listing()
    print(current)
    assert current.splitlines() == FILE.read_text(encoding="utf-8").splitlines(), (
        "the public interface has changed; if that is meant, say so in the documentation and write the file anew: "
        "python -m tests.project.test_public_names > tests/project/public_names.txt"
    )


def test_keywords_of_generate_are_the_fields_of_sampling_params() -> None:
    declared = {name: argument.__forward_arg__ for name, argument in SamplingOptions.__annotations__.items()}
    assert declared == SamplingParams.__annotations__ and not SamplingOptions.__required_keys__


def test_every_public_name_of_a_decoder_exists_and_has_a_docstring() -> None:
    decoder = SpeculativeDecoder("toy", reproducible=True)
    names = [name for name in dir(decoder) if not name.startswith("_")]
    for name in names:
        assert hasattr(decoder, name), name
        member = inspect.getattr_static(SpeculativeDecoder, name, None)
        assert name in _annotations(SpeculativeDecoder) or (member.__doc__ or "").strip(), name
    assert {"generate", "stream", "tokenizer", "rows", "run", "scheduler", "result", "config"} <= set(names)


TYPED = """
import asyncio
from slipstream import SamplingParams, SpeculativeDecoder

decoder = SpeculativeDecoder("toy")
reveal_type(decoder.generate("x").text)
reveal_type(decoder.generate("x", temperature=0.5, max_tokens=3))
reveal_type(decoder.generate(["x", "y"], SamplingParams(), chat=False)[0].text)
reveal_type(decoder.chat([{"role": "user", "content": "x"}], max_tokens=3))
reveal_type(decoder.stream("x", seed=1).result)
reveal_type(decoder.decode(decoder.encode("x")))
decoder.generate("x", temprature=0.5)
decoder.generate("x", temperature="warm")
"""


@pytest.mark.slow
def test_mypy_infers_return_types_and_finds_wrong_arguments(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    ended = subprocess.run(command, capture_output=True, text=True)
    report = ended.stdout
    messages = [line.partition("typed.py:")[2] for line in report.splitlines()]
    types = [line.split('"')[1].rpartition(".")[2] for line in messages if "Revealed type" in line]
    assert types == ["str", "Result", "str", "Result", "Result", "str"], report + ended.stderr
    wrong = {line.partition(":")[0]: line for line in reversed(messages) if ": error: " in line}
    assert ended.returncode == 1 and len(wrong) == 2, report
    assert any('did you mean "temperature"?' in line for line in wrong.values())


if __name__ == "__main__":
    print(listing(), end="")
