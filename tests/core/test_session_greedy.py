"""A backend that drafts and verifies in one call each generates the text of the plain loop with fewer calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.interfaces import GreedyRounds
from slipstream.core.rng import Race
from slipstream.core.rounds import Round
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import UsageError
from slipstream.models import pretrained as loading
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.hf.backend import HFBackend
from slipstream.models.loaded import LoadOptions
from slipstream.sampling.sampler import Sampler
from tests.support.engine_parts import engine
from tests.support.engine_parts import run as run_engine
from tests.support.fake_cuda_graph import Tape
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.tiny_models import fresh, perturbed, prompts, shared

GREEDY = SamplingParams(max_tokens=30)


class Counting(GraphedBackend):
    """Counts the calls of each kind."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, Tape())
        self.calls: Counter[str] = Counter()

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls["scored" if options["logits"] else "prefilled"] += 1
        return super().forward(*args, **options)

    def draft_greedy(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls["drafted"] += 1
        return super().draft_greedy(*args, **options)

    def verify_greedy(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls["verified"] += 1
        return super().verify_greedy(*args, **options)


def run(
    name: str, backend: Any, params: SamplingParams = GREEDY, drafter_type: Any = ModelDrafter, acceptance: str = "auto"
) -> tuple[list[Row], Any, Any]:
    """Five ragged rows, three at a time, with four draft tokens; and both backends."""
    target, draft = backend(shared(name)), backend(perturbed(name))
    session = Session(draft)
    batch_engine = engine(Session(target), drafter_type(session, target.vocab_size), Fixed(4), acceptance, session)
    rows = [Row(i, ids, params, 7 + i) for i, ids in enumerate(prompts((5, 1, 17, 30, 9)))]
    for _ in run_engine(batch_engine, rows, 3):
        pass
    return rows, target, draft


@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize("name", [*mostly_slow(["gpt2", "gemma3"], "gpt2"), *mostly_exhaustive(["llama", "qwen2"])])
def test_greedy_text_and_rounds_equal_those_of_the_plain_loop(name: str) -> None:
    (plain, _, _), (fast, target, draft) = run(name, HFBackend), run(name, Counting)
    assert [row.tokens for row in plain] == [row.tokens for row in fast]
    counts = [[(r.num_draft_tokens, r.num_accepted_tokens) for r in row.rounds] for row in fast]
    assert counts == [[(r.num_draft_tokens, r.num_accepted_tokens) for r in row.rounds] for row in plain]
    assert any(0 < kept < drafted for row in counts for drafted, kept in row)
    # the forward that reads a prompt is not a step
    steps = {r.step for row in fast for r in row.rounds if r.seconds.verify}
    assert target.calls["verified"] == len(steps)
    assert 0 < draft.calls["drafted"] <= len(steps)  # none for a row's last token
    assert target.calls["scored"] == draft.calls["scored"] == 0
    assert target._graphs.reason is draft._graphs.reason is None


@pytest.mark.slow
def test_sampled_rows_take_the_plain_path() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8)
    (plain, _, _), (fast, target, draft) = run("llama", HFBackend, params), run("llama", Counting, params)
    assert [row.tokens for row in plain] == [row.tokens for row in fast]
    assert target.calls["verified"] == draft.calls["drafted"] == 0 < target.calls["scored"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"logit_bias": {9: 2.0}}])
def test_options_that_change_logits_take_the_plain_path(changes: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=20, **changes)
    (plain, _, _), (fast, target, _) = run("llama", HFBackend, params), run("llama", Counting, params)
    assert [row.tokens for row in plain] == [row.tokens for row in fast]
    assert target.calls["verified"] == 0


class Watching(ModelDrafter):
    """A drafter that observes logits."""

    seen = 0

    def observe(self, *_: Any) -> None:
        Watching.seen += 1


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), [(ModelDrafter, "rejection"), (Watching, "auto")])
def test_a_rule_or_a_drafter_that_needs_logits_gets_them(drafter: Any, rule: str) -> None:
    Watching.seen = 0
    _, target, draft = run("llama", Counting, drafter_type=drafter, acceptance=rule)
    assert target.calls["verified"] == 0 < draft.calls["drafted"]
    assert (Watching.seen > 0) is (drafter is Watching)


