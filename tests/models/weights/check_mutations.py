"""Loads damaged files: each runs with finite logits, or is refused in one line.

    python -m tests.models.weights.check_mutations 10000                   # of each reader
    python -m tests.models.weights.check_mutations 10000 dense tokenizer   # of these
    python -m tests.models.weights.check_mutations 1 dense --first 4711    # one of them again; --keep FOLDER keeps it
    CC="gcc -fsanitize=address,undefined -fno-sanitize-recover=all" ASAN_OPTIONS=detect_leaks=0 \\
        LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" python -m ...  # compiles

A damaged file is determined by its reader, the seed and its number. Processes of their own load them, so that a crash,
a file that takes longer than `SECONDS` or one that takes more than `MEMORY` is a fault of one number.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import slipstream.models.pretrained  # noqa: F401 (what the processes would import each)
from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import MODEL_ERRORS, SlipstreamError
from slipstream.models.cpu import huge_pages
from slipstream.models.cpu.kernel_libraries import block_kernels, kernels
from slipstream.models.cpu.structs import FORMATS
from slipstream.models.hf.trials import a_few_logits, a_few_tokens, check_logits, difference
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.quantized_models import load_in_blocks
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.tokenizer_loading import load_tokenizer
from slipstream.reproducibility import calibration_cache
from slipstream.reproducibility.calibration import Calibration
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.tokenizer import ChatForm
from tests.support.chat_templates import REAL, TEMPLATES
from tests.support.file_mutations import change_bytes, change_json_text, change_safetensors, change_template
from tests.support.gguf_architectures import CASES, architecture, model_of, write_case
from tests.support.gguf_files import byte_level, write_chat_model, write_model
from tests.support.gguf_mutations import MUTATIONS, Parts
from tests.support.quantized_files import write_checkpoint

SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else None  # files in memory
SECONDS, MEMORY, BATCH = 20, 3 << 30, 100  # for one file; bytes; files of a process
WHOLE = 40  # of so many files one is loaded to the end, with its trials
COMPARED = 10  # of so many that run, one is compared with transformers' forward
CLOSE = 0.1  # see `trials.difference`
ROOMY = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
TEXTS = ("Hello  world,\n12345 it's", " \u00e9\u4e2d\U0001f600\u0301", "<|im_end|><start>user</s> a b", "")
RECURRENT = ("lfm2", "lfm2moe", "qwen35", "qwen35moe", "granitehybrid", "granitehybrid-dense")
MIXTURES = (
    *("llama-mixtral", "qwen3moe", "qwen2moe", "olmoe", "granitemoe", "gpt-oss", "glm4moe", "deepseek2"),
    *("deepseek2-joint", "gemma4-experts"),
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "content": "t", "tool_call_id": "abcdefghi", "name": "f"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
]


@dataclass(frozen=True)
class Reader:
    """A reader of files. samples: makes whole ones in a folder; damage: writes a damaged one into a folder; refusal:
    the line that refuses it, None if it runs. Any other exception is a fault."""

    samples: Callable[[Path], Sequence[Any]]
    damage: Callable[[Random, Any, Path], None]
    refusal: Callable[[Path, int], str | None]


def run(source: str, number: int, rounding: str = "none") -> str | None:
    """The line that refuses a model; None if it gives finite logits and, of some, transformers' logits.

    Most are not loaded to the end, with trials.
    """
    options = LoadOptions(rounding=rounding)
    try:
        quantized = None if number % WHOLE == 0 else load_in_blocks(source, options)
        model = load(source, options).model if quantized is None else quantized.model
        try:
            logits = logits_of(model)
        except MODEL_ERRORS:  # of transformers' code; the trials of a whole load meet them, too
            load(source, options)
            raise
        if quantized is not None:
            if not is_finite(logits):
                loaded = load(source, options)
                assert is_finite(a_few_logits(loaded.backend)), "loads, although logits are not finite"
                return None
            if number % COMPARED == 1 and quantized.in_blocks and rounding == "none":
                exact = load_in_blocks(source, LoadOptions(activations="int15"))
                assert exact is not None
                plain = load(source, LoadOptions(dtype="float32", fast=False)).model
                error = difference(logits_of(exact.model), logits_of(plain))
                assert error < CLOSE, f"logits differ from transformers' by {error:.3f}"
    except SlipstreamError as error:
        return checked_line(error)
    return None


def is_finite(logits: Tensor) -> bool:
    try:
        check_logits(logits)
    except SlipstreamError:
        return False
    return True


def logits_of(model: Any) -> Tensor:
    """Logits of the tokens of the trials."""
    ids = a_few_tokens(model.config.get_text_config().vocab_size, torch.device("cpu"))
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    assert logits.shape[:2] == ids.shape, logits.shape
    return logits


def checked_line(error: SlipstreamError) -> str:
    """The message of a refusal, which must be one line of reasonable length."""
    line = str(error)
    assert line and "\n" not in line and len(line) < 5000, line
    return line


# GGUF files


def gguf_samples(names: Sequence[str]) -> Callable[[Path], list[Parts]]:
    """Files of these architectures in blocks, the first of every type of blocks too."""

    def samples(folder: Path) -> list[Parts]:
        return [Parts.of(file) for file in _files(names, folder)]

    return samples


def _files(names: Sequence[str], folder: Path) -> Iterator[Path]:
    for name in names:
        case = CASES[name]
        write_case(folder / f"{name}.gguf", architecture(name), case, "Q8_0" if case.in_blocks else "F32")
        yield folder / f"{name}.gguf"
    name = next(name for name in ("llama", "qwen3moe", "qwen35") if name in names)
    sizes = replace(CASES[name], settings=CASES[name].settings | ROOMY)
    for block in FORMATS:
        if block.number >= 0 and name == "llama":
            write_model(folder / f"{block.name}.gguf", kinds=block.name, num_hidden_layers=1)
            yield folder / f"{block.name}.gguf"
    if name == "qwen3moe":
        write_case(folder / "K.gguf", name, sizes, "Q4_K")
        yield folder / "K.gguf"


def damage_gguf(random: Random, parts: Parts, folder: Path) -> None:
    kinds = [kind for kind in MUTATIONS if kind != "experts" or any(b"_exps." in t.name for t in parts.tensors)]
    kind = random.choice(kinds)
    (folder / "damaged.gguf").write_bytes(MUTATIONS[kind](random, parts.copy()))


def gguf_refusal(folder: Path, number: int) -> str | None:
    return run(str(folder / "damaged.gguf"), number)


# checkpoints


def checkpoint_samples(folder: Path) -> list[dict[str, bytes]]:
    """Checkpoints in bfloat16 of many families."""
    samples = []
    names = [name for name in CASES if name not in ("phi3-longrope", "gemma4", "gemma4-small")]
    for name in names:
        config = CASES[name].config()
        model_of(config).bfloat16().save_pretrained(folder / name)
        samples.append(_content(folder / name))
    return samples


QUANTIZED: tuple[dict[str, Any], ...] = (
    {"form": "gptq", "group": 64},
    {"form": "gptq", "group": 0, "symmetric": True, "bits": 8},
    {"form": "gptq_v2", "group": 64, "bits": 2},
    {"form": "gptq", "group": 64, "bits": 3},
    {"form": "awq", "group": 64},
    {"form": "compressed-tensors", "group": 64},
    {"form": "compressed-tensors", "group": 64, "name": "qwen3_moe"},
    {"form": "torchao", "group": 64},
    {"form": "int-quantized", "group": 0, "bits": 8},
    {"form": "float-quantized"},
    {"form": "fp8"},
    {"form": "fbgemm_fp8"},
    {"form": "modelopt"},
    {"form": "gptq", "group": 64, "name": "mixtral"},
)


def quantized_samples(folder: Path) -> list[dict[str, bytes]]:
    """Checkpoints that each method has quantized."""
    samples = []
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
    for number, settings in enumerate(QUANTIZED):
        write_checkpoint(folder / f"{number}", **settings, **({} if "name" in settings else sizes))
        samples.append(_content(folder / f"{number}"))
    return samples


def _content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def damage_folder(random: Random, content: dict[str, bytes], folder: Path) -> None:
    """A file of a checkpoint is damaged: its configuration or its tensors, mostly."""
    changed = random.choice([*content, *["model.safetensors", "config.json"] * 3])
    for name, data in content.items():
        if name == changed:
            data = (change_safetensors if name.endswith(".safetensors") else change_json_text)(random, data)
        (folder / name).write_bytes(data)


def checkpoint_refusal(folder: Path, number: int) -> str | None:
    return run(str(folder), number, "int8" if number % 2 else "none")


def quantized_refusal(folder: Path, number: int) -> str | None:
    return run(str(folder), number)


# tokenizers and templates


def tokenizer_samples(folder: Path) -> list[Parts]:
    """Vocabularies of each kind."""
    added = {"<start>": 3, "<end>": 3, "<|im_end|>": 4, "  ": 4}
    writers = [
        byte_level(pre, added, bos="<start>", eos="<end>") for pre in ("smollm", "llama3", "qwen2", "deepseek-v3")
    ]
    writers += [_sentencepiece("llama"), _sentencepiece("gemma4")]
    samples = []
    for number, tokenizer in enumerate(writers):
        is_gemma = number == len(writers) - 1
        file = folder / f"{number}.gguf"
        write_model(file, "gemma3" if is_gemma else "llama", tokenizer=tokenizer, num_hidden_layers=1)
        parts = Parts.of(file)
        # without the tensors, and with an output layer no larger than needed
        parts.tensors.clear()
        parts.data.clear()
        parts.values = [
            item for item in parts.values if item[0].startswith(b"tokenizer.") or item[0] == b"general.architecture"
        ]
        samples.append(parts)
    return samples


def _sentencepiece(kind: str) -> Callable[[Any], None]:
    def write(writer: Any) -> None:
        pieces = ["\u2581", "a", "b", "c", "ab", "\u2581a", "abc", "\u2581\u2581", "\u00e9", "</s>"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces[:-1], "<turn|>"]
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 1), 3])
        if kind != "llama":
            writer.add_token_merges(["a b", "\u2581 a", "ab c"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATES["plain"])

    return write


def damage_tokenizer(random: Random, parts: Parts, folder: Path) -> None:
    kind = random.choice(("header", "metadata", "metadata", "metadata"))
    (folder / "damaged.gguf").write_bytes(MUTATIONS[kind](random, parts.copy()))


def tokenizer_refusal(folder: Path, number: int) -> str | None:
    file = folder / "damaged.gguf"
    try:
        tokenizer = load_tokenizer(str(file), str(described(read_header(file))))
        if tokenizer is None:
            return "no tokenizer"
        size = len(tokenizer.vocabulary())
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert all(token >= 0 for token in ids), ids
            tokenizer.decode(ids)
        tokenizer.bytes_of(size - 1)
        return _rendered(tokenizer)
    except SlipstreamError as error:
        return checked_line(error)


def _rendered(tokenizer: HFTokenizer) -> str | None:
    """Render conversations and find the answers' form, as a server does."""
    line = None
    if tokenizer.has_chat_template:
        for messages in (MESSAGES[:2], MESSAGES[1:2], MESSAGES):
            for tools in ([], TOOLS):
                try:
                    tokenizer.chat_text(messages, ChatForm(tools=tools))
                except SlipstreamError as error:
                    line = checked_line(error)
        tokenizer.answer_form()
        tokenizer.call_text()
        tokenizer.template_variables()
    return line


