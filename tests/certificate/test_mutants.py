"""Mutated rules, drafters, engines and kernels: the certificate fails every one of them, and passes the originals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import Draft, SpeculativeDecoder
from slipstream.certificate import sampled_law
from slipstream.certificate.checks import Finding, Verifier
from slipstream.certificate.sampled_law import bonus_from_raw_logits, kept_from
from slipstream.core import acceptance
from slipstream.core.acceptance import Distributions, Rule, RuleFunction, load_rule, rejection
from slipstream.core.interfaces import Sampler as SamplerProtocol
from slipstream.core.types import Row, Traits, Verdict
from slipstream.models.toy import ToyBackend
from slipstream.sampling.processors import BadWords, Penalties
from slipstream.sampling.sampler import Sampler
from slipstream.sampling.warpers import Warp
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.markers import mostly_exhaustive
from tests.support.wrong_acceptance_rules import WRONG_RULES, residual_of_one_token

pytestmark = pytest.mark.slow

PROMPTS = [NamedPrompt("The heron looked at the"), NamedPrompt("A sparrow and a heron shared a river. The heron was")]
LENGTH = 6
block, topk, typical = (load_rule(name).distributions for name in ("block", "topk:3", "typical"))
assert block is not None and topk is not None and typical is not None


def fails(decoder: SpeculativeDecoder, check: str) -> bool:
    """True if this check fails, on the smallest budget."""
    return Verifier(decoder, PROMPTS, max_tokens=24, budget=0.0).checks[check]().passed is False


def toy(**settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", "toy:2", **({"num_draft_tokens": LENGTH} | settings))


# rules


def only_if(condition: Callable[[Tensor, Tensor, Draft], bool], wrong: RuleFunction) -> RuleFunction:
    return lambda p, scores, draft: (wrong if condition(p, scores, draft) else rejection)(p, scores, draft)


def only_rows(condition: Callable[[Tensor, Tensor, Draft], Tensor], wrong: RuleFunction) -> RuleFunction:
    """Wrong in the rows where condition(p, scores, draft) [B] holds."""

    def rule(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
        right, bad, rows = rejection(p, scores, draft), wrong(p, scores, draft), condition(p, scores, draft)[:, None]

        def next_token(accepted: Tensor) -> Tensor:
            return torch.where(rows, bad.next_token(accepted), right.next_token(accepted))

        return Distributions(torch.where(rows, bad.keep, right.keep), next_token)

    return rule


def sharper(p: Tensor, scores: Tensor, draft: Draft) -> Tensor:
    """Rows below temperature 1."""
    return p[:, 0].amax(-1) > scores[:, 0].softmax(-1).amax(-1) + 1e-3


def unfiltered(p: Tensor, scores: Tensor, draft: Draft) -> Tensor:
    return (p[:, 0] > 0).all(-1)


def all_kept(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    right = rejection(p, scores, draft)
    return Distributions(
        torch.nn.functional.one_hot(draft.lengths_on_device[:, 0], draft.width + 1).double(), right.next_token
    )


def bonus_after_four(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    right, raw = rejection(p, scores, draft), bonus_from_raw_logits(p, scores, draft)
    return Distributions(right.keep, lambda n: torch.where((n >= 4)[:, None], raw.next_token(n), right.next_token(n)))


def always_accepted_at(depth: int, p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Accepts the token at one depth untested."""
    right = rejection(p, scores, draft)
    keep = right.keep.clone()
    if draft.width > depth:
        longer = (draft.lengths_on_device[:, 0] > depth).double()
        keep[:, depth + 1] += keep[:, depth] * longer
        keep[:, depth] *= 1 - longer
    return Distributions(keep, right.next_token)


