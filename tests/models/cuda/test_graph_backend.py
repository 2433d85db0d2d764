"""Captured forwards against eager ones. `Tape` stands in for CUDA graphs; the last tests need a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.acceptance import match
from slipstream.core.trees import segments_of
from slipstream.core.types import Draft
from slipstream.models.cuda.graph_backend import POSITIONS_AHEAD, GraphedBackend
from slipstream.models.cuda.graph_store import REPLAYS, GraphMemory, GraphStore, NoWaiting, Rerun, why_not_captured
from slipstream.models.cuda.indexed_cache import SPARE, WIDTHS, TreeTable
from slipstream.models.hf.backend import HFBackend
from tests.support.fake_cuda_graph import Tape
from tests.support.graph_cases import MODELS, PROMPT, STARTS, Case
from tests.support.markers import subcases
from tests.support.processes import PATIENCE
from tests.support.tiny_models import VOCAB, fresh

pytestmark = pytest.mark.slow

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def contents(backend: HFBackend) -> Tensor:
    """[layers, 2, slots, heads, positions, size]: all that the cache holds."""
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in backend.cache.layers]).clone()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_eager_backend_to_the_bit(name: str) -> None:
    case = Case(name)
    for _ in range(40):
        rows, width = (1, 2, 4)[case.number(0, 3)], (1, 2, 4, 8)[case.number(0, 4)]
        first_slot = 0 if rows == 4 else case.number(0, 4 - rows + 1)
        expected, got = case.both(case.tokens(rows, width), case.starts(rows), first_slot)
        assert torch.equal(expected, got)
    assert 5 < case.tape.captured < case.tape.replayed


@pytest.mark.parametrize("name", MODELS)
def test_padded_rows_and_widths_differ_by_rounding_only(name: str) -> None:
    case = Case(name)
    for rows, width in [(3, 1), (3, 5), (1, 11), (2, 20), (3, 32), (3, 2)]:
        expected, got = case.both(case.tokens(rows, width), case.starts(rows))
        assert got.shape == expected.shape
        assert (expected - got).abs().max() < 1e-4
    assert case.tape.captured == case.tape.replayed == 6


@pytest.mark.parametrize(("rows", "width"), [(3, 1), (3, 7), (1, 12), (2, 3)])
def test_a_captured_forward_writes_only_its_positions_and_spare_ones(rows: int, width: int) -> None:
    case = Case("llama")
    starts = case.starts(rows)
    case.graphed.forward(case.tokens(rows, width), starts, first_slot=0, logits=True)  # captured, then replayed
    before = contents(case.graphed)
    case.graphed.forward(case.tokens(rows, width), starts, first_slot=0, logits=True)
    changed = (contents(case.graphed) != before).any(-1).any(3).any(0).any(0)  # [slots, positions]
    expected = torch.zeros_like(changed)
    for slot, start in enumerate(starts):
        expected[slot, start : start + width] = True
    assert torch.equal(changed[:, :-SPARE], expected[:, :-SPARE])


def test_each_bucket_of_shapes_is_captured_once() -> None:
    case = Case("llama", length=1500)
    for rows, width, start in [(3, 5, 9), (4, 5, 11), (3, 5, 40), (1, 9, 3), (1, 16, 5), (3, 5, 251), (4, 5, 252)]:
        case.graphed.forward(case.tokens(rows, width), [start] * rows, first_slot=0, logits=True)
    assert case.tape.captured == 3  # (4, 8, 256), (1, 16, 256), (4, 8, 512)
    assert case.graphed.graph_memory().count == 3
    views = [case.graphed._bucket([0], 1, end).attended for end in (1, 256, 257, 513, 769, 1025, 1400)]  # type: ignore[union-attr]
    assert views == [256, 256, 512, 768, 1024, 1536, 1536]


@pytest.mark.parametrize(
    ("rows", "width", "first_slot", "logits"), [(1, 33, 0, True), (1, 4, 1, True), (4, 4, 0, False)]
)
def test_forwards_that_are_no_decoding_step_run_eagerly(rows: int, width: int, first_slot: int, logits: bool) -> None:
    case = Case("llama", length=200)
    tokens, starts = case.tokens(rows, width), case.starts(rows)
    case.graphed.forward(tokens, starts, first_slot=first_slot, logits=logits)
    assert case.tape.captured == 0


def test_a_width_that_leaves_no_room_for_padding_runs_eagerly() -> None:
    case = Case("llama", length=200)
    spare = case.graphed.cache.spare
    for start, captured in ((spare - 4, 1), (spare - 3, 1)):
        expected, got = case.both(case.tokens(1, 4), [start])
        assert case.tape.captured == captured
        assert torch.equal(expected, got)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_growth_drops_the_graphs_and_keeps_the_cached_tokens(name: str) -> None:
    case = Case(name)
    tokens, starts = case.tokens(2, 4), case.starts(2)
    case.both(tokens, starts)
    for backend in (case.eager, case.graphed):
        backend.reserve(4, 60)
    assert case.graphed.graph_memory().count == 1
    for backend in (case.eager, case.graphed):
        backend.reserve(5, 600)
    assert case.graphed.graph_memory() == GraphMemory(0, 0)
    assert case.tape.resets == 1
    assert case.graphed.cache.shape[0] == 8  # slots grow by doubling
    expected, got = case.both(case.tokens(2, 4), starts)
    assert torch.equal(expected, got)
    assert case.tape.captured == 2


def test_the_least_recently_used_graph_is_evicted_first() -> None:
    case = Case("llama", max_graphs=2)
    for width in (1, 2, 1, 4, 1):  # 4 evicts 2
        case.both(case.tokens(1, width), [PROMPT])
    assert (case.tape.captured, case.graphed.graph_memory().count) == (3, 2)
    expected, got = case.both(case.tokens(1, 2), [PROMPT])
    assert torch.equal(expected, got)
    assert case.tape.captured == 4


def test_graphs_that_hold_too_much_memory_are_all_dropped() -> None:
    case = Case("llama", tape=Tape(size=400), max_bytes=1000)
    for width, num_bytes in ((1, 400), (2, 800), (4, 1200), (8, 1200)):
        case.both(case.tokens(1, width), [PROMPT])
        assert case.graphed.graph_memory().bytes == num_bytes
    assert case.tape.resets == 0 and case.tape.captured == 3
    for _ in range(3 * REPLAYS):
        case.graphed.forward(case.tokens(1, 1), [PROMPT], first_slot=0, logits=True)
    for width, num_bytes in ((8, 400), (1, 800)):
        expected, got = case.both(case.tokens(1, width), [PROMPT])
        assert torch.equal(expected, got) and case.graphed.graph_memory().bytes == num_bytes
    assert case.tape.resets == 1


@pytest.mark.each_value
@pytest.mark.parametrize("num_shapes", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [900, 1100, 5000])
def test_graphs_that_do_not_fit_together_do_not_evict_each_other_endlessly(num_shapes: int, size: int) -> None:
    """The memory holds less than one graph, or only some of the shapes in use."""
    tape, outputs = Tape(size=size), []
    store = GraphStore("it", tape, max_bytes=1000)
    for call in range(40 * REPLAYS):
        shape = call % num_shapes
        output = store.run(shape, lambda shape=shape: torch.full((2,), shape).add_(1))
        outputs.append(output.tolist())
    assert outputs == [[call % num_shapes + 1] * 2 for call in range(40 * REPLAYS)]
    assert tape.captured <= num_shapes + 40 and tape.replayed >= 0.4 * len(outputs)
    early = Tape(size=size)
    store = GraphStore("it", early, max_bytes=1000)
    for call in range(20):
        store.run(call % num_shapes, lambda: torch.zeros(2).add_(1))
    assert early.captured <= min(num_shapes, 3)


def test_more_shapes_than_graphs_do_not_evict_each_other_endlessly() -> None:
    tape = Tape()
    store = GraphStore("it", tape, max_graphs=4)
    for call in range(1000):
        out = store.run(call % 5, lambda: torch.zeros(2).add_(1))
        assert out is not None and out.tolist() == [1, 1]
    assert tape.captured <= 20 and tape.replayed >= 500


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failed_capture_is_reported_once_and_runs_eagerly(failing: int, caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    def fail(captured: int) -> str | None:
        attempts.append(captured)
        return "out of luck\nand more" if captured == failing else None

    case = Case("qwen2", tape=Tape(fail=fail))
    for width in (1, 2, 4, 8, 16):
        expected, got = case.both(case.tokens(2, width), [PROMPT, PROMPT])
        assert torch.equal(expected, got)
    assert len(attempts) == failing + 1
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "Qwen2ForCausalLM runs without CUDA graphs for now: out of luck"
    ]
    assert case.graphed.graph_memory().count == 0


def test_a_passing_lack_of_memory_does_not_turn_captures_off(caplog: pytest.LogCaptureFixture) -> None:
    is_lacking = True
    case = Case("llama", tape=Tape(fail=lambda _: "CUDA out of memory" if is_lacking else None))
    inputs = case.tokens(3, 3), case.starts(3)
    expected = case.eager.forward(*inputs, first_slot=0, logits=True)
    logits = [case.graphed.forward(*inputs, first_slot=0, logits=True) for _ in range(100)]
    is_lacking = False
    logits += [case.graphed.forward(*inputs, first_slot=0, logits=True) for _ in range(200)]
    assert case.tape.captured == 1 and case.tape.replayed > 50
    assert all(torch.equal(logits[0], later) for later in logits)
    assert (logits[0] - expected).abs().max() < 1e-4
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_failed_captures_are_retried_at_growing_intervals() -> None:
    attempts: list[int] = []
    store = GraphStore("it", Tape(fail=lambda _: attempts.append(1) or "no"))  # type: ignore[func-returns-value]
    for _ in range(5000):
        assert store.run("key", lambda: torch.ones(1)) is not None
    assert 5 <= len(attempts) <= 10


def test_an_uncaptured_forward_has_the_bits_of_a_captured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward that was calibrated runs: other shapes might flip near-ties."""
    captured, failing = Case("qwen2"), Case("qwen2", tape=Tape(fail=lambda _: "no"))
    for case in (captured, failing):
        monkeypatch.setattr(case.graphed.eager, "forward", lambda *_, **__: pytest.fail("another forward"))
    for rows, width in ((3, 3), (1, 5), (4, 7)):
        starts, tokens = captured.starts(rows), captured.tokens(rows, width)
        of_captured, of_failing = (
            case.graphed.forward(tokens, starts, first_slot=0, logits=True) for case in (captured, failing)
        )
        assert torch.equal(of_captured, of_failing)
        drafts = [
            case.graphed.draft_greedy(tokens, starts, [width] * rows, steps=3, vocab_size=VOCAB)
            for case in (captured, failing)
        ]
        verdicts = [
            case.graphed.verify_greedy(tokens, starts, [width] * rows, [1] * rows, width=2)
            for case in (captured, failing)
        ]
        assert torch.equal(*drafts) and torch.equal(*verdicts)
    assert captured.tape.captured and not failing.tape.captured


