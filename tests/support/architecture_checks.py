"""What a tiny model of any architecture must do: its drafted texts are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.errors import UsageError, first_line
from slipstream.models.cpu.compiled_layers import LayerCalls
from slipstream.models.decoder.fused_layer import is_fused
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.own_caches import OwnCacheBackend
from slipstream.sampling.sampler import Sampler
from tests.support.architectures import Unbuilt, tiny_model

Verdict = Literal["works", "refused", "differs", "crashes", "unbuilt"]
KERNELS = "all layers in one call", "compiled layers", "fused layers", "own forward"

COUNT = 20  # tokens of a text
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [11, 12, 13], [3, 4] * 12]
QUEUE = [*PROMPTS, [21, 22, 23] * 13, [30]]  # more rows than a batch holds; one exceeds every window
LENGTHS = [6, COUNT, 9, 14, 17]
MOST_WRONG = 4
TIE = 1e-4  # of the largest logit: the resolution of float32 after a few layers
TIES = {torch.float32: TIE, torch.bfloat16: 0.04}


@dataclass(frozen=True)
class Outcome:
    """The result for one architecture. detail: the checks that differ, or why there is nothing to check.

    margin: where a text differs, the gap between the logits of `generate`'s token and ours, as a share of the largest
    logit. tokens_per_round: of a model that drafts for itself. how: the cache it runs on. kernels: what computes its
    layers. fast: the result with fast=True of a model that works without. wide: the same in a size that the kernels
    take, in bfloat16.
    """

    verdict: Verdict
    detail: str = ""
    margin: float = 0.0
    ties: int = 0
    tokens_per_round: float = 0.0
    how: str = ""
    kernels: str = ""
    fast: Outcome | None = None
    wide: Outcome | None = None


@dataclass
class PartlyWrongDrafter:
    """Proposes right tokens followed by wrong ones; the number of right ones is 0, 1, ... in turn.

    texts: prompt -> its text. right: the number of right tokens in every draft; None: in turn.
    """

    texts: dict[tuple[int, ...], list[int]]
    vocab_size: int
    right: int | None = None
    rounds: int = 0

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.rounds += 1
        proposals = []
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            text = self.texts[tuple(row.tokens[: row.prompt_length])][row.num_output_tokens :][:length]
            right = (self.rounds + place) % (MOST_WRONG + 1) if self.right is None else self.right
            proposals.append([t if i < right else (t + 1) % self.vocab_size for i, t in enumerate(text)])
        return Draft.from_lists(proposals, sampler.device)


@dataclass
class Checks:
    """The checks of one model. draft: the draft model, by default the model itself; fast: the decoder's option."""

    model: Any
    prompts: Sequence[list[int]] = tuple(QUEUE)
    ties: int = 0
    margin: float = 0.0
    wrong: list[str] = field(default_factory=list)
    draft: Any = None
    fast: bool | str = "auto"

    @cached_property
    def texts(self) -> dict[tuple[int, ...], list[int]]:
        """The greedy text of `generate` after each prompt."""
        return {tuple(prompt): self._generate(prompt) for prompt in self.prompts}

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        draft = self.model if self.draft is None else self.draft
        shared = {"drafter": "model", "num_draft_tokens": 3, "max_batch_size": 3, "reproducible": False}
        return SpeculativeDecoder(self.model, draft, fast=self.fast, **shared)

    def run(self, quick: bool = False) -> Outcome:
        """All checks, or with `quick` those of greedy texts."""
        try:
            assert self.texts
        except Exception as error:
            return Outcome("unbuilt", f"generate itself fails: {type(error).__name__}: {first_line(error)[:120]}")
        name = "making a decoder"
        try:
            assert self.decoder.target
            checks: list[tuple[str, Callable[[SpeculativeDecoder], None]]] = [("greedy", self.greedy)]
            checks += [] if quick else [("sampled", self.sampled), ("queue", self.queue), ("rejected", self.rejected)]
            for name, run_check in checks:  # noqa: B007  # the name is for the error
                run_check(self.decoder)
        except UsageError as error:
            return Outcome("refused", first_line(error))
        except Exception as error:
            return Outcome("crashes", f"{name}: {type(error).__name__}: {first_line(error)[:160]}")
        verdict: Verdict = "differs" if self.wrong else "works"
        result = self.decoder.generate(PROMPTS[0], greedy(COUNT))
        rate = result.stats.block_efficiency
        return Outcome(verdict, ", ".join(self.wrong), self.margin, self.ties, rate, self.how, self.kernels)

    @property
    def how(self) -> str:
        """Which cache the model runs on."""
        backend = self.decoder.target.backend
        if isinstance(backend, HFBackend):
            words = "slots of a KV cache" if backend.cache.states is None else "slots, with states of recurrent layers"
            return words + (", fused layers" if any(map(is_fused, backend.model.modules())) else "")
        assert isinstance(backend, OwnCacheBackend)
        return "caches of its own" + ("" if backend.takes_several_tokens else ", drafts token by token")

    @property
    def kernels(self) -> str:
        """What computes the model's layers."""
        backend = self.decoder.target.backend
        layers = [module.forward for module in backend.model.modules() if is_fused(module)]
        if isinstance(backend, HFBackend) and backend.stack is not None:
            return KERNELS[0]
        are_compiled = layers and all(isinstance(layer.ops, LayerCalls) for layer in layers)
        return KERNELS[1] if are_compiled else KERNELS[2] if layers else KERNELS[3]

    def greedy(self, decoder: SpeculativeDecoder) -> None:
        """Compares texts of a ragged batch, with every kind of drafter; where bits agree, drafts may change none."""
        texts = [
            self._compare(name, [COUNT] * 3, drafting, PROMPTS) for name, drafting in self._drafting(decoder).items()
        ]
        if getattr(decoder.target.backend, "shape_independent", False) and any(text != texts[0] for text in texts):
            self.wrong.append("drafts")

    def sampled(self, decoder: SpeculativeDecoder) -> None:
        """Compares seeded texts: drafts verified by `match` change none."""
        params = [
            SamplingParams(temperature=0.8, max_tokens=COUNT, ignore_eos=True, seed=seed)
            for seed in range(len(PROMPTS))
        ]
        texts = [
            [result.token_ids for result in drafting.using(acceptance="match").generate(PROMPTS, params)]
            for drafting in self._drafting(decoder).values()
        ]
        if texts[1] != texts[0] or texts[2] != texts[0]:
            self.wrong.append("sampled")

    def queue(self, decoder: SpeculativeDecoder) -> None:
        """Compares texts while rows end and others enter."""
        for name, drafting in self._drafting(decoder).items():
            self._compare(f"{name} with rows entering", LENGTHS, drafting, QUEUE)

    def rejected(self, decoder: SpeculativeDecoder) -> None:
        """Compares texts with drafts of which some or no tokens are right."""
        vocab_size = decoder.target.backend.vocab_size
        for name, right in (("rejections", None), ("wrong drafts", 0)):
            drafter = PartlyWrongDrafter(self.texts, vocab_size, right)
            self._compare(name, LENGTHS, decoder.using(drafter, num_draft_tokens=MOST_WRONG), QUEUE)
            assert drafter.rounds

    def _drafting(self, decoder: SpeculativeDecoder) -> dict[str, SpeculativeDecoder]:
        plain, ngram = decoder.using("none", num_draft_tokens="auto"), decoder.using("ngram", num_draft_tokens=4)
        return {"none": plain, "ngram": ngram, "model": decoder}

    def _compare(
        self, name: str, lengths: Sequence[int], decoder: SpeculativeDecoder, prompts: Sequence[list[int]]
    ) -> list[list[int]]:
        results = decoder.generate([list(prompt) for prompt in prompts], [greedy(length) for length in lengths])
        same = [
            self.agrees(prompt, result.token_ids, length)
            for prompt, result, length in zip(prompts, results, lengths, strict=True)
        ]
        if not all(same):
            self.wrong.append(name)
        return [result.token_ids for result in results]

    def agrees(self, prompt: list[int], text: list[int], length: int) -> bool:
        """Whether a text is `generate`'s, up to a tie of two tokens."""
        expected = self.texts[tuple(prompt)][:length]
        if text == expected:
            return True
        if len(text) != length:
            return False
        position = next(i for i, (ours, theirs) in enumerate(zip(text, expected, strict=True)) if ours != theirs)
        models = deepcopy(self.model), deepcopy(self.model).float()
        logits, exact = (generated(model, prompt + expected[:position], 1).logits[0][0] for model in models)
        margin = float((logits[expected[position]] - logits[text[position]]) / logits.abs().max())
        rounding = float((logits - exact).abs().max() / logits.abs().max())  # large where a router chose other experts
        if abs(margin) <= max(TIES[self.model.dtype], rounding):
            self.ties += 1
            return True
        self.margin = max(self.margin, margin, key=abs)
        return False

    def _generate(self, prompt: list[int]) -> list[int]:
        model = deepcopy(self.model)  # some models leave a state in their modules
        text: list[int] = generated(model, prompt, COUNT).sequences[0, len(prompt) :].tolist()
        if len(text) != COUNT:
            raise Unbuilt(f"{len(text)} tokens instead of {COUNT}")
        return text