def template_samples(folder: Path) -> list[str]:
    return [*TEMPLATES.values(), *REAL.values()]


def damage_template(random: Random, template: str, folder: Path) -> None:
    (folder / "template.jinja").write_text(change_template(random, template), encoding="utf-8")


def template_refusal(folder: Path, number: int) -> str | None:
    from tests.support.tiny_models import byte_tokenizer

    backend = byte_tokenizer(TEMPLATES["plain"]).backend_tokenizer
    template = (folder / "template.jinja").read_text(encoding="utf-8")
    try:
        return _rendered(HFTokenizer(FileTokenizer(backend, {"eos_token": "<eos>"}, template)))
    except SlipstreamError as error:
        return checked_line(error)


# files of the cache folder


@dataclass(frozen=True)
class Cached:
    """A model, and what a run of it has left in the cache folder beside it."""

    model: Path
    content: dict[str, bytes]

    def write(self, changed: str = "", data: bytes = b"") -> None:
        """Restore the cache folder. changed: a file that gets other data."""
        shutil.rmtree(self.model.parent / "cache", ignore_errors=True)
        for name, whole in self.content.items():
            file = self.model.parent / "cache" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data if name == changed else whole)


def cache_samples(folder: Path) -> list[Cached]:
    """Calibration, trials and tokenizer; of the second model panels, too."""
    samples = []
    for place in (folder / "whole", folder / "large"):
        place.mkdir()
        write_chat_model(place / "model.gguf", num_hidden_layers=1)
        _generated(place / "model.gguf")
        files = [file for file in (place / "cache").rglob("*") if file.is_file() and file.suffix != ".lock"]
        samples.append(
            Cached(place / "model.gguf", {str(file.relative_to(place / "cache")): file.read_bytes() for file in files})
        )
    return samples