def test_a_forward_that_fails_during_capture_is_left_to_the_eager_forward() -> None:
    store = GraphStore("it", Tape())

    def fails() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert store.run("key", fails) is None
    assert store.reason is None and store.run("other", lambda: torch.ones(1)) is not None
    assert store.memory.count == 0  # it waits before it tries to capture again


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.sum() > 0),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "assigned mask": lambda x: x.__setitem__(x > 0, torch.ones(())),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x + 1),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "copy": lambda x: x.to("meta"),
}
NOT_WAITING: dict[str, Callable[[Tensor], object]] = {
    "index": lambda x: x[torch.arange(2)],
    "assigned": lambda x: x.__setitem__(torch.arange(2), torch.zeros(2)),
    "gather": lambda x: x.gather(0, torch.arange(3)),
    "where": lambda x: torch.where(x > 0, x, x + 1),
    "type": lambda x: x.to(torch.bfloat16).float(),
    "view": lambda x: x.view(2, 2).t().contiguous(),
    "argmax": lambda x: x.argmax(),
    "started copy": lambda x: x.to("meta", non_blocking=True),
    "known repeats": lambda x: x.repeat_interleave(torch.tensor([1, 1, 1, 1]), output_size=4),
}


@subcases("name", WAITING)
def test_operators_that_wait_for_the_device_are_refused_in_the_capturing_thread_only(name: str) -> None:
    """Other threads of a server may wait for the device during a capture."""
    x, results, go_on, waited = torch.ones(4), list[object](), threading.Event(), threading.Event()

    def wait_in_another_thread() -> None:
        go_on.wait(PATIENCE)
        results.append(WAITING[name](torch.ones(4)))
        waited.set()

    thread = threading.Thread(target=wait_in_another_thread)
    thread.start()
    with NoWaiting():
        with pytest.raises(RuntimeError, match="operation not permitted during a capture"):
            WAITING[name](x)
        go_on.set()
        assert waited.wait(PATIENCE)
    thread.join()
    assert len(results) == 1
    WAITING[name](x)  # it is allowed again