@torch.inference_mode()
def generated(model: Any, prompt: list[int], length: int) -> Any:
    """The greedy text that `generate` returns, with its logits: it may prepare other inputs than a bare forward."""
    ids = torch.tensor([prompt])
    if model.generation_config is not None:
        model.generation_config.forced_eos_token_id = None  # it would replace the last token
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)


def check(model_type: str, quick: bool = False) -> Outcome:
    """Builds the tiny model of a type and checks it; unless `quick`, also with fast=True and in the wide size."""
    model = built(model_type)
    if isinstance(model, Outcome):
        return model
    checks = Checks(model, PROMPTS if quick else QUEUE)
    outcome = checks.run(quick)
    if quick or outcome.verdict != "works":
        return outcome
    packed = Checks(tiny_model(model_type), QUEUE, draft=tiny_model(model_type), fast=True)
    packed.texts = checks.texts  # those of the model before its layers were replaced
    return replace(outcome, fast=packed.run(), wide=check_wide(model_type))


def check_wide(model_type: str) -> Outcome:
    """Checks greedy texts of the tiny model of a type that is wide enough for the kernels, in bfloat16."""
    model = built(model_type, wide=True)
    if isinstance(model, Outcome):
        return model
    return Checks(model, PROMPTS, draft=tiny_model(model_type, wide=True), fast=True).run(quick=True)


def built(model_type: str, wide: bool = False) -> Any:
    """The tiny model of a type; an outcome if there is none."""
    try:
        return tiny_model(model_type, wide)
    except Unbuilt as error:
        return Outcome("unbuilt", str(error))
    except Exception as error:
        return Outcome("unbuilt", f"{type(error).__name__}: {first_line(error)[:120]}")
