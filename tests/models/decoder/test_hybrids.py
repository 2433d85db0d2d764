"""Hybrids with all layers in one call: drafts, widths, rows, threads and instructions change no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.cpu import compiled_layers
from slipstream.models.cpu.processor import ISA, isas_of, processor
from slipstream.models.decoder.around_layers import layer_inputs
from slipstream.models.decoder.cache import SlotCache
from slipstream.models.decoder.planned_model import PlannedModel
from slipstream.models.decoder.recurrence import RecurrentStates, Segment
from slipstream.models.hf.backend import HFBackend
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import read_header
from slipstream.reproducibility.shape_trials import Trials, spot_checks
from tests.models.decoder.test_families import save_model
from tests.support.architecture_checks import PROMPTS
from tests.support.gguf_architectures import CASES, architecture, write_case
from tests.support.markers import mostly_exhaustive, needs_kernels
from tests.support.quantized_files import kl
from tests.support.queued_texts import QueuedTexts

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # that attend to latents
MIXTURES = ("lfm2_moe", "qwen3_5_moe_text", "granitemoehybrid-experts", "gemma4_text-experts", *LATENT, "qwen3_next")
HYBRIDS = ("lfm2", "qwen3_5_text", "granitemoehybrid", *MIXTURES, "gemma4_text-small", "lfm3", "afmoe")
SOME_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8) | dict.fromkeys(
    ("num_experts_per_tok", "top_k_experts"), 3
)
NOT_ROUNDED = ("qwen3_next", "int4")  # its layers are called one by one
FILE = "file"  # in place of a rounding: a GGUF file, whose model is built from its plan
PLANNED = ("qwen35", "qwen35moe", "gemma4", "gemma4-experts", "gemma4-small")
PAIRS = [pair for pair in product(HYBRIDS, ("none", "int4")) if pair != NOT_ROUNDED]
PAIRS += [(name, FILE) for name in PLANNED]
LENGTH, ROWS, WRONG = 64, 8, 5
WIDTHS = (2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 32, 33, 48, 63, 64)  # around those for which kernels differ
TEXTS = torch.randint(3, 250, (ROWS, LENGTH + ROWS), generator=torch.Generator().manual_seed(9))

pytestmark = [
    pytest.mark.slow,
    needs_kernels,
]
# each kind of layer is in one of the others
ALIKE = {
    *("granitemoehybrid", "deepseek_v2", "lfm2_moe", "glm4_moe_lite", "qwen3_5_moe_text", "gemma4_text-small"),
    *("lfm3", "afmoe", "qwen35moe", "gemma4"),
}
each_pair = pytest.mark.parametrize(
    ("name", "rounding"), mostly_exhaustive(PAIRS, *(pair for pair in PAIRS if pair[0] not in ALIKE))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all models."""
    path = tmp_path_factory.mktemp("hybrids")
    for name in HYBRIDS:
        save_model(name, path / name, **(SOME_EXPERTS if name in MIXTURES else {}))
    for name in PLANNED:
        write_file(path / f"{name}.gguf", name)
    return path


def write_file(path: Path, name: str) -> None:
    pytest.importorskip("gguf")
    case = CASES[name]
    write_case(path, architecture(name), replace(case, settings=case.settings | FILES[name]), "Q8_0")


@cache
def shared(folder: Path, name: str, rounding: str) -> HFBackend:
    """A model that each test reads from its first token on."""
    return stacked(folder, name, rounding)


def stacked(folder: Path, name: str, rounding: str) -> HFBackend:
    file, rounding = (f"{name}.gguf", "none") if rounding == FILE else (name, rounding)
    loaded = load(str(folder / file), LoadOptions(rounding=rounding))
    backend = loaded.backend
    assert isinstance(backend, HFBackend) and backend.stack is not None and backend.shape_independent
    assert isinstance(loaded.model, PlannedModel) == (file != name)
    backend.reserve(ROWS, 2 * LENGTH)
    return backend


def read(backend: HFBackend, width: int) -> Tensor:
    """Logits [64, V] of a text that is read in forwards of this many tokens, and of fewer at its end."""
    tokens = TEXTS[:1, :LENGTH]
    parts = [
        backend.forward(tokens[:, start : start + width], [start], first_slot=0, logits=True)
        for start in range(0, LENGTH, width)
    ]
    return torch.cat(parts, 1)[0]


def draft(backend: HFBackend) -> Tensor:
    """The same with drafts of which some are rejected."""
    start, parts = 0, list[Tensor]()
    for kept in (0, 5, 2, 4, 1, 3) * LENGTH:
        if start + WRONG >= LENGTH:
            return torch.cat([*parts, read_from(backend, start)])
        right, wrong = TEXTS[:1, start : start + 1 + kept], TEXTS[1:2, start + 1 + kept : start + 1 + WRONG]
        backend.mark_final(0, start)
        logits = backend.forward(torch.cat([right, wrong], 1), [start], first_slot=0, logits=True)
        parts.append(logits[0, : 1 + kept])
        start += 1 + kept
    raise AssertionError