def test_only_backends_with_both_methods_have_greedy_rounds() -> None:
    assert isinstance(GraphedBackend(shared("llama"), Tape()), GreedyRounds)
    assert not isinstance(HFBackend(shared("llama")), GreedyRounds)


def test_models_on_the_cpu_are_not_captured() -> None:
    for fast in ("auto", False, True):
        assert type(loading.wrap_model(fresh("llama"), None, LoadOptions(fast=fast)).backend) is HFBackend


class OnCuda:
    """A model that says it is on a GPU."""

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, torch.device("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_fast_on_a_gpu_means_captured_graphs_or_a_refusal() -> None:
    model = fresh("llama")
    assert [loading._is_captured(OnCuda(model), fast) for fast in ("auto", True, False)] == [True, True, False]
    model.quantization_method = "bitsandbytes"
    assert not loading._is_captured(OnCuda(model), "auto")
    with pytest.raises(UsageError, match="fast=True, but OnCuda cannot be captured: it is quantized with bitsandbytes"):
        loading._is_captured(OnCuda(model), True)


@pytest.mark.parametrize("fast", ["auto", True])
def test_captured_models_are_computed_by_kernels_or_say_why_not(
    fast: bool | str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bool] = []

    def refuse(backend: Any, own_logits: Any, *, may_join: bool) -> str:
        calls.append(may_join)
        return f"out of luck with {fast}"  # each message is logged once

    monkeypatch.setattr(loading, "_is_captured", lambda model, fast: fast is not False)
    monkeypatch.setattr(loading, "packing", lambda model, fast: None)
    monkeypatch.setattr(loading, "use_kernels", refuse)
    model, text = fresh("llama"), prompts((9,))[0]
    texts = []
    for setting in (False, fast):
        decoder = SpeculativeDecoder(model, drafter="none", fast=setting, reproducible=False)
        assert isinstance(decoder.target.backend, GraphedBackend) == (setting is not False)
        texts.append(decoder.generate(text, GREEDY).token_ids)
    assert texts[0] == texts[1]
    assert calls == [False]  # a caller's weights stay where they are
    assert (
        f"LlamaForCausalLM runs transformers' own forward, captured as CUDA graphs: out of luck with {fast}"
        in caplog.text
    )


@pytest.mark.slow
def test_captured_models_generate_the_text_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for backend in (HFBackend, lambda model: GraphedBackend(model, Tape())):
        monkeypatch.setattr(loading, "_backend", lambda model, *_, make=backend, **__: make(model))
        decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), num_draft_tokens=3, reproducible=False)
        texts.append([result.token_ids for result in decoder.generate(prompts((4, 20, 9)), GREEDY)])
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("cache_audit")
def test_a_draft_model_drops_its_draft_of_a_row_that_another_drafter_drafted_for() -> None:
    backend = Counting(perturbed("llama"))
    session, vocab_size = Session(backend), backend.vocab_size
    session.reserve(2, 64)
    rows = [Row(i, ids, GREEDY, i) for i, ids in enumerate(prompts((5, 9)))]
    sampler = Sampler(rows, Race(vocab_size, torch.device("cpu")), vocab_size, torch.device("cpu"))
    drafter = ModelDrafter(session, vocab_size)
    with torch.inference_mode():
        draft = drafter.propose(rows, [4, 0], sampler)
        # retrieval drafted other tokens instead, and the target accepted them
        retrieved = (draft.tokens[1, :3] + 1) % vocab_size
        for row, accepted in zip(rows, (draft.tokens[0, :2], retrieved), strict=True):
            tokens = tuple(accepted.tolist())
            row.rounds.append(Round(row.index, 0, 2, len(row.tokens), tokens, tokens, len(tokens), False))
            row.tokens += tokens
        drafter.propose(rows, [4, 4], sampler)  # the audit compares what the slots hold
    assert backend.calls["drafted"] == 2