def damage_cache(random: Random, cached: Cached, folder: Path) -> None:
    name = random.choice(list(cached.content))
    data, is_json = cached.content[name], name.endswith(".json")
    cached.write(name, (change_json_text if is_json else change_bytes)(random, data))
    (folder / "damaged").write_text(json.dumps([str(cached.model), name]))


def cache_refusal(folder: Path, number: int) -> str | None:
    model, name = json.loads((folder / "damaged").read_text())
    try:
        text = _generated(Path(model))
    except SlipstreamError as error:
        return checked_line(error)
    is_measured = name.startswith(("calibration", "trials"))
    assert not is_measured or text == EXPECTED[model], f"another text: {text}, not {EXPECTED[model]}"
    return None


EXPECTED = dict[str, list[int]]()  # texts by model, before anything is damaged
MEASURED = list[Calibration]()


def _generated(model: Path) -> list[int]:
    """A text; only the first run of all is calibrated."""
    changed = {"SLIPSTREAM_MODELS": str(model.parent / "cache")}
    changed |= {"SLIPSTREAM_MEMORY": "0.0004"} if model.parent.name == "large" else {}
    before, calibrate = dict(os.environ), calibration_cache.calibrate

    def remembered(*arguments: Any) -> Calibration:
        if not MEASURED:
            MEASURED.append(calibrate(*arguments))
        return MEASURED[0]

    os.environ |= changed
    calibration_cache.calibrate = remembered
    try:
        with SpeculativeDecoder(str(model), drafter="ngram", num_draft_tokens=3) as decoder:
            text = decoder.generate("ab ab ab ab", SamplingParams(temperature=0.0, max_tokens=8)).token_ids
    finally:
        calibration_cache.calibrate = calibrate
        os.environ.clear()
        os.environ.update(before)
    EXPECTED.setdefault(str(model), list(text))
    return list(text)