@subcases("name", NOT_WAITING)
def test_operators_that_do_not_wait_are_allowed_during_capture(name: str) -> None:
    with NoWaiting():
        NOT_WAITING[name](torch.ones(4))


def test_a_model_that_waits_for_the_device_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("llama")
    model.model.register_forward_pre_hook(lambda *_: print(model.lm_head.weight.sum().item()))
    backend = GraphedBackend(model, Tape())
    backend.reserve(1, 20)
    for _ in range(3):
        logits = backend.forward(torch.tensor([[3, 4]]), [0], first_slot=0, logits=True)
    assert torch.isfinite(logits).all()
    assert "not permitted during a capture" in caplog.text


def test_models_that_cannot_be_captured_are_recognized_beforehand(caplog: pytest.LogCaptureFixture) -> None:
    model = fresh("llama")
    assert why_not_captured(model) is None
    model.quantization_method = "bitsandbytes"
    assert "bitsandbytes" in str(why_not_captured(model))
    model.quantization_method = "awq"
    assert why_not_captured(model) is None
    model.model.layers[0]._hf_hook = SimpleNamespace()
    assert "accelerate" in str(why_not_captured(model))
    del model.model.layers[0]._hf_hook
    model.lm_head.to("meta")
    assert why_not_captured(model) == "its weights are on several devices (cpu, meta)"
    with caplog.at_level(logging.WARNING):
        GraphedBackend(model, Tape())
    assert "LlamaForCausalLM runs without CUDA graphs: its weights are on several devices" in caplog.text


