"""Recognizes a checkpoint's multi-token-prediction layers by the names of their tensors.

They follow the target's layers (`model.layers.61`, in DeepSeek-V3 and GLM-4.5), or are under `mtp` (Qwen3-Next,
Qwen3.5) or `model.mtp_layers` (MiMo). Transformers leaves them out of the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

AFTER_LAYERS = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)")
IN_LAYERS = re.compile(r"(?:model\.)?(?:mtp\.layers|mtp_layers)\.(\d+)\.(.+)")
OF_ALL = re.compile(r"mtp\.(.+)")  # parts that all layers share
PARTS = {  # of a layer, in addition to its decoder layer
    "token_norm": ("enorm.weight", "pre_fc_norm_embedding.weight", "token_layernorm.weight"),
    "hidden_norm": ("hnorm.weight", "pre_fc_norm_hidden.weight", "hidden_layernorm.weight"),
    "project": ("eh_proj.weight", "fc.weight", "input_proj.weight"),
    "norm": ("shared_head.norm.weight", "norm.weight", "final_layernorm.weight"),
}
PART_OF = {name: part for part, names in PARTS.items() for name in names}
OF_QUANTIZED = re.compile(r"\.(?:qweight|qzeros|scales|g_idx|_?weight_\w+|input_scale)$")  # with or for ".weight"
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's


@dataclass
class LayerTensors:
    """The names of an MTP layer's tensors in the checkpoint. parts: by the keys of `PARTS`.

    block: those of its decoder layer, by their names in that layer. copies: of the target's, which are not needed.
    """

    parts: dict[str, str] = field(default_factory=dict)
    block: dict[str, str] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)  # codes, scales and zero points of its matrices

    @property
    def names(self) -> list[str]:
        return [*self.parts.values(), *self.block.values(), *self.copies, *self.quantized]


def mtp_layers(names: Iterable[str], num_layers: int) -> list[LayerTensors]:
    """The MTP layers among a checkpoint's tensors, in order. num_layers: the target's own."""
    layers, of_all, quantized_of_all = dict[int, LayerTensors](), dict[str, str](), list[str]()
    for name in names:
        weight = OF_QUANTIZED.sub(".weight", name)
        if match := IN_LAYERS.fullmatch(weight):
            number = int(match[1])
        elif match := AFTER_LAYERS.fullmatch(weight):
            number = int(match[1]) - num_layers
        elif (match := OF_ALL.fullmatch(weight)) and match[1] in PART_OF:
            of_all[PART_OF[match[1]]] = name
            quantized_of_all += [name] if name != weight else []
            continue
        else:
            continue
        if number < 0:
            continue
        layer = layers.setdefault(number, LayerTensors())
        if name != weight:
            layer.quantized.append(name)
        if match[2] in PART_OF:
            layer.parts[PART_OF[match[2]]] = name
        elif match[2] in SHARED:
            layer.copies.append(name)
        elif name == weight:
            layer.block[match[2]] = name
    in_order = [layers[number] for number in sorted(layers)]
    for layer in in_order:
        layer.parts = of_all | layer.parts
        layer.quantized += quantized_of_all
    return [layer for layer in in_order if layer.parts.keys() == PARTS.keys()]


def of_another_form(names: Iterable[str], num_layers: int) -> str | None:
    """A tensor of MTP layers that `mtp_layers` does not recognize; None if there is none."""
    matches = ((name, AFTER_LAYERS.fullmatch(name)) for name in names)
    is_mtp = (name for name, match in matches if "mtp" in name.split(".") or (match and int(match[1]) >= num_layers))
    return min(is_mtp, default=None)
