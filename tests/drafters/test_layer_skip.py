"""Some layers of the target as its drafter: what they draft, what they may write, and which models have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from slipstream import Draft, SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.core.interfaces import set_attended_lengths
from slipstream.core.kv_slots import EXACT_FIT
from slipstream.core.rng import Race
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.layer_skip import SharedCacheSession, parse_layers
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import UsageError
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.decoder_layers import make_layer_subset
from slipstream.models.hf.prepared_inputs import cache_name
from slipstream.sampling.sampler import Sampler
from tests.support.engine_parts import engine, run
from tests.support.fake_cuda_graph import Tape
from tests.support.markers import mostly_exhaustive
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import ARCHITECTURES, VOCAB, fresh, prompts, shared


def decoder_of(model: Any, drafter: str = "none", **settings: Any) -> SpeculativeDecoder:
    """A decoder of three rows at a time and four draft tokens, with forwards of any shape."""
    options = {"max_batch_size": 3, "num_draft_tokens": 4, "acceptance": "match", "reproducible": False} | settings
    if drafter == "none":  # a draft length is kept only for drafters set by `using`
        return SpeculativeDecoder(model, drafter="ngram", **options).using("none")
    return SpeculativeDecoder(model, drafter=drafter, **options)


@contextmanager
def left_out(model: Any, layers: Sequence[int]) -> Iterator[None]:
    """Makes all layers but `layers` pass on their inputs, by hooks."""
    (blocks,) = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    skipped = [block for i, block in enumerate(blocks) if i not in layers]
    hooks = [block.register_forward_hook(lambda _, inputs, out: inputs[0]) for block in skipped]
    yield
    for hook in hooks:
        hook.remove()


def by_hugging_face(model: Any, layers: Sequence[int], text: list[int], steps: int) -> list[int]:
    """Greedy tokens of some layers, on Hugging Face's cache, which the whole model has filled with the text."""
    cache, tokens = {cache_name(model) or "": DynamicCache(config=model.config)}, list(text)
    with torch.inference_mode():
        model(input_ids=torch.tensor([text[:-1]]), use_cache=True, **cache)
        with left_out(model, layers):
            for _ in range(steps):
                outputs = model(input_ids=torch.tensor([tokens[-1:]]), use_cache=True, **cache)
                tokens.append(int(outputs.logits[0, -1].argmax()))
    return tokens[len(text) :]


pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
PROMPTS = prompts((14, 1, 20, 9))


@pytest.fixture(scope="module")
def llama() -> Any:
    return fresh("llama", num_hidden_layers=4)


@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize(
    ("name", "params"),
    mostly_exhaustive(
        [*((name, GREEDY) for name in ARCHITECTURES), ("llama", SAMPLED), ("gemma3", SAMPLED)],
        *(("llama", SAMPLED), ("gemma3", GREEDY), ("gpt2", GREEDY)),
    ),
)
def test_all_layers_together_draft_what_the_target_generates(name: str, params: SamplingParams) -> None:
    decoder = decoder_of(shared(name))
    count = decoder.target.backend.num_layers
    results = drafted_as_plain(decoder.using(f"layer_skip:{count}"), PROMPTS, params)
    assert all(r.stats.acceptance_rate == 1 and r.stats.num_draft_tokens > 10 for r in results)


@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize("argument", mostly_exhaustive(["1", "0,2-3", "2+p=30"], "0,2-3"))
def test_fewer_layers_are_rejected_more_often_and_change_no_text(llama: Any, argument: str) -> None:
    results = drafted_as_plain(decoder_of(llama).using(f"layer_skip:{argument}"), PROMPTS, SAMPLED)
    assert sum(r.stats.num_rejected_rounds for r in results) > 10


@pytest.mark.usefixtures("cache_audit")
def test_in_reproducible_mode_the_text_is_that_of_plain_decoding(llama: Any) -> None:
    decoder = decoder_of(llama, reproducible=True)
    assert decoder.reproducible
    for params in (GREEDY, SAMPLED):
        drafted_as_plain(decoder.using("layer_skip:3"), PROMPTS, params)


def propose(drafter: Any, rows: list[Row], lengths: list[int], target: Session) -> Draft:
    race = Race(target.backend.vocab_size, CPU)
    with torch.inference_mode():
        return drafter.propose(rows, lengths, Sampler(rows, race, target.backend.vocab_size, CPU))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", (0,)), ("gpt2", (1,)), ("gemma3", (0, 2)), ("gemma3", (1,)), ("gemma3", (1, 2)), ("olmo2", (0,))],
)
def test_a_draft_is_what_hugging_face_generates_with_layers_left_out(name: str, layers: tuple[int, ...]) -> None:
    model, texts = shared(name), [prompts((length,), seed=length)[0] for length in (30, 19, 12)]
    target = Session(HFBackend(model))
    target.reserve(3, 64)
    rows = [Row(i, list(text), GREEDY, seed=i) for i, text in enumerate(texts)]
    drafter = ModelDrafter(SharedCacheSession(target, layers), VOCAB)
    draft = propose(drafter, rows, [5, 5, 5], target)
    assert draft.tokens.tolist() == [by_hugging_face(model, layers, text, 5) for text in texts]
    assert draft.tokens.tolist() != [by_hugging_face(model, range(9), text, 5) for text in texts]