def step_by_step(case: Case, tokens: Tensor, starts: list[int], counts: list[int], steps: int, limit: int) -> Tensor:
    """The specification of `draft_greedy`: each row alone, token by token."""
    drafted = []
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        inputs, row_draft = tokens[slot : slot + 1, :count], []
        for _ in range(steps):
            logits = case.eager.forward(inputs, [start], first_slot=slot, logits=True)
            row_draft.append(int(logits[0, -1, :limit].argmax()))
            start, inputs = start + inputs.shape[1], torch.tensor([row_draft[-1:]])
        drafted.append(row_draft)
    return torch.tensor(drafted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("captured", [True, False])
def test_draft_greedy_equals_drafting_step_by_step(name: str, captured: bool) -> None:
    case = Case(name, tape=Tape(fail=lambda _: None if captured else "no"))
    for rows, width, steps, limit in [(1, 1, 4, VOCAB), (3, 2, 5, VOCAB), (4, 8, 1, 30), (2, 1, 2, 20), (3, 2, 5, 999)]:
        tokens, starts = case.tokens(rows, width), STARTS[:rows]
        counts = [case.number(1, width + 1) for _ in range(rows)]
        draft = case.graphed.draft_greedy(tokens, starts, counts, steps=steps, vocab_size=limit)
        assert torch.equal(draft, step_by_step(case, tokens, starts, counts, steps, limit))
        eager_contents, graphed_contents = contents(case.eager), contents(case.graphed)
        for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
            end = start + count + steps - 1
            assert (eager_contents[:, :, slot, :, :end] - graphed_contents[:, :, slot, :, :end]).abs().max() < 1e-4
    # (1, 1), (4, 2), (4, 1), (4, 8), (2, 1): steps and the size of the vocabulary need no graphs of their own
    assert case.tape.captured == (5 if captured else 0)


@pytest.mark.parametrize("captured", [True, False])
def test_verify_greedy_accepts_the_longest_matching_prefix(captured: bool) -> None:
    case = Case("qwen2", tape=Tape(fail=lambda _: None if captured else "no"))
    accepted_counts = set()
    for _ in range(40):
        rows, width = (1, 2, 3, 4)[case.number(0, 4)], case.number(0, 5)
        tails = [case.number(1, 4) for _ in range(rows)]
        counts = [tail + width for tail in tails]
        tokens, starts = case.tokens(rows, max(counts)), STARTS[:rows]
        lengths = [case.number(0, width + 1) for _ in range(rows)]
        choices = torch.zeros(rows, width + 1, dtype=torch.int64)
        for slot, (start, tail) in enumerate(zip(starts, tails, strict=True)):
            num_right = case.number(0, width + 1)  # the number of draft tokens that the model would choose
            for j in range(width + 1):
                head = tokens[slot : slot + 1, : tail + j]
                choices[slot, j] = case.eager.forward(head, [start], first_slot=slot, logits=True)[0, -1].argmax()
                if j < num_right:
                    tokens[slot, tail + j] = choices[slot, j]
        draft = torch.stack([tokens[slot, tail : tail + width] for slot, tail in enumerate(tails)])
        expected = match(choices, Draft(draft, tuple(lengths)))
        verdict = case.graphed.verify_greedy(tokens, starts, counts, lengths, width=width)
        assert verdict.tolist() == torch.stack([expected.accepted, expected.next_token], 1).tolist()
        accepted_counts |= {int(n) for n in expected.accepted}
    assert accepted_counts >= {0, 1, 2, 3}
    assert bool(case.tape.captured) == captured


def prepared(rows: int, tape: Tape | None = None, **changes: int) -> GraphedBackend:
    backend = GraphedBackend(fresh("llama", **changes), tape or Tape())
    backend.reserve(1, 60)
    backend.forward(torch.tensor([[3, 4]]), [0], first_slot=0, logits=True)  # as the trials do
    backend.prepare(rows)
    return backend


def test_forwards_of_a_batch_are_captured_at_load_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    run = GraphStore.run
    monkeypatch.setattr(GraphStore, "run", lambda store, key, body: (keys.append(key), run(store, key, body))[1])
    tape = Tape()
    backend = prepared(7, tape)
    assert [(bucket.rows, bucket.width) for _, bucket in keys] == [
        (rows, width) for rows in (8, 4, 2, 1) for width in (8, 4, 2, 1)
    ]
    assert tape.captured == 16 and backend.graph_memory().count == 16
    for rows in (1, 3, 7):
        tokens, starts = torch.ones(rows, 5, dtype=torch.int64), list(range(rows))
        backend.verify_greedy(tokens, starts, [5] * rows, [4] * rows, width=4)
        backend.draft_greedy(tokens, starts, [5] * rows, steps=4, vocab_size=VOCAB)
        backend.forward(tokens, starts, first_slot=0, logits=True)
    assert tape.captured == 16  # a round captures nothing more


def test_texts_grow_within_what_is_reserved_at_load_without_new_captures() -> None:
    tape = Tape()
    backend = prepared(2, tape, max_position_embeddings=2 * POSITIONS_AHEAD)
    moves, captured = backend.cache.moves, tape.captured
    for length in (100, 2000, POSITIONS_AHEAD - 100):
        backend.reserve(3, length)  # as many slots as a server takes
        backend.forward(torch.ones(2, 1, dtype=torch.int64), [9, 5], first_slot=0, logits=True)
    assert (backend.cache.moves, tape.captured) == (moves, captured)
    backend.reserve(3, 2 * POSITIONS_AHEAD)
    assert backend.cache.moves > moves


def test_positions_are_reserved_at_load_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = prepared(1, max_position_embeddings=2 * POSITIONS_AHEAD)
    backend.device = SimpleNamespace(type="cuda")
    each = sum(layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in backend.cache.layers)
    for free, positions in ((1 << 40, POSITIONS_AHEAD), (4 * 3 * each * 3000, 2048), (0, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1 << 40))
        assert backend._positions_ahead(3) == max(0, positions - SPARE)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("rows", "width"), [(40, 5), (33, 8), (4, 32)])