def bonus_of_widest(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Takes the bonus of every row at the end of the widest draft, where shorter rows have padding."""
    right = rejection(p, scores, draft)

    def next_token(accepted: Tensor) -> Tensor:
        whole = (accepted == draft.lengths_on_device[:, 0])[:, None]
        return torch.where(whole, p[:, -1].clamp(min=1e-9), right.next_token(accepted))

    return Distributions(right.keep, next_token)


def lenient(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    if draft.probs is None:
        return rejection(p, scores, draft)
    return rejection(p, scores, replace(draft, probs=draft.probs * 0.8))


def block_without_scale(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    return Distributions(block(p, scores, draft).keep, rejection(p, scores, draft).next_token)


def residual_of_first_row(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    right = rejection(p, scores, draft)
    return Distributions(right.keep, lambda n: right.next_token(n)[:1].expand(len(p), -1))


RULES: dict[str, RuleFunction] = WRONG_RULES | {
    "everything kept after three": kept_from(3),
    "everything kept after three, sampled rows": only_if(lambda p, s, d: bool((p.amax(-1) < 1).any()), kept_from(3)),
    "raw bonus after whole drafts of four or more": bonus_after_four,
    "all kept below temperature 1": only_rows(sharper, all_kept),
    "all kept without filters": only_rows(unfiltered, all_kept),
    "all kept under filters": only_rows(lambda *case: ~unfiltered(*case), all_kept),
    "untested at depth 5": partial(always_accepted_at, 4),
    "wrong residual in batches": only_if(lambda p, s, d: len(p) > 1, residual_of_one_token),
    "wrong residual alone": only_if(lambda p, s, d: len(p) == 1, residual_of_one_token),
    "residual of the first row": residual_of_first_row,
    "bonus at the end of the widest draft": bonus_of_widest,
    "wrong for fixed drafts": only_if(lambda p, s, d: d.probs is None, partial(always_accepted_at, 1)),
    "lenient": lenient,
    "block without its scale": block_without_scale,
    "typical, called lossless": typical,
    "top-k, called lossless": topk,
}


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_rule_fails(name: str) -> None:
    assert fails(toy().using(acceptance=Rule(name, True, RULES[name])), "rule, by enumeration")


def test_sampled_texts_alone_catch_a_rule_that_is_wrong_deep_down() -> None:
    rule = Rule("untested at depth 5", True, RULES["untested at depth 5"])
    assert fails(toy().using(acceptance=rule), "distribution, likely drafts")


# drafters


class Drafting:
    """A user's drafter: the toy's own text, seen one character back."""

    def __init__(self) -> None:
        backend = ToyBackend(1)
        self.table = torch.stack([backend._distribution((token,)).softmax(-1) for token in range(backend.vocab_size)])
        self.traits = Traits(needs_forwards=False)

    def token(self, probs: Tensor, column: int, sampler: SamplerProtocol) -> Tensor:
        return sampler.draw(probs[:, None], first=column, stream=acceptance.Stream.DRAFT)[:, 0]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: SamplerProtocol) -> Draft:
        last = torch.tensor([row.tokens[-1] for row in rows])
        tokens, probs = [], []
        for column in range(max(lengths)):
            probs.append(self.table[last])
            last = self.token(probs[-1], column, sampler)
            tokens.append(last)
        if not tokens:
            return Draft.empty(len(rows), sampler.device)
        return Draft(torch.stack(tokens, 1), tuple(lengths), torch.stack(probs, 1))


class ArgmaxDrafting(Drafting):
    """Drafts its likeliest token, and says that it was sampled."""

    def token(self, probs: Tensor, column: int, sampler: SamplerProtocol) -> Tensor:
        return probs.argmax(-1)


class SharperDrafting(Drafting):
    """Samples at a lower temperature than it says."""

    def token(self, probs: Tensor, column: int, sampler: SamplerProtocol) -> Tensor:
        sharper = probs.pow(1.5)
        return super().token(sharper / sharper.sum(-1, keepdim=True), column, sampler)


@dataclass
class Ending(Drafting):
    """Ends its draft at the first token of small probability; right if that token stays in the draft."""

    cutoff: float
    is_kept: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: SamplerProtocol) -> Draft:
        draft = super().propose(rows, lengths, sampler)
        if draft.probs is None:
            return draft
        is_likely = draft.probs.gather(2, draft.tokens[:, :, None])[:, :, 0] >= self.cutoff
        return draft.cut((is_likely.long().cumprod(1).sum(1) + self.is_kept).tolist())


def sampled(drafter: Drafting, rule: str) -> Finding:
    """Texts with this drafter, the fewest of them."""
    decoder = SpeculativeDecoder("toy", drafter=drafter, num_draft_tokens=3, acceptance=rule)
    return Verifier(decoder, PROMPTS, budget=0.0).checks["distribution of sampled text"]()


def test_drafts_that_are_what_they_say_pass() -> None:
    assert sampled(Ending(0.2, is_kept=True), "rejection").passed


@pytest.mark.exhaustive
def test_drafts_that_end_by_confidence_pass() -> None:
    decoder = toy(num_draft_tokens="confidence:0.4", acceptance="block")
    assert Verifier(decoder, PROMPTS, budget=0.0).checks["distribution of sampled text"]().passed


LYING = [
    ("block", Ending(0.12)),
    ("rejection", Ending(0.2)),
    ("block", Ending(0.35)),
    ("rejection", ArgmaxDrafting()),
    ("block", SharperDrafting()),
]


@pytest.mark.parametrize(("rule", "drafter"), mostly_exhaustive(LYING, LYING[0], LYING[3]))
def test_a_drafter_that_lies_about_its_distribution_fails(rule: str, drafter: Drafting) -> None:
    finding = sampled(drafter, rule)
    assert finding.passed is False and "drafted tokens with q <" in finding.detail


def test_only_the_drafted_tokens_show_that_unlikely_ones_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_law, "UNLIKELY", [])
    assert sampled(Ending(0.2), "block").passed


# engines

SCORES, WARP, PENALISE, FORBID, PROBS = Sampler.scores, Warp.__call__, Penalties.apply, BadWords.apply, Sampler.probs
MATCH, MATCH_TREE, TOKEN_KEY = acceptance.match, acceptance.match_tree, Sampler._token_key


def one_more(choice: Tensor, draft: Draft) -> Verdict:
    """Accepts a token too many after four right ones."""
    verdict = MATCH(choice, draft)
    accepted = torch.where(
        (verdict.accepted >= 4) & (verdict.accepted < draft.width), verdict.accepted + 1, verdict.accepted
    )
    return Verdict(accepted, choice.gather(1, accepted[:, None])[:, 0])


def next_token_of_root(choice: Tensor, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    accepted, following, path = MATCH_TREE(choice, draft)
    return accepted, torch.where(accepted >= 3, choice[:, 1], following), path


def counted_forever(self: Penalties, scores: Tensor, draft: Tensor, first: int) -> None:
    """Penalties that count rejected draft tokens as well."""
    PENALISE(self, scores, draft, first)
    for row, tokens in enumerate(draft.tolist()):
        self.advance(row, tokens)


def warped_twice(self: Warp, scores: Tensor) -> Tensor:
    return WARP(self, WARP(self, scores).log())


def batched_probs(self: Sampler, scores: Tensor) -> Tensor:
    return PROBS(self, scores * (0.7 if len(scores) > 1 else 1.0))


# what is replaced by what, the decoder's settings, and the check that fails
ENGINES: dict[str, tuple[Any, str, Any, dict[str, Any], str]] = {
    "match: one token too many after four": (acceptance, "match", one_more, {}, "seeded text, one by one"),
    "match: another seed from depth 4 on": (
        Sampler,
        "_token_key",
        lambda self, row, offset: TOKEN_KEY(self, row, offset + (offset >= 4)),
        {},
        "planned drafts, seeded",
    ),
    "match: the next token of the wrong node": (
        acceptance,
        "match_tree",
        next_token_of_root,
        {"num_draft_tokens": "4x2"},
        "greedy text, one by one",
    ),
    "filters applied twice": (Warp, "__call__", warped_twice, {}, "distribution of sampled text"),
    "penalties not rolled back": (Penalties, "apply", counted_forever, {}, "option repetition_penalty"),
    "penalties not rolled back, block": (
        Penalties,
        "apply",
        counted_forever,
        {"acceptance": "block"},
        "option repetition_penalty",
    ),
    "bad words ignore the draft": (
        BadWords,
        "apply",
        lambda self, scores, draft, first: FORBID(self, scores, draft * 0, first),
        {},
        "option bad_words",
    ),
    "options depend on batch mates": (
        Sampler,
        "probs",
        batched_probs,
        {"acceptance": "rejection"},
        "distribution of sampled text",
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_wrong_engine_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, settings, failing = ENGINES[name]
    decoder = toy(**settings)
    monkeypatch.setattr(owner, attribute, wrong)
    assert fails(decoder, failing)


# kernels


def flipped(logits: Tensor, rows: Any = slice(None), columns: Any = slice(None)) -> Tensor:
    """The logits with the lowest bit of one of them turned."""
    logits = logits.clone()
    logits.view(torch.int32)[rows, columns, 101] ^= 1
    return logits


Forward = Callable[..., Tensor]


def at_one_width(forward: Forward, tokens: Tensor, starts: list[int], **options: Any) -> Tensor:
    logits = forward(tokens, starts, **options)
    return flipped(logits) if logits.dim() == 3 and tokens.shape[1] == 6 else logits


def at_one_position(forward: Forward, tokens: Tensor, starts: list[int], **options: Any) -> Tensor:
    logits = forward(tokens, starts, **options)
    return flipped(logits, columns=3) if logits.dim() == 3 and tokens.shape[1] > 3 else logits


def in_a_batch(forward: Forward, tokens: Tensor, starts: list[int], **options: Any) -> Tensor:
    logits = forward(tokens, starts, **options)
    return flipped(logits, rows=1) if logits.dim() == 3 and len(tokens) > 1 else logits


def beyond_a_length(forward: Forward, tokens: Tensor, starts: list[int], **options: Any) -> Tensor:
    logits = forward(tokens, starts, **options)
    return flipped(logits) if logits.dim() == 3 and starts[0] > 500 and tokens.shape[1] > 4 else logits


KERNELS = [at_one_width, at_one_position, in_a_batch, beyond_a_length]


@pytest.mark.parametrize("check", ["forward shapes agree", "planned drafts, greedy"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_with_one_wrong_bit_fails(kernel: Forward, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = toy()
    backend = decoder.target.backend
    monkeypatch.setattr(backend, "forward", partial(kernel, backend.forward))
    assert fails(decoder, check)


def test_a_wrong_bit_in_the_cache_of_keys_and_values_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = toy()
    backend: Any = decoder.target.backend
    forward = backend.forward

    def wrong(tokens: Tensor, starts: list[int], **options: Any) -> Tensor:
        logits = forward(tokens, starts, **options)
        if tokens.shape[1] >= LENGTH:
            backend._cache.slots[options["first_slot"], starts[0] + 1] ^= 1
        return logits

    monkeypatch.setattr(backend, "forward", wrong)
    assert fails(decoder, "greedy text, one by one")


# the originals

SETTINGS: list[dict[str, Any]] = [{"acceptance": "rejection"}, {"num_draft_tokens": "4x2"}]


@pytest.mark.exhaustive  # test_certificate.py runs all checks, too
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_right_passes(settings: dict[str, Any]) -> None:
    verifier = Verifier(toy(**settings), PROMPTS, max_tokens=24, budget=0.0)
    assert [check for check in verifier.run() if check.failed] == []