def contents(backend: HFBackend) -> Tensor:
    """[layers, 2, slots, heads, positions, size]: all that the cache holds."""
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in backend.cache.layers]).clone()


class Watched:
    """Compares the cache before and after every draft: what the target has read must stay, to the bit."""

    def __init__(self, inner: ModelDrafter, target: Session) -> None:
        self.inner, self.target, self.drafts, self.written = inner, target, list[Draft](), 0

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        before = contents(self.target.backend)
        read = [self.target.slot_states[slot].base for slot in range(len(rows))]
        draft = self.inner.propose(rows, lengths, sampler)
        after = contents(self.target.backend)
        assert [self.target.slot_states[slot].base for slot in range(len(rows))] == read
        for slot in range(before.shape[2]):
            held = min(read[slot], len(rows[slot].tokens) - 1) if slot < len(rows) else before.shape[4]
            assert torch.equal(before[:, :, slot, :, :held], after[:, :, slot, :, :held])
            self.written += not torch.equal(before[:, :, slot, :, held:], after[:, :, slot, :, held:])
        self.drafts.append(draft)
        return draft


class Replayed:
    """Proposes recorded drafts, without a model."""

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.drafts = iter(drafts)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        return next(self.drafts)


def ragged(count: int = 3) -> list[Row]:
    return [Row(i, ids, GREEDY, seed=i) for i, ids in enumerate(prompts((14, 20, 9, 17))[:count])]


@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize("layers", [(0, 1), (1, 3)])
def test_drafting_changes_no_cached_token_that_the_target_has_read(llama: Any, layers: tuple[int, ...]) -> None:
    target, replay_target = Session(HFBackend(llama)), Session(HFBackend(llama))
    watched = Watched(ModelDrafter(SharedCacheSession(target, layers), VOCAB), target)
    rows, replayed_rows = ragged(4), ragged(4)
    for _ in run(engine(target, watched, Fixed(4)), rows, 3):
        pass
    assert watched.written > 20
    for _ in run(engine(replay_target, Replayed(watched.drafts), Fixed(4)), replayed_rows, 3):
        pass
    assert [row.output for row in rows] == [row.output for row in replayed_rows]
    compared = 0
    for slot_state, replay_state, slot in zip(target.slot_states, replay_target.slot_states, range(3), strict=True):
        assert slot_state.base == replay_state.base and (slot_state.row is None) == (replay_state.row is None)
        if slot_state.row is None:  # its row has moved to another slot
            continue
        num_cached = slot_state.valid(slot_state.row)
        drafted, replayed = contents(target.backend), contents(replay_target.backend)
        assert num_cached > 15
        assert torch.equal(drafted[:, :, slot, :, :num_cached], replayed[:, :, slot, :, :num_cached])
        compared += 1
    assert compared


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache_audit")
def test_drafting_on_from_cached_drafts_is_noticed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # drafts never start from the target's cache
    monkeypatch.setattr(SharedCacheSession, "_begin", lambda self, rows: None)
    target = Session(HFBackend(llama))
    session = SharedCacheSession(target, (0,))
    session._layers.table.states = target.table.states  # and tokens read by some layers count as read by the target
    with pytest.raises((SlipstreamError, AssertionError)):
        for _ in run(engine(target, Watched(ModelDrafter(session, VOCAB), target), Fixed(4)), ragged()):
            pass


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_sampled_drafts_carry_the_distribution_of_the_layers(llama: Any, rule: str) -> None:
    decoder = decoder_of(llama, "layer_skip:2", acceptance=rule)
    results = decoder.generate(PROMPTS, SAMPLED)
    assert all(0 < r.stats.acceptance_rate < 1 and r.stats.lossless for r in results)
    target = Session(HFBackend(llama))
    target.reserve(1, 64)
    row = Row(0, PROMPTS[2], SamplingParams(temperature=1.0, max_tokens=9), seed=1)
    draft = propose(ModelDrafter(SharedCacheSession(target, (0, 1)), VOCAB), [row], [2], target)
    with left_out(llama, (0, 1)), torch.inference_mode():  # the first layers do not depend on the later ones
        ids = torch.tensor([[*row.tokens, *draft.tokens[0, :1].tolist()]])
        distribution = llama(input_ids=ids).logits[0, -2:].softmax(-1)
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs[0], distribution, rtol=1e-4, atol=1e-5)


def test_a_layer_subset_shares_the_weights_and_leaves_the_target_unchanged(llama: Any) -> None:
    modules, forwards = dict(llama.named_modules()), [m.forward for m in llama.modules()]
    subset = make_layer_subset(llama, 4, (0, 2))
    assert dict(llama.named_modules()) == modules and [m.forward for m in llama.modules()] == forwards
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())
    target_parameters = {id(parameter) for parameter in llama.parameters()}
    assert {id(parameter) for parameter in subset.parameters()} < target_parameters
    assert subset.model.layers[2] is llama.model.layers[2] and subset.model.norm is llama.model.norm


