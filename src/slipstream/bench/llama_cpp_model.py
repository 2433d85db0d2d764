"""A GGUF file as llama.cpp computes it, through the C functions that llama-cpp-python binds.

Its high-level class is left out: it copies all logits of every token into an array of the whole context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.hf.model_files import is_gguf

PACKAGE = "llama-cpp-python"
NEEDED = "{} needs llama-cpp-python; run: pip install 'slipstream-lm[llama]'"
ERROR_LEVEL = 3  # GGML_LOG_LEVEL_ERROR
CONTEXT = 4096  # tokens that there is room for without asking
BATCH = 512  # tokens of a prompt in one call, llama.cpp's own default


def bindings(what: str) -> Any:
    """The module of C functions. what: who needs it, for the error where it is not installed."""
    try:
        import llama_cpp
    except ImportError as error:
        raise SlipstreamError(NEEDED.format(what)) from error
    _listen()
    return llama_cpp


def versions(what: str) -> dict[str, str]:
    """The binding's version and what its llama.cpp was compiled for."""
    said = bindings(what).llama_print_system_info().decode()
    return {PACKAGE: metadata.version(PACKAGE), "llama.cpp": said.strip(" |")}


def gguf_file(source: str, what: str) -> Path:
    """The file of a target that is one; `UsageError` for any other."""
    file = Path(source).expanduser()
    if not is_gguf(source):
        raise UsageError(f"{what} needs a .gguf file; target {source!r} is none")
    if not file.is_file():
        raise UsageError(f"target {source!r} is no file; allowed: a .gguf file")
    return file


class LlamaCppModel:
    """A loaded file and one sequence of tokens in llama.cpp's KV cache.

    file: the .gguf file; threads: of forwards of any width; what: who needs it, for errors. Everything else is
    llama.cpp's default: weights repacked for the processor, flash attention where it chooses, 16-bit keys and values.
    """

    def __init__(self, file: Path, threads: int, what: str = "llama.cpp") -> None:
        self._c = bindings(what)
        self.file, self._threads, self._context, self._room = file, threads, None, 0
        ERRORS.clear()
        self._model = self._c.llama_model_load_from_file(str(file).encode(), self._c.llama_model_default_params())
        if not self._model:
            raise SlipstreamError(f"llama.cpp cannot read {str(file)!r}: {_last_error()}")
        self.vocab_size: int = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        self.reserve(CONTEXT)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens; what the cache holds is lost if it must grow."""
        if tokens <= self._room:
            return
        self._free_context()
        given = self._c.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_ubatch = max(tokens, CONTEXT), BATCH, BATCH
        given.n_threads = given.n_threads_batch = self._threads
        ERRORS.clear()
        self._context = self._c.llama_init_from_model(self._model, given)
        if not self._context:
            raise SlipstreamError(f"llama.cpp has no room for {tokens} tokens of {self.file.name!r}: {_last_error()}")
        self._room = int(self._c.llama_n_ctx(self._context))

    def forward(self, tokens: Sequence[int], start: int, logits: bool = True) -> NDArray[np.float32]:
        """One forward of tokens that follow the first `start` of the cache; later ones are forgotten.

        At most `BATCH` tokens. Returns [tokens, vocab_size], a view that the next forward overwrites; with logits=False
        only the last token's, [1, vocab_size].
        """
        self._c.llama_memory_seq_rm(self._c.llama_get_memory(self._context), 0, start, -1)
        count = len(tokens)
        batch = self._c.llama_batch(
            n_tokens=count,
            token=(self._c.llama_token * count)(*tokens),
            logits=(ctypes.c_int8 * count)(*([int(logits)] * (count - 1)), 1),
        )
        if code := self._c.llama_decode(self._context, batch):
            raise SlipstreamError(
                f"llama.cpp's forward of {count} tokens at {start} failed with {code}: {_last_error()}"
            )
        rows = count if logits else 1
        found = self._c.llama_get_logits(self._context)  # those of the tokens asked for, one after the other
        scores: NDArray[np.float32] = np.ctypeslib.as_array(found, shape=(rows, self.vocab_size))
        return scores

    def read(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Read a prompt from an empty cache, `BATCH` tokens at a time; logits [vocab_size] after its last token."""
        for at in range(0, len(prompt), BATCH):
            rows = self.forward(prompt[at : at + BATCH], at, logits=False)
        last: NDArray[np.float32] = rows[0]
        return last

    def close(self) -> None:
        """Give the memory back."""
        self._free_context()
        if self._model:
            self._c.llama_model_free(self._model)
            self._model = None

    def _free_context(self) -> None:
        if self._context:
            self._c.llama_free(self._context)
            self._context, self._room = None, 0


ERRORS: list[str] = []  # what llama.cpp last complained of


@cache
def _listen() -> Any:
    """Keep llama.cpp's errors for messages of ours and silence the rest; the callback lives as long as the process."""
    import llama_cpp

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def heard(level: int, text: bytes, _: Any) -> None:
        if level == ERROR_LEVEL:
            ERRORS.append(text.decode(errors="replace").strip())

    llama_cpp.llama_log_set(heard, ctypes.c_void_p(0))
    return heard


def _last_error() -> str:
    return ERRORS[0] if ERRORS else "it does not say why"