DENSE = [name for name in CASES if name not in (*MIXTURES, *RECURRENT)]
READERS = {
    "dense": Reader(gguf_samples(DENSE), damage_gguf, gguf_refusal),
    "mixture": Reader(gguf_samples(MIXTURES), damage_gguf, gguf_refusal),
    "hybrid": Reader(gguf_samples(RECURRENT), damage_gguf, gguf_refusal),
    "checkpoint": Reader(checkpoint_samples, damage_folder, checkpoint_refusal),
    "quantized": Reader(quantized_samples, damage_folder, quantized_refusal),
    "tokenizer": Reader(tokenizer_samples, damage_tokenizer, tokenizer_refusal),
    "template": Reader(template_samples, damage_template, template_refusal),
    "cache": Reader(cache_samples, damage_cache, cache_refusal),
}


# processes


@dataclass
class Report:
    """What became of damaged files."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # each with the file's number


def check(name: str, count: int, seed: int = 0, first: int = 0, keep: Path | None = None) -> Report:
    """Load `count` damaged files of a reader. keep: a folder for the last of them."""
    reader, report = READERS[name], Report()
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        samples = reader.samples(Path(folder))
        number = first
        while number < first + count:
            numbers = range(number, min(number + BATCH, first + count))
            with tempfile.TemporaryDirectory(dir=SHARED) as scratch:
                for number, kind, text in _in_process(reader, name, samples, seed, numbers, Path(scratch)):
                    report.counts[kind] += 1
                    if kind not in ("runs", "refused"):
                        report.faults.append(f"{name} --seed {seed} --first {number}: {kind}: {text}")
                if keep is not None:
                    shutil.copytree(Path(scratch, "files"), keep, dirs_exist_ok=True)
            number += 1
    return report


def _in_process(
    reader: Reader, name: str, samples: Sequence[Any], seed: int, numbers: range, scratch: Path
) -> Iterator[tuple[int, str, str]]:
    """Number, result and message of each file until one ends the process."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        with os.fdopen(theirs, "w") as output:
            _limit_memory()
            for number in numbers:
                signal.setitimer(signal.ITIMER_REAL, SECONDS)
                output.write(json.dumps([number, *_result(reader, name, samples, seed, number, scratch)]) + "\n")
                output.flush()
        os._exit(0)
    os.close(theirs)
    last = numbers.start - 1
    with os.fdopen(ours) as results:
        for line in results:
            last, kind, text = json.loads(line)
            yield last, kind, text
    _, status = os.waitpid(child, 0)
    if last < numbers[-1]:
        ended = os.waitstatus_to_exitcode(status)
        what = f"takes longer than {SECONDS} s" if ended == -signal.SIGALRM else f"ends the process: {ended}"
        yield last + 1, what, ""


