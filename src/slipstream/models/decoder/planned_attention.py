"""Attention with gates, norms of values, another layer's keys or latents, which `LayerOps` leaves to a model's module.

It computes operator by operator what transformers' modules compute, which are the specification, and calls its
submodules by their names there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.decoder.attention import Scores, attend, group_mask
from slipstream.models.decoder.cache import SlotCache
from slipstream.models.decoder.fused_layer import Rope, RotaryEmbedding
from slipstream.models.decoder.plan import LatentPlan, LayerPlan, in_halves

Keys = tuple[Tensor, Tensor]  # keys and values [B, heads, S, D] that a forward attends to


class PlannedAttention(nn.Module):
    """The attention of a layer whose plan has a `mixer`, without recurrence."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self._plan, self._rotation = plan, RotaryEmbedding()
        self._rotated = replace(plan, rotates_pairs=plan.rotates_pairs and not plan.parts_pairs)

    def forward(
        self,
        x: Tensor,
        *,
        position_embeddings: Rope,
        attention_mask: Tensor,
        past_key_values: SlotCache,
        shared_kv_states: dict[int, Keys],
        **_: Any,
    ) -> Tensor:
        """x: [B, W, H] -> [B, W, H]. shared_kv_states: by layer, for later layers of the same forward."""
        own: Any = self  # with its submodules
        plan = self._plan
        if plan.latent is not None:
            queries, keys, values = self._of_latents(x, position_embeddings, past_key_values, plan.latent)
            gates = None
        else:
            of_heads = own.q_proj(x).unflatten(-1, (plan.heads, -1))
            queries = self._rotate(own.q_norm(of_heads[..., : plan.size]), position_embeddings)
            gates = of_heads[..., plan.size :] if plan.gates_queries else None
            if not plan.reuses_keys:
                shared_kv_states[plan.index] = self._store(x, position_embeddings, past_key_values)
            keys, values = shared_kv_states[plan.index if plan.keys_of is None else plan.keys_of]
        mask = attention_mask
        if mask.dtype == torch.bool:  # layers differ in their heads
            mask = group_mask(mask, plan.heads // keys.shape[1], x.dtype)
        out = attend(queries.transpose(1, 2), keys, values, mask, Scores(plan.scaling)).transpose(1, 2)
        out = out if gates is None else out * torch.sigmoid(gates)
        projected: Tensor = own.o_proj(out.flatten(2))
        return projected

    def _store(self, x: Tensor, rope: Rope, cache: SlotCache) -> Keys:
        own: Any = self
        plan = self._plan
        keys = own.k_proj(x).unflatten(-1, (plan.key_heads, -1))
        values = keys if plan.shares_values else own.v_proj(x).unflatten(-1, (plan.key_heads, -1))
        values = values if plan.values_norm is None else own.v_norm(values)
        rotated = self._rotate(own.k_norm(keys), rope)
        return cache.update(rotated.transpose(1, 2), values.transpose(1, 2), plan.index)

    def _of_latents(self, x: Tensor, rope: Rope, cache: SlotCache, plan: LatentPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, W, heads, D], and keys and values of all heads. The cache keeps latents and rotated parts."""
        own: Any = self
        heads, rotated = plan.count, self._plan.rotated
        queries = own.q_proj(x) if plan.queries_up is None else own.q_b_proj(own.q_a_layernorm(own.q_a_proj(x)))
        plain, part = queries.unflatten(-1, (heads, -1)).split((plan.plain, rotated), -1)
        queries = torch.cat((plain, self._rotate(part, rope)), -1)
        latents, part = own.kv_a_proj_with_mqa(x).unsqueeze(2).split((plan.rank, rotated), -1)
        part = self._rotate(part, rope)
        latents, part = cache.update(
            own.kv_a_layernorm(latents).transpose(1, 2), part.transpose(1, 2), self._plan.index
        )
        both = own.kv_b_proj(latents[:, 0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        keys, values = both.split((plan.plain, plan.values), -1)
        return queries, torch.cat((keys, part.expand(-1, heads, -1, -1)), -1), values

    def _rotate(self, heads: Tensor, rope: Rope) -> Tensor:
        """heads: [B, W, heads, D]."""
        return self._rotation(in_halves(heads) if self._plan.parts_pairs else heads, rope, self._rotated)
