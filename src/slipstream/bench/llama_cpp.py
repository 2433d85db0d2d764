"""llama.cpp's own greedy generation from the same file: plain, and with prompt lookup.

A GGUF file is computed through the C functions that llama-cpp-python binds. Its high-level class is not used: it
copies all logits of every token into an array of the whole context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.arms import LLAMA_LOOKUP, OF_LLAMA_CPP, Arm
from slipstream.checks import expanded
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.weights.hub_files import local_file
from slipstream.models.weights.model_files import is_gguf
from slipstream.sampling.params import SamplingParams

PACKAGE = "llama-cpp-python"
NEEDED = "{} needs llama-cpp-python; run: pip install llama-cpp-python"
ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR
CONTEXT = 4096  # tokens that the cache has room for from the start
BATCH = 512  # tokens of a prompt in one call, llama.cpp's own default
ERRORS: list[str] = []  # llama.cpp's error messages since they were last cleared
SUPPORTED = {"max_tokens", "stop_token_ids", "ignore_eos", "seed"}
NGRAM = 2  # tokens that prompt lookup compares, the binding's default


def bindings(what: str) -> Any:
    """The module of C functions. what: names the user of the module in the error if it is not installed."""
    try:
        import llama_cpp
    except ImportError as error:
        raise SlipstreamError(NEEDED.format(what)) from error
    _keep_errors()
    return llama_cpp


def versions(what: str) -> dict[str, str]:
    """The binding's version, and the features llama.cpp was compiled with."""
    version = bindings(what).llama_print_system_info().decode()
    return {PACKAGE: metadata.version(PACKAGE), "llama.cpp": version.strip(" |")}


def gguf_file(source: str, what: str) -> Path:
    """The .gguf file that a target names; `UsageError` for any other target."""
    file = expanded(local_file(source))
    if not is_gguf(str(file)):
        raise UsageError(f"{what} needs a .gguf file; target {source!r} is not one")
    if not file.is_file():
        raise UsageError(f"target {source!r} is not a file; allowed: a .gguf file")
    return file


class LlamaCppModel:
    """A loaded file and one sequence of tokens in llama.cpp's KV cache.

    file: the .gguf file. threads: of forwards of any width. what: names the user of the model in errors. Everything
    else is llama.cpp's default: weights repacked for the processor, flash attention where it chooses, 16-bit keys and
    values.
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
        """Make room for this many tokens; a cache that must grow loses its content."""
        if tokens <= self._room:
            return
        self._free_context()
        settings = self._c.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = max(tokens, CONTEXT), BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = self._threads
        ERRORS.clear()
        self._context = self._c.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SlipstreamError(f"llama.cpp has no room for {tokens} tokens of {self.file.name!r}: {_last_error()}")
        self._room = int(self._c.llama_n_ctx(self._context))

    def forward(self, tokens: Sequence[int], start: int, logits: bool = True) -> NDArray[np.float32]:
        """One forward of at most `BATCH` tokens after the first `start` in the cache; later ones are dropped.

        Returns [tokens, vocab_size], a view that the next forward overwrites; with logits=False only the last token's,
        [1, vocab_size].
        """
        self._c.llama_memory_seq_rm(self._c.llama_get_memory(self._context), 0, start, -1)
        count = len(tokens)
        batch = self._c.llama_batch(
            n_tokens=count,
            token=(self._c.llama_token * count)(*tokens),
            logits=(ctypes.c_int8 * count)(*([int(logits)] * (count - 1)), 1),
        )
        ERRORS.clear()
        if code := self._c.llama_decode(self._context, batch):
            raise SlipstreamError(
                f"llama.cpp's forward of {count} tokens at {start} failed with {code}: {_last_error()}"
            )
        rows = count if logits else 1
        logits_pointer = self._c.llama_get_logits(self._context)  # of the requested tokens, one after the other
        scores: NDArray[np.float32] = np.ctypeslib.as_array(logits_pointer, shape=(rows, self.vocab_size))
        return scores

    def read(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Read a prompt from an empty cache, `BATCH` tokens at a time; logits [vocab_size] after its last token."""
        for start in range(0, len(prompt), BATCH):
            rows = self.forward(prompt[start : start + BATCH], start, logits=False)
        last: NDArray[np.float32] = rows[0]
        return last

    def close(self) -> None:
        self._free_context()
        if self._model:
            self._c.llama_model_free(self._model)
            self._model = None

    def _free_context(self) -> None:
        if self._context:
            self._c.llama_free(self._context)
            self._context, self._room = None, 0


@cache
def _keep_errors() -> Any:
    """Keep llama.cpp's errors for our own messages and silence the rest; the callback lives as long as the process."""
    import llama_cpp

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(level: int, text: bytes, _: Any) -> None:
        if level == ERROR_LEVEL:
            ERRORS.append(text.decode(errors="replace").strip())

    llama_cpp.llama_log_set(on_log, ctypes.c_void_p(0))
    return on_log


def _last_error() -> str:
    return ERRORS[0] if ERRORS else "no reason given"


@dataclass
class Parts:
    """Seconds of reading prompts, drafting and verifying."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    forwards: int = 0  # number of forwards; a prompt counts as one

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the part `name`."""
        started = perf_counter()
        yield
        setattr(self, name, getattr(self, name) + perf_counter() - started)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds in the form of a run's record."""
        return {"prefill": self.prefill, "draft": self.draft, "verify": self.verify}


@dataclass(frozen=True)
class LlamaBaseline:
    """One arm of llama.cpp."""

    arm: Arm
    model: LlamaCppModel  # shared by all arms
    end_ids: tuple[int, ...]  # the target's, as for our own arms

    @cached_property
    def _lookup(self) -> Any:
        """The binding's own prompt lookup over the prompt and the output so far."""
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(max_ngram_size=NGRAM, num_pred_tokens=self.arm.num_draft_tokens)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> tuple[list[list[int]], Parts]:
        """The new token ids of each prompt, its end token included, and where the time went."""
        parts = Parts()
        return [self._text(prompt, options, parts) for prompt, options in zip(prompts, params, strict=True)], parts

    def _text(self, prompt: list[int], params: SamplingParams, parts: Parts) -> list[int]:
        ends = {*(() if params.ignore_eos else self.end_ids), *params.stop_token_ids}
        self.model.reserve(len(prompt) + params.max_tokens)
        with parts.timed("prefill"):
            parts.forwards += 1
            tokens = [*prompt, int(self.model.read(prompt).argmax())]
        limit = len(prompt) + params.max_tokens
        while len(tokens) < limit and tokens[-1] not in ends:
            draft: list[int] = []
            if self.arm.baseline == LLAMA_LOOKUP:
                with parts.timed("draft"):
                    draft = self._lookup(np.array(tokens, dtype=np.intc)).tolist()[: limit - len(tokens) - 1]
            with parts.timed("verify"):
                choices = self.model.forward([tokens[-1], *draft], len(tokens) - 1).argmax(-1).tolist()
            parts.forwards += 1
            for chosen, drafted in zip(choices, [*draft, None], strict=True):
                tokens.append(chosen)
                if chosen != drafted or chosen in ends:
                    break
        return tokens[len(prompt) :]


def require_llama(arms: Sequence[Arm], target: str) -> None:
    """Raise if an arm of llama.cpp cannot run: the target is not a .gguf file, or llama.cpp is not installed."""
    for arm in arms:
        if arm.baseline in OF_LLAMA_CPP:
            gguf_file(target, f"arm {arm.name!r}")
            bindings(f"arm {arm.name!r}")
