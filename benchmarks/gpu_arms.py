"""The models, the ways to generate and the comparisons of logits that `gpu.py` measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from slipstream import SamplingParams
from slipstream.core.interfaces import Drafter
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row, Verdict
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.models.cuda.graph_backend import GraphedBackend, make_graphs_faster
from slipstream.models.cuda.triton_layer import TritonOps
from slipstream.models.decoder.fused_layer import is_fused
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.trials import OwnLogits
from slipstream.reproducibility.calibration import calibrate
from slipstream.sampling.sampler import Sampler

FAINT = 2.0**-10  # a factor of embeddings that lets random layers outweigh the last token
SPREAD = 16.0  # of embeddings: the last token outweighs what random layers add to it

SHARED = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
TARGET = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
DRAFT = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
TINY = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 2048}
TINY_TARGET = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY_DRAFT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@dataclass(frozen=True)
class Setting:
    """What every arm shares. wrong: [rows, positions], where the draft is replaced by a wrong token.

    faster_target, faster_draft: the same models once more, whose layers are replaced.
    """

    target: Any
    draft: Any
    faster_target: Any
    faster_draft: Any
    prompts: list[list[int]]
    wrong: Tensor
    max_tokens: int
    num_draft_tokens: int

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.wrong.device


@dataclass
class Arm:
    """One way to generate: for a number of rows, their new tokens.

    seconds: one per repeat; stages: milliseconds; backends: of target and draft model, if it is one of ours.
    """

    name: str
    run: Callable[[int], list[list[int]]]
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    backends: tuple[Any, Any | None] | None = None


def build(shape: dict[str, int], device: torch.device) -> Any:
    """A bf16 model of random weights on the device that says the id after the last one."""
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


def fused(model: Any) -> GraphedBackend:
    """Captured, with joint products and, where there is a GPU, Triton kernels: what `fast=True` makes of a model."""
    fuse(model)
    backend = GraphedBackend(model)
    make_graphs_faster(backend, OwnLogits(backend.eager))
    return backend


def with_library_products(model: Any) -> GraphedBackend:
    """A model that was `fused`, its products by PyTorch's libraries. What `fused` returned stays as it is."""
    for forward in (module.__dict__["forward"] for module in model.modules() if is_fused(module)):
        if isinstance(forward.ops, TritonOps):
            forward.ops = TritonOps(forward.plain)
            for product in forward.ops.products:
                product.has_kernel = False
    return GraphedBackend(model)


@dataclass
class Mistaken:
    """Another drafter's tokens, some replaced by wrong ones; `wait` is called when they are there."""

    inner: Drafter
    wrong: Tensor
    vocab_size: int
    wait: Callable[[], None]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """All on the device, as the inner drafter's tokens are."""
        draft = self.inner.propose(rows, lengths, sampler)
        if draft.width:
            where = torch.tensor([[row.index, len(row.tokens)] for row in rows]).to(
                self.wrong.device, non_blocking=True
            )
            columns = where[:, 1:] + torch.arange(draft.width, device=self.wrong.device)
            draft = replace(draft, tokens=self.spoil(draft.tokens, self.wrong[where[:, :1], columns]))
        self.wait()
        return draft

    def spoil(self, tokens: Tensor, wrong: Tensor) -> Tensor:
        """The tokens, other ones where they shall be wrong."""
        return torch.where(wrong, (tokens + 1) % self.vocab_size, tokens)


class WaitingSession(Session):
    """A session whose scores are there when it returns, for times by stage."""

    def score(self, *arguments: Any, **options: Any) -> Tensor:
        """As `Session.score`."""
        logits = super().score(*arguments, **options)
        wait_for(logits.device)
        return logits

    def verify_greedy(self, *arguments: Any, **options: Any) -> Verdict | None:
        """As `Session.verify_greedy`; then a part of "verify" is the acceptance."""
        verdict = super().verify_greedy(*arguments, **options)
        wait_for(self.backend.device)
        return verdict