def test_large_batches_are_captured_too(name: str, rows: int, width: int) -> None:
    backends = HFBackend(fresh(name)), GraphedBackend(fresh(name), Tape())
    tokens = torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(0))
    logits = []
    for backend in backends:
        backend.reserve(rows, 64)
        for _ in range(2):  # memory is allocated by the first
            logits.append(backend.forward(tokens, [0] * rows, first_slot=0, logits=True))
    assert backends[1].graph_memory().count == 1
    assert (logits[1] - logits[3]).abs().max() < 1e-4


def test_rerun_replays_by_running_the_body_again() -> None:
    store, calls = GraphStore("it", Rerun()), []
    for _ in range(3):
        out = store.run("key", lambda: torch.tensor([calls.append(1) or len(calls)]))
    assert out is not None and out.item() == len(calls) == 3
    assert str(store.memory) == "1 CUDA graphs, 0 MB"


def test_the_tape_keeps_python_values_and_rereads_tensors_as_graphs_do() -> None:
    buffer, scale = torch.ones(3), [2.0]
    replay = Tape().capture(lambda: buffer * scale[0] + buffer[:1])
    buffer.fill_(5.0)
    scale[0] = 100.0
    assert replay().tolist() == [15.0] * 3
    with pytest.raises(RuntimeError, match="not permitted"):
        Tape().capture(lambda: buffer * buffer.sum().item())