def _result(reader: Reader, name: str, samples: Sequence[Any], seed: int, number: int, scratch: Path) -> list[str]:
    """ "runs", "refused" or the kind of the fault, and a message."""
    random, place = Random(f"{name} {seed} {number}"), scratch / "files"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    reader.damage(random, samples[number % len(samples)], place)
    os.environ["SLIPSTREAM_MODELS"] = str(scratch / "cache")
    try:
        line = reader.refusal(place, number)
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-3:])
        return [f"{type(error).__name__}: {str(error)[:80]}", trace]
    return ["runs" if line is None else "refused", line or ""]


def _limit_memory() -> None:
    """The sanitizers reserve more address space than there is memory, and have a limit of their own."""
    import resource  # not on Windows

    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="damaged files of each reader")
    parser.add_argument("readers", nargs="*", default=[], help=", ".join(READERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--keep", type=Path, help="folder for the last damaged file")
    arguments = parser.parse_args()
    prepare()
    num_faults = 0
    for name in arguments.readers or READERS:
        start = time.perf_counter()
        report = check(name, arguments.count, arguments.seed, arguments.first, arguments.keep)
        seconds = (time.perf_counter() - start) / arguments.count
        print(f"{name} --seed {arguments.seed}: {dict(report.counts)}, {seconds * 1e3:.0f} ms each", flush=True)
        for text in report.faults[:40]:
            print(text, flush=True)
        num_faults += len(report.faults)
    sys.exit(num_faults > 0)


def prepare() -> None:
    """Compile kernels before the cache folder is another, and keep to one thread: no other survives a fork."""
    logging.getLogger("slipstream").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    block_kernels()
    kernels()
    huge_pages.HugePages.take = huge_pages.SmallPages.take  # quicker, and the address sanitizer sees their ends


if __name__ == "__main__":
    main()
