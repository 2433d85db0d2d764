"""The models, the arms and the comparisons of logits for `gpu.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from slipstream import SamplingParams
from slipstream.core.interfaces import Drafter, Source
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row, Verdict
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import SlipstreamError
from slipstream.models.cuda.graph_backend import GraphedBackend, use_kernels
from slipstream.models.hf.trials import OwnLogits
from slipstream.reproducibility.calibration import calibrate
from slipstream.reproducibility.timing import wait_for_device
from slipstream.sampling.sampler import Sampler

FAINT = 2.0**-10  # factor of embeddings with which the random layers outweigh the last token
SPREAD = 16.0  # standard deviation of embeddings with which the last token outweighs the random layers

SHARED = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
TARGET = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
DRAFT = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
TINY = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 2048}
TINY_TARGET = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY_DRAFT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@dataclass(frozen=True)
class Setting:
    """Shared by every arm."""

    target: Any
    draft: Any
    prompts: list[list[int]]
    wrong: Tensor  # [rows, positions], true where a draft token is replaced by a wrong one
    max_tokens: int
    num_draft_tokens: int

    @property
    def device(self) -> torch.device:
        """The device of models and tensors."""
        return self.wrong.device


@dataclass
class Arm:
    """A way to generate."""

    name: str
    run: Callable[[int], list[list[int]]]  # takes a number of rows and returns their new tokens
    seconds: list[float] = field(default_factory=list)  # one per repeat
    texts: list[list[int]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)  # median milliseconds
    error: str | None = None
    backends: tuple[Any, Any | None] | None = None  # of target and draft model; None for Hugging Face


def build(shape: dict[str, int], device: torch.device) -> Any:
    """A bf16 model of random weights on the device, whose choice is the token id after the last one."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embedding.normal_(0, SPREAD)
        head.copy_(embedding.roll(1, 0)).mul_(1 / (SPREAD * config.hidden_size**0.5))
    model.generation_config.eos_token_id = None
    return model


def by_kernels(model: Any) -> GraphedBackend:
    """A captured backend that computes by Triton kernels, as `fast="auto"` makes it; without a GPU by transformers."""
    backend = GraphedBackend(model)
    reason = use_kernels(backend, OwnLogits(backend.eager), may_join=True)
    if backend.device.type == "cuda" and reason is not None:
        raise SlipstreamError(f"the kernels are not used: {reason}")
    return backend


@dataclass
class Mistaken:
    """Replaces some of another drafter's tokens by wrong ones. wait: called after each proposal."""

    inner: Drafter | None  # None where only `spoil` is used
    wrong: Tensor
    vocab_size: int
    wait: Callable[[], None]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """Propose without a transfer from the device."""
        assert self.inner is not None
        draft = self.inner.propose(rows, lengths, sampler)
        if draft.width:
            places = torch.tensor([[row.index, len(row.tokens)] for row in rows]).to(
                self.wrong.device, non_blocking=True
            )
            columns = places[:, 1:] + torch.arange(draft.width, device=self.wrong.device)
            draft = replace(draft, tokens=self.spoil(draft.tokens, self.wrong[places[:, :1], columns]))
        self.wait()
        return draft

    def spoil(self, tokens: Tensor, wrong: Tensor) -> Tensor:
        """The tokens, with other ones where `wrong` is true."""
        return torch.where(wrong, (tokens + 1) % self.vocab_size, tokens)


class WaitingSession(Session):
    """A session that waits for the device after every forward, so that stages can be timed."""

    def score(self, *arguments: Any, **options: Any) -> Tensor:
        """See `Session.score`."""
        logits = super().score(*arguments, **options)
        wait_for_device(logits.device)
        return logits

    def verify_greedy(self, *arguments: Any, **options: Any) -> Verdict | None:
        """See `Session.verify_greedy`. Its time counts as "verify", the acceptance included."""
        verdict = super().verify_greedy(*arguments, **options)
        wait_for_device(self.backend.device)
        return verdict


def slipstream_arm(name: str, setting: Setting, backends: tuple[Any, Any | None], waiting: bool = False) -> Arm:
    """An arm of Slipstream. backends: of the target and, to speculate, of the draft model."""
    target = (WaitingSession if waiting else Session)(backends[0])
    draft = None if backends[1] is None else Session(backends[1])
    wait = (lambda: wait_for_device(setting.device)) if waiting else (lambda: None)
    vocab, count = target.backend.vocab_size, setting.num_draft_tokens if draft else 0
    sources = [] if draft is None else [Source(Mistaken(ModelDrafter(draft, vocab), setting.wrong, vocab, wait))]

    def run(rows: int) -> list[list[int]]:
        scheduler = Scheduler(Engine(target, sources, Fixed(count), Sampler, "auto", draft), rows)
        for session in (target, draft):
            if session is not None:
                session.forget()
        params = SamplingParams(max_tokens=setting.max_tokens).explicit
        batch = [Row(i, list(ids), params, i) for i, ids in enumerate(setting.prompts[:rows])]
        arm.rounds = [round_ for round_ in scheduler.run(batch) if round_.row == 0]
        return [row.output for row in batch]

    arm = Arm(name, run, backends=backends)
    return arm