def read_from(backend: HFBackend, start: int) -> Tensor:
    return backend.forward(TEXTS[:1, start:LENGTH], [start], first_slot=0, logits=True)[0]


@pytest.mark.each_value
@each_pair
def test_forwards_of_1_to_64_tokens_give_the_same_bits_on_any_number_of_threads(
    name: str, rounding: str, folder: Path
) -> None:
    backend = shared(folder, name, rounding)
    expected = read(backend, 1)
    for width in range(2, 65) if name in ("qwen3_5_text", "qwen35") else WIDTHS:
        assert torch.equal(read(backend, width), expected), width
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        for width in (5, 40, 64):
            assert torch.equal(read(backend, width), expected), (threads, width)


@each_pair
def test_rejected_drafts_leave_no_trace(name: str, rounding: str, folder: Path) -> None:
    backend = shared(folder, name, rounding)
    assert torch.equal(draft(backend), read(backend, 1))


def not_restored(segment: Segment) -> Segment:
    return replace(segment, known=segment.start, keep=segment.start + segment.count)


def kept_a_token_late(segment: Segment) -> Segment:
    return replace(segment, keep=min(segment.keep + 1, segment.start + segment.count))


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [not_restored, kept_a_token_late])
@pytest.mark.parametrize(  # a convolution has no state but its latest inputs
    ("name", "rounding"), [("qwen3_5_text", "none"), ("granitemoehybrid", "none"), ("qwen35", FILE)]
)
def test_a_wrong_state_is_noticed(
    name: str, rounding: str, change: Callable[[Segment], Segment], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = shared(folder, name, rounding)
    expected = read(backend, 1)

    def segments(states: RecurrentStates) -> Sequence[Segment]:
        return [change(segment) for segment in states._segments]

    monkeypatch.setattr(RecurrentStates, "segments", property(segments))
    assert not torch.equal(draft(backend), expected)


def test_inputs_of_another_text_are_noticed(folder: Path) -> None:
    backend = stacked(folder, "lfm2", "none")
    expected = read(backend, 1)
    backend.forward(TEXTS[:1, :20], [0], first_slot=0, logits=True)
    states = backend.cache.states
    assert states is not None
    states.memory(0).inputs.add_(0.5)
    assert not torch.equal(read_from(backend, 20), expected[20:])


def test_keys_that_later_layers_read_are_kept_once_and_wrong_ones_are_noticed(folder: Path) -> None:
    backend = stacked(folder, "gemma4_text-small", "none")
    expected = read(backend, 1)
    backend.forward(TEXTS[:1, :20], [0], first_slot=0, logits=False)
    assert torch.equal(read_from(backend, 20), expected[20:])
    assert [layer.keys is None for layer in backend.cache.layers] == [False, False, True, True]
    for source in (0, 1):
        backend.forward(TEXTS[:1, :20], [0], first_slot=0, logits=False)
        with torch.inference_mode():
            backend.cache.layers[source].values[0, :, 19] += 0.5
        assert not torch.equal(read_from(backend, 20), expected[20:])


def test_numbers_of_a_second_embedding_for_another_layer_are_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = stacked(folder, "gemma4_text-small", "int4")
    expected = read(backend, 16)
    monkeypatch.setattr(compiled_layers, "layer_inputs", lambda *given: layer_inputs(*given).roll(1, 2))
    assert not torch.equal(read(backend, 16), expected)


@pytest.mark.each_value
@each_pair
def test_rows_of_batches_of_1_to_8_have_the_bits_of_each_alone(name: str, rounding: str, folder: Path) -> None:
    backend = shared(folder, name, rounding)
    alone = []
    for tokens in TEXTS:
        alone.append(backend.forward(tokens[None], [0], first_slot=0, logits=True)[0])
    for rows in range(1, ROWS + 1):
        starts = list(range(3, 3 + rows))  # each row has read another number of tokens
        for slot, start in enumerate(starts):
            backend.forward(TEXTS[slot : slot + 1, :start], [0], first_slot=slot, logits=False)
        for width in (1, 7):
            tokens = torch.stack([TEXTS[slot, start : start + width] for slot, start in enumerate(starts)])
            logits = backend.forward(tokens, starts, first_slot=0, logits=True)
            for slot, start in enumerate(starts):
                assert torch.equal(logits[slot], alone[slot][start : start + width]), (rows, width, slot)
            starts = [start + width for start in starts]


@pytest.mark.parametrize("rounding", ["none", "int4"])
def test_the_layers_that_a_calibration_tries_have_the_same_bits_in_every_forward(rounding: str, folder: Path) -> None:
    trials = Trials(stacked(folder, "qwen3_5_text", rounding), (200,), [1, 5, 8, 16, 64], 3)
    assert trials.backend.layer_kinds() != shared(folder, "qwen3_5_text", rounding).layer_kinds()
    trials.use_unit(256)
    assert all(agrees() for agrees in spot_checks(trials))


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "gemma4-experts"])
def test_layers_of_a_plan_are_tried_on_a_cache_that_needs_no_transformers(name: str, tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf", name)
    backend = load(str(tmp_path / "model.gguf"), LoadOptions()).backend
    assert isinstance(backend, HFBackend)
    assert type(backend.separate_subset([0, 1]).cache) is type(backend.cache) is SlotCache


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "rounding"), PAIRS)
def test_all_instructions_give_the_same_bits(
    name: str, rounding: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks; with bfloat16 weights all but those that multiply pairs of bfloat16 numbers."""
    isas = ["plain", *isas_of(processor(), None)]
    if rounding == "none":
        isas = [isa for isa in isas if isa in ("avx2", "neon", "plain")]
    found = {}
    for isa in isas:
        monkeypatch.setenv(ISA, isa)
        found[isa] = read(stacked(folder, name, rounding), 16)
    assert len(found) > 1
    assert all(torch.equal(logits, found["plain"]) for logits in found.values()), list(found)


@pytest.mark.parametrize("name", mostly_exhaustive(HYBRIDS, *(name for name in HYBRIDS if name not in ALIKE)))
def test_hidden_states_are_kept_beside_recurrent_layers(name: str, folder: Path) -> None:
    """What enters the layers, as heads read it."""
    backend = stacked(folder, name, "none")
    backend.keep_hidden_states([0, 1, 3, 4])
    read(backend, 16)
    kept = backend.hidden_states([0, 1, 3, 4], 0, 0, LENGTH)
    backend.stack = None  # layer by layer
    read(backend, 16)
    one_by_one = backend.hidden_states([0, 1, 3, 4], 0, 0, LENGTH)
    assert kept is not None and one_by_one is not None and torch.equal(kept, one_by_one)


# of files: heads of 32 numbers, or 128 of which 32 are rotated; value heads are in another order than in the model
FILES = {
    "lfm2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen35": {"head_dim": 128},
    "granitehybrid-dense": {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_groups": 2},
    "lfm2moe": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen35moe": {"head_dim": 128},
    "granitehybrid": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gemma4": {},
    "gemma4-experts": {},
    "gemma4-small": {},
}


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_is_computed_in_its_blocks_in_one_call(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_file(file, name)
    header = read_header(file)
    reference = dequantized(header, described(header), torch.float32).eval()
    backend = load(str(file), LoadOptions(activations="int15")).backend
    assert isinstance(backend, HFBackend) and backend.stack is not None and backend.shape_independent
    backend.reserve(ROWS, 2 * LENGTH)
    ids = TEXTS[:1, :LENGTH] % 200
    with torch.inference_mode():
        expected = reference(input_ids=ids, use_cache=False).logits
    found = backend.forward(ids, [0], first_slot=0, logits=True)
    error = found - expected
    print(f"{name}: largest difference {error.abs().max():.2g}, RMS {error.square().mean().sqrt():.2g}")
    assert kl(expected, found) < 1e-6 < kl(expected, expected.roll(1, 1))
    backend.forward(ids[:, :40], [0], first_slot=1, logits=False)
    for i in range(40, 50):
        assert torch.equal(backend.forward(ids[:, i : i + 1], [i], first_slot=1, logits=True)[0, 0], found[0, i])


# `test_rejected_drafts_leave_no_trace` compares the bits of all
TEXTS_OF = ("lfm2", "qwen3_5_text", "granitemoehybrid-experts", "glm4_moe_lite")
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"num_draft_tokens": 5},
    "suffix": {},
    "model": {"num_draft_tokens": 3},
    "hybrid": {},
}


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", mostly_exhaustive(HYBRIDS, *TEXTS_OF))
def test_texts_are_the_same_with_every_drafter(name: str, temperature: float, drafter: str, folder: Path) -> None:
    params = [SamplingParams(temperature=temperature, max_tokens=24, seed=i) for i in range(len(PROMPTS))]
    source = str(folder / name)
    with SpeculativeDecoder(source, source, drafter="none", acceptance="match", max_batch_size=3) as decoder:
        prompts = [list(prompt) for prompt in PROMPTS]
        plain = [result.token_ids for result in decoder.generate(prompts, params)]
        drafted = decoder.using(drafter, **DRAFTERS[drafter])
        assert [result.token_ids for result in drafted.generate(prompts, params)] == plain
        assert drafted.generate(prompts[0], params[0]).token_ids == plain[0]


@pytest.mark.parametrize("name", mostly_exhaustive(HYBRIDS, "qwen3_5_text", "lfm2_moe"))
def test_partly_wrong_drafts_of_queued_rows_change_no_text(name: str, folder: Path) -> None:
    texts = QueuedTexts(lambda name: SpeculativeDecoder(str(folder / name), drafter="none", max_batch_size=3))
    assert texts.drafted(name, None) == texts.expected(name)
