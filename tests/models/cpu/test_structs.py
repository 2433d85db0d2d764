"""The structs and constants that Python reads are those of the C compiler, and the types of its calls those in C."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.models.cpu.kernel_libraries import SIGNATURES, SOURCES
from slipstream.models.cpu.structs import CONSTANTS, HEADER, STRUCTS, TYPES


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_sizes_offsets_and_constants_are_those_of_the_compiler(tmp_path: Path) -> None:
    expressions = dict(CONSTANTS)
    for name, struct in STRUCTS.items():
        expressions[f"sizeof(struct {name})"] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            expressions[f"offsetof(struct {name}, {field})"] = getattr(struct, field).offset
    expressions |= {block.name: block.code for block in TYPES} | {"FORMATS": len(TYPES)}
    checks = "".join(f'_Static_assert({expression} == {value}, "");\n' for expression, value in expressions.items())
    source = tmp_path / "layout.c"
    source.write_text(f'#include <stddef.h>\n#include "{HEADER}"\n{checks}')
    compiled = subprocess.run(["cc", "-fsyntax-only", str(source)], capture_output=True, text=True)
    assert not compiled.returncode, compiled.stderr


def test_every_struct_and_type_of_the_header_is_read() -> None:
    text = HEADER.read_text()
    assert set(re.findall(r"^struct (\w+)", text, re.MULTILINE)) == STRUCTS.keys()
    assert re.findall(r"^    X\((\w+),", text, re.MULTILINE) == [block.name for block in TYPES]
    assert CONSTANTS["QUAD"] == 192 and CONSTANTS["TWELVE_BITS"] == -1
    assert [name for name, *_ in STRUCTS["linear"]._fields_][:4] == ["format", "inputs", "outputs", "data"]


def test_every_signature_is_that_of_the_c_function() -> None:
    codes = {"int64_t": "n", "uint64_t": "n", "int32_t": "i", "int": "i", "float": "f"}
    text = "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.[ch]")))
    defined = re.findall(rf"^(void|int32_t|int64_t) ({'|'.join(SIGNATURES)})\(([^)]*)\) {{", text, re.MULTILINE)
    for returned, name, arguments in defined:
        kinds = ["p" if "*" in argument else codes[argument.split()[0]] for argument in arguments.split(",")]
        assert SIGNATURES[name] == "".join(kinds) + {"void": "", "int32_t": ">i", "int64_t": ">n"}[returned], name
    assert {name for _, name, _ in defined} == set(SIGNATURES)