def test_packed_layers_draft_what_plain_layers_draft() -> None:
    plain = decoder_of(fresh("llama", num_hidden_layers=3))
    packed = decoder_of(fresh("llama", num_hidden_layers=3), "layer_skip:2", fast=True)
    assert packed.target.packed
    results = drafted_as_plain(packed, PROMPTS, GREEDY, plain=plain)
    eager = plain.using("layer_skip:2").generate(PROMPTS, GREEDY)
    assert [r.stats.num_accepted_tokens for r in results] == [r.stats.num_accepted_tokens for r in eager]


@pytest.mark.parametrize("name", mostly_exhaustive(["llama", "gemma3"], "gemma3"))
def test_captured_graphs_draft_the_same_also_after_the_cache_has_moved(name: str) -> None:
    tapes, outputs = (Tape(), Tape()), []
    for graphed in (False, True):
        backend = GraphedBackend(shared(name), tapes[0]) if graphed else HFBackend(shared(name))
        target = Session(backend)
        session = SharedCacheSession(target, (0,))
        if isinstance(backend, GraphedBackend):
            captured = GraphedBackend(session.backend.model, tapes[1], cache=backend.cache)
            session.backend = session._layers.backend = session._layers.table.backend = captured
        for _ in range(2):
            rows = [Row(i, ids, GREEDY, 7) for i, ids in enumerate(prompts((5, 1, 17)))]
            for _ in run(engine(target, ModelDrafter(session, VOCAB), Fixed(3)), rows):
                pass
            outputs.append([[(round.draft, round.tokens) for round in row.rounds] for row in rows])
            if graphed:
                assert session.backend.graph_memory().count > 0
            target.reserve(8, 600)  # moves the cache
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert 0 < tapes[1].captured < tapes[1].replayed


@pytest.mark.parametrize("graphed", [False, True])
def test_a_layer_subset_attends_to_the_lengths_of_the_whole_model(llama: Any, graphed: bool) -> None:
    backend = GraphedBackend(llama, Tape()) if graphed else HFBackend(llama)
    target = Session(backend)
    session = SharedCacheSession(target, (0, 1))
    target.reserve(1, 64)  # sets what the session's shapes allow
    subset = session.backend
    assert subset.attended_unit == backend.attended_unit == EXACT_FIT.attended_unit
    set_attended_lengths(backend, 512, (64, 128))
    assert subset.attended_unit == 512
    if not graphed:
        assert backend.attended_lengths == subset.attended_lengths == (64, 128)
        assert subset.cache.place(0, [70], torch.tensor([[70]])) == 128  # not 512


def test_a_layer_subset_invents_no_attributes(llama: Any) -> None:
    subset = HFBackend(llama).layer_subset((0, 2))
    with pytest.raises(AttributeError, match="no_such_name"):
        subset.no_such_name  # noqa: B018
    assert type(subset) is HFBackend and subset.num_layers == 4 and subset.vocab_size == VOCAB


def test_layers_of_the_toy_model_are_its_context_lengths() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    plain = decoder.generate("The heron", GREEDY)
    for argument, all_right in (("6", True), ("2", False), ("0,3-5", False)):
        result = decoder.using(f"layer_skip:{argument}", num_draft_tokens=3).generate("The heron", GREEDY)
        assert result.token_ids == plain.token_ids and result.stats.num_draft_tokens > 0
        assert (result.stats.acceptance_rate == 1) == all_right or argument == "0,3-5"


@pytest.mark.parametrize("argument", ["0", "7", "3-1", "0,0-1", "4,6", "0-99999999999"])  # of 6 layers
def test_layers_that_the_model_lacks_or_that_do_not_rise_are_refused(argument: str) -> None:
    with pytest.raises(UsageError, match=r"^drafter='layer_skip:.*; allowed: (from 1 to 6 layers|layers from 0 to 5)"):
        parse_layers(argument, 6)


def layers_of(drafter: Any) -> list[int]:
    blocks = drafter.session.backend.model.model.layers
    return [i for i, block in enumerate(blocks) if next(block.parameters(), None) is not None]


def test_without_an_argument_the_first_three_quarters_draft(llama: Any) -> None:
    decoder = decoder_of(llama, "layer_skip")
    assert layers_of(decoder.drafter) == layers_of(decoder.using("layer_skip:p=30").drafter) == [0, 1, 2]
    assert layers_of(decoder.using("layer_skip:2").drafter) == [0, 1]


def test_the_digest_of_weights_is_that_of_no_other_model(llama: Any) -> None:
    digest = HFBackend(llama).weights_digest()
    packed: Any = decoder_of(fresh("llama", num_hidden_layers=4), fast=True).target.backend
    assert packed.weights_digest() == digest  # packing changes no weight
    others = (fresh("llama", seed=1, num_hidden_layers=4), fresh("llama"), fresh("qwen2"))
    assert len({digest, *(HFBackend(model).weights_digest() for model in others)}) == 4
