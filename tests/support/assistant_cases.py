"""Tiny random Gemma 4 targets and assistants, and the drafts of the assistants by transformers' own forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.tiny_models import VOCAB, WINDOW, tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TARGET = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
SMALL = {  # as E2B and E4B: the last layers read keys of others, and each layer has an embedding of its own
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
ASSISTANT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "num_kv_shared_layers": 4,
}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": VOCAB, "centroid_intermediate_top_k": 20}


@dataclass(frozen=True)
class Pair:
    """The folders of a target and its assistant, and transformers' models of them."""

    target: Path
    assistant: Path

    @property
    def models(self) -> tuple[Any, Any]:
        return (
            transformers.AutoModelForCausalLM.from_pretrained(self.target, dtype="auto").eval(),
            transformers.Gemma4AssistantForCausalLM.from_pretrained(self.assistant, dtype="auto").eval(),
        )


def write_pair(
    folder: Path, *, small: bool = False, ordered: bool = False, dtype: Any = torch.float32, **changes: Any
) -> Pair:
    """A target and an assistant. changes: of the assistant's text configuration."""
    pair = Pair(folder / "target", folder / "assistant")
    config = transformers.Gemma4TextConfig(**SHAPE | TARGET | (SMALL if small else {}))
    text_config = transformers.Gemma4TextConfig(**SHAPE | ASSISTANT | changes)
    assistant_config = transformers.Gemma4AssistantConfig(
        text_config=text_config, backbone_hidden_size=SHAPE["hidden_size"], **ORDERED if ordered else {}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(pair.target)
        assistant = transformers.Gemma4AssistantForCausalLM(assistant_config).to(dtype)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    assistant.save_pretrained(pair.assistant)
    tokenizer().save_pretrained(pair.target)
    return pair


class Transcription:
    """The drafts of an assistant by transformers' forwards; the target's states are computed again for every text."""

    def __init__(self, pair: Pair) -> None:
        self.target, self.assistant = pair.models

    @torch.inference_mode()
    def logits(
        self, text: Sequence[int], draft: Sequence[int], *, shift: int = 0, moving: int = 0, kept: int = 0
    ) -> Tensor:
        """[K, V] logits for each token of a draft after a text. The options make it wrong, for negative controls.

        shift: takes an earlier hidden state of the target; moving: moves the position with every token; kept: sees keys
        of further tokens that the target has not read.
        """
        read = torch.tensor([list(text)])[:, : len(text) - 1 + kept]
        options = {"output_hidden_states": True, "return_shared_kv_states": True}
        outputs = self.target(input_ids=read, use_cache=False, **options)
        state = outputs.hidden_states[-1][:, [len(text) - 2 - shift]]
        logits = list[Tensor]()
        for step, token in enumerate([text[-1], *draft[:-1]]):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            scored = self.assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1 + moving * step]]),
                shared_kv_states=dict(outputs.shared_kv_states),
            )
            logits.append(scored.logits[0, 0])
            state = scored.last_hidden_state
        return torch.stack(logits)