@CUDA
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_graphs_give_the_eager_logits(name: str, dtype: torch.dtype) -> None:
    model = fresh(name, dtype=dtype).cuda()
    eager, graphed = HFBackend(model), GraphedBackend(model)
    generator = torch.Generator().manual_seed(0)
    for backend in (eager, graphed):
        backend.reserve(4, 60)
        for slot in range(4):
            backend.forward(torch.arange(3, 3 + PROMPT, device="cuda")[None], [0], first_slot=slot, logits=False)
    for turn in range(3 * len(WIDTHS)):
        rows, width = (1, 2, 4)[turn % 3], WIDTHS[turn // 3]
        tokens = torch.randint(3, VOCAB, (rows, width), generator=generator).cuda()
        starts = torch.randint(4, PROMPT, (rows,), generator=generator).tolist()
        eager_logits, graphed_logits = (
            b.forward(tokens, starts, first_slot=0, logits=True).float() for b in (eager, graphed)
        )
        assert (eager_logits - graphed_logits).abs().max() <= {torch.float32: 1e-3, torch.bfloat16: 0.1}[
            dtype
        ] * eager_logits.abs().max()
    assert graphed._graphs.reason is None
    assert graphed.graph_memory().count == 3 * len(WIDTHS)


PARENTS = [
    [(-1, 0, 1, 1, 3, -1)],
    [(-1, -1, 1, 2, 1), (-1, 0)],
    [(-1, 0, 1, 2, 3, 4, 2, 6, 7, -1), (-1,), (-1, -1, -1)],
]


def both_trees(case: Case, parents: Sequence[tuple[int, ...]], num_uncached: int) -> tuple[Tensor, Tensor]:
    """Logits of trees after `num_uncached` committed tokens that are not cached, eager and captured."""
    bases = [start + num_uncached for start in STARTS[: len(parents)]]
    segments = [
        segment
        for slot, (base, row_parents) in enumerate(zip(bases, parents, strict=True))
        for segment in segments_of(slot, base - num_uncached, base, row_parents)
    ]
    tokens = case.tokens(1, sum(segment.count for segment in segments))[0]
    eager, captured = (backend.forward_tree(tokens, segments, widths=None) for backend in (case.eager, case.graphed))
    return eager, captured


@pytest.mark.each_value
@pytest.mark.parametrize("parents", PARENTS)
@pytest.mark.parametrize("name", MODELS)
def test_captured_trees_give_the_logits_of_eager_ones(name: str, parents: list[tuple[int, ...]]) -> None:
    case = Case(name, length=300)
    for num_uncached in (1, 3):
        for _ in range(2):  # captured, then replayed on other tokens
            expected, got = both_trees(case, parents, num_uncached)
            assert got.shape == expected.shape
            assert (expected - got).abs().max() < 1e-4
        for backend in (case.eager, case.graphed):
            backend.move(0, [STARTS[0] + num_uncached + 3], STARTS[0] + num_uncached + 1)
        expected, got = case.both(case.tokens(1, 2), [STARTS[0] + num_uncached + 2])
        assert (expected - got).abs().max() < 1e-4
    assert 0 < case.tape.captured < case.tape.replayed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_branches_that_attend_to_each_other_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = TreeTable.padded

    def seeing_all(table: TreeTable, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        depths, visible, ancestors = padded(table, rows, width)
        return depths, torch.ones_like(visible), ancestors

    monkeypatch.setattr(TreeTable, "padded", seeing_all)
    expected, got = both_trees(Case(name, length=300), PARENTS[2], 1)
    assert (expected - got).abs().max() > 1e-2


def test_wide_trees_run_eagerly() -> None:
    case = Case("llama", length=300)
    expected, got = both_trees(case, [(-1,) * 40], 1)
    assert torch.equal(expected, got)
    assert case.tape.captured == 0
