"""The structs that Python mirrors are those of the C compiler, and the types of its calls those of the C functions."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest

from slipstream.errors import SlipstreamError
from slipstream.models.cpu import structs
from slipstream.models.cpu.kernel_libraries import SIGNATURES, SOURCES
from slipstream.models.cpu.structs import MIRRORS, LinearStruct, check_layout

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """layout.c alone, which runs on any processor."""
    library_file = tmp_path_factory.mktemp("layout") / "layout.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(SOURCES / "layout.c"), "-o", str(library_file)], check=True)
    return ctypes.CDLL(str(library_file))


def test_sizes_offsets_and_constants_are_those_of_the_compiler(library: ctypes.CDLL) -> None:
    check_layout(library)
    compiled = structs._compiled(library)
    assert compiled["linear.data"] == 3 * ctypes.sizeof(ctypes.c_int64) and compiled["QUAD"] == 192
    assert sum(name.startswith("layer.") for name in compiled) == len(MIRRORS["layer"]._fields_)


class Longer(ctypes.Structure):
    """Has one field too many, at the end."""

    _fields_ = [*LinearStruct._fields_, ("more", ctypes.c_int64)]


class Swapped(ctypes.Structure):
    """Has the same size, but two fields are swapped."""

    _fields_ = [
        *LinearStruct._fields_[:3],
        LinearStruct._fields_[4],
        LinearStruct._fields_[3],
        *LinearStruct._fields_[5:],
    ]


class Shorter(ctypes.Structure):
    """Has one field too few."""

    _fields_ = [*LinearStruct._fields_[:-1]]


@pytest.mark.parametrize(
    ("mirror", "name"), [(Longer, "sizeof linear"), (Swapped, "linear.data"), (Shorter, "sizeof linear")]
)
def test_a_mirror_that_differs_is_an_error(library: ctypes.CDLL, mirror: type, name: str) -> None:
    with pytest.raises(SlipstreamError, match=f"{name} is [0-9]+ in C and [0-9]+ in Python"):
        check_layout(library, {**MIRRORS, "linear": mirror})


def test_a_constant_that_differs_is_an_error(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs, "CONSTANTS", {**structs.CONSTANTS, "PANEL": 16})
    with pytest.raises(SlipstreamError, match="PANEL is 32 in C and 16 in Python"):
        check_layout(library)


def test_a_struct_without_a_mirror_is_an_error(library: ctypes.CDLL) -> None:
    mirrors = {name: mirror for name, mirror in MIRRORS.items() if name != "norm"}
    with pytest.raises(SlipstreamError, match="sizeof norm is 32 in C and unknown in Python"):
        check_layout(library, mirrors)


def test_every_struct_of_the_header_is_mirrored() -> None:
    lines = (SOURCES / "structs.h").read_text().splitlines()
    assert {line.split()[1] for line in lines if line.startswith("struct ")} == set(MIRRORS)


def test_every_signature_is_that_of_the_c_function() -> None:
    codes = {"int64_t": "n", "uint64_t": "n", "int32_t": "i", "int": "i", "float": "f"}
    text = "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.[ch]")))
    defined = re.findall(rf"^(void|int64_t) ({'|'.join(SIGNATURES)})\(([^)]*)\) {{", text, re.MULTILINE)
    for returned, name, arguments in defined:
        kinds = ["p" if "*" in argument else codes[argument.split()[0]] for argument in arguments.split(",")]
        assert SIGNATURES[name] == "".join(kinds) + (">n" if returned == "int64_t" else ""), name
    assert {name for _, name, _ in defined} == set(SIGNATURES)