def wait_for(device: torch.device) -> None:
    """Until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slipstream_arm(name: str, setting: Setting, backends: tuple[Any, Any | None], waiting: bool = False) -> Arm:
    """Slipstream over a target backend and, to speculate, one of the draft model."""
    target = (WaitingSession if waiting else Session)(backends[0])
    draft = None if backends[1] is None else Session(backends[1])
    wait = (lambda: wait_for(setting.device)) if waiting else (lambda: None)
    vocab, count = target.backend.vocab_size, setting.num_draft_tokens if draft else 0
    inner = NoDrafter(setting.device) if draft is None else ModelDrafter(draft, vocab)
    drafter = Mistaken(inner, setting.wrong, vocab, wait)

    def run(rows: int) -> list[list[int]]:
        scheduler = Scheduler(Engine(target, drafter, Fixed(count), Sampler, "auto", draft), rows)
        for session in (target, draft):
            if session is not None:
                session.forget()
        params = SamplingParams(max_tokens=setting.max_tokens)
        batch = [Row(i, list(ids), params, i) for i, ids in enumerate(setting.prompts[:rows])]
        arm.rounds = [done for done in scheduler.run(batch) if done.row == 0]
        return [row.output for row in batch]

    arm = Arm(name, run, backends=backends)
    return arm


def hf_arm(name: str, setting: Setting, assistant: Any = None) -> Arm:
    """Hugging Face `generate`, or its assisted generation with the same wrong tokens in the candidates."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": setting.max_tokens, "pad_token_id": 0}
    target, make = setting.target, setting.target._get_candidate_generator
    spoiler = Mistaken(NoDrafter(setting.device), setting.wrong, target.config.vocab_size, lambda: None)

    def mistaken(**given: Any) -> Any:
        generator = make(**given)
        propose = generator.get_candidates

        def get_candidates(input_ids: Tensor, **more: Any) -> Any:
            ids, logits = propose(input_ids, **more)
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
        own = assistant.generation_config
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = setting.num_draft_tokens, "constant"
        own.assistant_confidence_threshold = 0.0
        target._get_candidate_generator = mistaken
        try:
            out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **options)
        finally:
            del target._get_candidate_generator
        return out[:, ids.shape[1] :].tolist()

    return Arm(name, run)


def agreeing_widths(backend: Any) -> str:
    """The widths that calibration finds for up to eight rows, and what keeping to them costs a plain step.

    It writes over what is cached.
    """
    found = calibrate(backend, 8)
    return f"{', '.join(map(str, found.widths))} ({found.cost:+.0%})" if found.agrees else "none"


def fixed_order(backend: Any, prompts: list[list[int]], longest: int) -> dict[str, int]:
    """How many tokens have the bits that they have alone, in forwards of every width and number of rows.

    It writes over what is cached.
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
    """Rows and widths whose logits are compared."""
    yield from ((rows, width) for rows in (1, 2, 3, 8) for width in (1, 5, 8, 12))


def compare_logits(setting: Setting, backends: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Graphed and fused against eager after the same ragged random contexts.

    of_other_contexts: the difference that another row's prompt makes, which a mistake in the KV cache would resemble.
    """
    embeddings = [model.get_input_embeddings().weight for model in (setting.target, setting.faster_target)]
    with torch.no_grad():
        for embedding in embeddings:
            embedding.mul_(FAINT)
        try:
            kinds = [kind for kind in backends if kind != "eager"]
            return {kind: _compare(setting, (backends["eager"][0], backends[kind][0])) for kind in kinds}
        finally:
            for embedding in embeddings:
                embedding.div_(FAINT)


def _compare(setting: Setting, pair: Sequence[Any]) -> dict[str, float]:
    worst, agree, positions = 0.0, 0, 0
    generator = torch.Generator().manual_seed(2)
    for backend in pair:
        backend.reserve(8, len(setting.prompts[0]) + 64)
        for slot, prompt in enumerate(setting.prompts):
            backend.forward(torch.tensor([prompt], device=setting.device), [0], first_slot=slot, logits=False)
    for rows, width in _shapes():
        tokens = torch.randint(0, pair[0].vocab_size, (rows, width), generator=generator).to(setting.device)
        starts = [len(setting.prompts[0]) - row for row in range(rows)]
        one, other = (b.forward(tokens, starts, first_slot=0, logits=True).float() for b in pair)
        worst = max(worst, float((one - other).abs().max() / one.abs().max()))
        agree, positions = agree + int((one.argmax(-1) == other.argmax(-1)).sum()), positions + rows * width
    tokens, starts = torch.zeros(1, 1, dtype=torch.int64, device=setting.device), [len(setting.prompts[0]) - 2]
    own, other = (pair[0].forward(tokens, starts, first_slot=slot, logits=True).float() for slot in (0, 1))
    controller = float((own - other).abs().max() / own.abs().max())
    share = agree / positions
    return {"largest_relative_difference": worst, "share_of_equal_argmax": share, "of_other_contexts": controller}