def hf_arm(name: str, setting: Setting, assistant: Any = None) -> Arm:
    """Hugging Face's `generate`, or its assisted generation with wrong draft tokens at the same positions."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": setting.max_tokens, "pad_token_id": 0}
    target, make = setting.target, setting.target._get_candidate_generator
    spoiler = Mistaken(None, setting.wrong, target.config.vocab_size, lambda: None)

    def make_mistaken(**options: Any) -> Any:
        generator = make(**options)
        propose = generator.get_candidates

        def get_candidates(input_ids: Tensor, **options: Any) -> Any:
            ids, logits = propose(input_ids, **options)
            length = input_ids.shape[1]
            spoilt = spoiler.spoil(ids[:, length:], setting.wrong[:1, length : ids.shape[1]])
            return torch.cat([ids[:, :length], spoilt], dim=1), logits

        generator.get_candidates = get_candidates
        return generator

    def run(rows: int) -> list[list[int]]:
        ids = torch.tensor(setting.prompts[:rows], device=setting.device)
        if assistant is None:
            out = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
            return out[:, ids.shape[1] :].tolist()
        config = assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = setting.num_draft_tokens, "constant"
        config.assistant_confidence_threshold = 0.0
        target._get_candidate_generator = make_mistaken
        try:
            out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **options)
        finally:
            del target._get_candidate_generator
        return out[:, ids.shape[1] :].tolist()

    return Arm(name, run)


def agreeing_widths(backend: Any) -> str:
    """The widths that a calibration for eight rows finds, and what keeping to them costs a plain step.

    Overwrites the KV cache.
    """
    calibration = calibrate(backend, 8)
    return f"{', '.join(map(str, calibration.widths))} ({calibration.cost:+.0%})" if calibration.agrees else "none"


def fixed_order(backend: Any, prompts: list[list[int]], longest: int) -> dict[str, int]:
    """Counts the tokens that have, in forwards of every width and number of rows, the same bits as alone.

    Overwrites the KV cache.
    """
    rows, length = len(prompts), len(prompts[0])
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, backend.vocab_size, (rows, longest), generator=generator).to(backend.device)
    starts = [length - row for row in range(rows)]
    backend.reserve(rows, length + 64)
    for slot, prompt in enumerate(prompts):
        backend.forward(torch.tensor([prompt], device=backend.device), [0], first_slot=slot, logits=False)
    alone = torch.stack(
        [
            torch.stack(
                [
                    backend.forward(tokens[row : row + 1, i : i + 1], [starts[row] + i], first_slot=row, logits=True)[
                        0, 0
                    ]
                    for i in range(longest)
                ]
            )
            for row in range(rows)
        ]
    )
    counts = {"same": 0, "of": 0}
    for count in range(1, rows + 1):
        for width in range(1, longest + 1):
            logits = backend.forward(tokens[:count, :width], starts[:count], first_slot=0, logits=True)
            counts["same"] += int((logits == alone[:count, :width]).all(-1).sum())
            counts["of"] += count * width
    return counts


def _shapes() -> Iterator[tuple[int, int]]:
    """Numbers of rows and widths whose logits are compared."""
    yield from ((rows, width) for rows in (1, 2, 3, 8) for width in (1, 5, 8, 12))


def compare_logits(setting: Setting, backends: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Compare the logits of every kind of backend with eager's after the same ragged random contexts.

    of_other_contexts: how much the logits change with another row's prompt, as they would by a mistake in the KV cache.
    """
    embedding = setting.target.get_input_embeddings().weight
    with torch.no_grad():
        embedding.mul_(FAINT)
        try:
            kinds = [kind for kind in backends if kind != "eager"]
            return {kind: _compare(setting, (backends["eager"][0], backends[kind][0])) for kind in kinds}
        finally:
            embedding.div_(FAINT)


def _compare(setting: Setting, pair: Sequence[Any]) -> dict[str, float]:
    worst, agree, positions = 0.0, 0, 0
    generator = torch.Generator().manual_seed(2)
    for backend in pair:
        backend.reserve(len(setting.prompts), len(setting.prompts[0]) + 64)
        for slot, prompt in enumerate(setting.prompts):
            backend.forward(torch.tensor([prompt], device=setting.device), [0], first_slot=slot, logits=False)
    for rows, width in _shapes():
        tokens = torch.randint(0, pair[0].vocab_size, (rows, width), generator=generator).to(setting.device)
        starts = [len(setting.prompts[0]) - row for row in range(rows)]
        eager, logits = (b.forward(tokens, starts, first_slot=0, logits=True).float() for b in pair)
        worst = max(worst, float((eager - logits).abs().max() / eager.abs().max()))
        agree, positions = agree + int((eager.argmax(-1) == logits.argmax(-1)).sum()), positions + rows * width
    tokens, starts = torch.zeros(1, 1, dtype=torch.int64, device=setting.device), [len(setting.prompts[0]) - 2]
    first, second = (pair[0].forward(tokens, starts, first_slot=slot, logits=True).float() for slot in (0, 1))
    control = float((first - second).abs().max() / first.abs().max())
    share = agree / positions
    return {"largest_relative_difference": worst, "share_of_equal_argmax": share, "of_other_contexts": control}
