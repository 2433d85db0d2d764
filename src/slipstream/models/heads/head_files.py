"""Reads draft heads from the files that their trainers write, and those of the EAGLE-3 type as networks.

Writers name all tensors of a kind alike, up to prefixes (`own_name`), and number the target's layers differently.
Nothing in the files is trusted: flags of other networks are refused, and every tensor has the size that the
configuration says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from math import inf
from os.path import isdir
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checks import UNREADABLE, is_number, is_whole
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.cpu.packed_linear import compressed_or_packed
from slipstream.models.cpu.quantised_linear import BITS, SMALLEST, quantised
from slipstream.models.heads.head_backend import HeadBackend
from slipstream.models.heads.head_kinds import (
    ASSISTANT,
    EAGLE3,
    FEATURES,
    MASK_FEATURE,
    PARD,
    kind_of,
    label_of,
    labelled,
    own_name,
)
from slipstream.models.heads.network import FurtherLayer, HeadConfig, HeadNetwork, HeadWeights, Linear
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import file_of

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# settings of heads: for a file on the hub with none of them, more than one layer and no known architecture, the weights
# are not fetched to see what it is
HINTS = ("draft_vocab_size", "eagle_config", "dflash_config", "block_size")
MIDDLE = "midlayer.self_attn."  # in the names of the only layer of the authors' EAGLE-3 heads
EMBEDDED_NAME = "smollm2_head"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
NESTED_FLAGS = ("eagle_config", "dflash_config")
NESTED = ("transformer_layer_config", *NESTED_FLAGS, "speculators_config")
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # settings that may name the mask token
# ends of names: of the scales of weights in 8 bits, and of those of activations, which are not rounded here
SCALES = ("weight_scale", "input_scale")
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
SIZES = (*NEEDED, "num_key_value_heads", "head_dim")
LARGEST, MOST_LAYERS = 1 << 40, 1000
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights, as they are read
# settings that choose between networks, and the values of the network that is computed here; null stands for the
# default. The last two lines are ModelOpt's
COMPUTED: dict[str, tuple[Any, ...]] = {
    **{"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu",), "hidden_activation": ("silu",)},
    **{"attention_mode": ("gqa", "mha"), "partial_rotary_factor": (1,)},
    **{"use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,)},
    **{"use_mtp_layernorm": (False,), "eh_proj_before_attn": (False,), "parallel_draft_step": (0, 1)},
}
# flags of EAGLE-3, refused in heads of other kinds unless they are off
NOT_EAGLE3 = dict.fromkeys(("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"), (False,))
# an unknown setting with one of these words in its name may change what a head computes, and is refused
SWITCH = re.compile(
    r"(?:^|_)(?:(?:layer)?norm|residual|multiplier|scal(?:e|ing|ar)|(?:soft)?cap(?:ping)?|clip|rotary|rope|window|causal"
    r"|interleaved?|act(?:ivation)?|attn|attention)(?:_|$)"
)
# unless it is a trainer's or a library's, or a size, which the tensors' shapes show
NO_SWITCH = re.compile(r"dropout|loss|grad|train|init|eps|implementation|backend|kernel|_(?:heads?|dim)$")
# or one that is read elsewhere, has no effect on a head, or only through tensors that are checked
KNOWN_SWITCHES = frozenset(
    {
        *NOT_EAGLE3,
        *("causal", "is_causal"),
        *("sliding_window", "use_sliding_window", "sliding_window_non_causal", "max_window_layers", "rope_theta"),
        *("norm_topk_prob", "qk_norm", "use_qk_norm", "attn_output_gate", "full_attention_interval"),
        *("routed_scaling_factor", "next_layer_regular"),
    }
)
WINDOWED = "sliding_attention"
ROPE_KINDS = ("default", "linear", "llama3", "yarn")  # of rotary positions; others depend on the length of a text
MROPE = "mrope"  # of texts and images; the positions of a text alone are rotated as by default
ROPE_SETTINGS = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta")
# tensors that need not be read: copies of the target's, those that follow from others, DSpark's estimates of acceptance
# where they are switched off, and P-EAGLE's mask feature, which is read elsewhere
UNREAD = re.compile(
    r"(embed_tokens|lm_head|verifier_\w+)\.weight|[dt]2[dt]|confidence_head\..+|.+\.inv_freq|" + MASK_FEATURE
)


def embedded_head() -> Path:
    """The folder of the head that comes with the package, trained for the embedded model."""
    return Path(str(resources.files("slipstream").joinpath("data/smollm2_head")))


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder. source: as the user named it; settings: config.json's; kind: of head, perhaps an unknown one.

    model: an assistant that is loaded already; it has no folder. options: how the head is loaded.
    """

    source: str
    folder: str
    settings: Mapping[str, Any]
    kind: str = EAGLE3
    model: Any = None
    options: LoadOptions = field(default_factory=LoadOptions)

    @property
    def layer(self) -> Mapping[str, Any]:
        """The settings of the decoder layer, which `speculators` nests."""
        nested: Mapping[str, Any] = self.settings.get("transformer_layer_config", self.settings)
        return nested

    @property
    def flags(self) -> Mapping[str, Any]:
        """The settings of the head; ModelOpt and DFlash's authors nest them."""
        nested = [part for name in NESTED_FLAGS for part in self.settings.get(name, {}).items()]
        return {**self.settings, **{name: value for name, value in nested if value is not None}}

    @property
    def is_of_speculators(self) -> bool:
        """Whether `speculators` wrote the files, which numbers the target's layers by what enters them."""
        return "speculators_model_type" in self.settings

    def trained_for(self, target: str) -> str | None:
        """The hub id of the model that the head was trained for, if `target` is the hub id of another model.

        If one name begins with the other, both are of the same model: one may be quantised, for example.
        """
        verifier = self.settings.get("speculators_config", {}).get("verifier")
        named = str(verifier.get("name_or_path")) if isinstance(verifier, dict) else ""
        if not all(HUB_ID.fullmatch(name) and not Path(name).exists() for name in (named, target)):
            return None
        model, target_model = (name.partition("/")[2].lower() for name in (named, target))
        return None if model.startswith(target_model) or target_model.startswith(model) else named


def head_files(source: Any, options: LoadOptions) -> HeadFiles | None:
    """The files of a head that the user has named, or an assistant; None if this is something else."""
    if labelled(type(source).__name__) == ASSISTANT:
        named = source.config.name_or_path or type(source).__name__
        return HeadFiles(named, "", source.config.to_dict(), ASSISTANT, source, options)
    files = _config_files(source, options)
    if files is None:
        return None
    stored = _tensor_names(files, options)
    names = {own_name(name) for name in stored}
    kind = kind_of(files.settings, names)
    if kind is None:
        return None
    settings = dict(files.settings)
    if any(MIDDLE in name for name in stored) and not any(name.startswith("layers.1.") for name in names):
        settings["num_hidden_layers"] = 1  # the authors' reader knows no other layer, whatever config.json says
    shown = EMBEDDED_NAME if Path(files.folder) == embedded_head() else files.source
    return HeadFiles(shown, files.folder, settings, kind, options=options)


def trained_kind(draft: str) -> str | None:
    """How a draft model was trained to draft: the kind of a head, `PARD`, or None for an ordinary model."""
    files = _config_files(draft, LoadOptions())
    head = head_files(draft, LoadOptions())
    return head.kind if head is not None else PARD if files is not None and "pard_token" in files.settings else None


def _config_files(source: Any, options: LoadOptions) -> HeadFiles | None:
    """The folder and config.json of whatever the user named, not only of heads; None if there is no config.json."""
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        return None
    name = str(source)
    folder = name if isdir(name) else str(embedded_head()) if name == EMBEDDED_NAME else None
    if folder is None:
        if not HUB_ID.fullmatch(name):
            return None
        folder = resolve(name, options.files)
    file = file_of(folder, "config.json", options.files)
    if file is None:
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except UNREADABLE:
        return None  # the reader of models reports what is wrong
    if not isinstance(settings, dict):
        return None
    settings = {key: value for key, value in settings.items() if key not in NESTED or value is not None}
    if wrong := next((key for key in NESTED if not isinstance(settings.get(key, {}), dict)), None):
        raise UsageError(f"draft head {name!r}: config.json has {wrong}={settings[wrong]!r}; allowed: an object")
    return HeadFiles(name, folder, settings)


def _tensor_names(files: HeadFiles, options: LoadOptions) -> Collection[str]:
    """The names of the tensors in a folder, as they are stored."""
    from safetensors import safe_open

    settings = files.settings
    is_hinted = label_of(settings) or settings.get("num_hidden_layers") == 1 or any(hint in settings for hint in HINTS)
    path = _weights_file(files.folder, options) if is_hinted or isdir(files.folder) else None
    if path is None:
        return ()
    try:
        if path.suffix != ".safetensors":
            names: Mapping[str, Tensor] = torch.load(path, map_location="meta", weights_only=True)
            return names.keys()
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except Exception:  # of many kinds; the reader of models reports what is wrong
        return ()


def _weights_file(folder: str, options: LoadOptions) -> Path | None:
    return next((path for name in WEIGHTS if (path := file_of(folder, name, options.files)) is not None), None)


def read_eagle3(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> HeadNetwork:
    """The network of a head of the EAGLE-3 type."""
    model = target.backend.model  # type: ignore[attr-defined]
    check_settings(files, COMPUTED)
    config = _config(files, tensors, model.config.get_text_config(), target)
    read = TensorReader(files, tensors, target.backend.device)
    embed = own_embedding(read, config) or model.get_input_embeddings()
    return HeadNetwork(config, _weights(files, read, config, target), embed)


def read_peagle(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> HeadBackend:
    """A head of P-EAGLE: one of EAGLE-3, with a mask token and a mask feature for the tokens to come."""
    network = read_eagle3(files, tensors, target)
    name = next((name for name in MASKS if files.flags.get(name) is not None), " or ".join(MASKS))
    token = files.flags.get(name)
    if not is_whole(token, 0, target.backend.vocab_size - 1):
        raise UsageError(
            f"draft head {files.source!r} has {name}={token!r}; allowed: 0 to {target.backend.vocab_size - 1}"
        )
    size = len(network.config.layers) * network.config.target_hidden_size
    stored = {key: tensor.reshape(1, -1) for key, tensor in tensors.items() if key == MASK_FEATURE}
    feature = TensorReader(files, stored, target.backend.device)(MASK_FEATURE, 1, size)
    return HeadBackend(network, token, feature)


def check_settings(files: HeadFiles, computed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `UsageError` for impossible sizes, and for settings of a network other than the one computed here.

    computed: as `COMPUTED`, for this kind of head.
    """
    layer, source = files.layer, files.source
    for name in SIZES:
        size = layer.get(name)
        if size is None and name in NEEDED:
            raise UsageError(f"draft head {source!r}: config.json has no {name}; allowed: a whole number")
        largest = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
        if size is not None and not is_whole(size, 1, largest):
            raise UsageError(f"draft head {source!r} has {name}={size!r}; allowed: a whole number from 1 to {largest}")
    eps = layer.get("rms_norm_eps", 1e-6)
    if not is_number(eps) or eps <= 0:
        raise UsageError(f"draft head {source!r} has rms_norm_eps={eps!r}; allowed: a number above 0")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(layer.get(name) or {}, dict):
            raise UsageError(f"draft head {source!r} has {name}={layer[name]!r}; allowed: an object")
    theta = rope_theta(layer)
    if not is_number(theta, 1, LARGEST):
        raise UsageError(f"draft head {source!r} has rope_theta={theta!r}; allowed: a number from 1 to {LARGEST}")
    nested = [part for name in NESTED_FLAGS for part in files.settings.get(name, {}).items()]
    for name, value in [*rope_settings(layer).items(), *files.settings.items(), *layer.items(), *nested]:
        if name in computed and value is not None and value not in computed[name]:
            allowed = ", ".join(map(repr, computed[name]))
            raise UsageError(f"draft head {source!r} has {name}={value!r}; allowed: {allowed}")
    for name, value in [*files.settings.items(), *layer.items(), *nested]:
        if name not in computed and _is_unknown_switch(name, value):
            raise UsageError(
                f"draft head {source!r} has {name}={value!r}, which is not known here and may change what it "
                "computes; allowed: heads without it"
            )


def _is_unknown_switch(name: str, value: Any) -> bool:
    """Whether a setting may change what a head computes. False, 0, a factor of 1, lists and objects do not."""
    if name in KNOWN_SWITCHES or not SWITCH.search(name) or NO_SWITCH.search(name):
        return False
    return value is True or isinstance(value, str) or (is_number(value) and value not in (0, 1))


def windows_of(files: HeadFiles) -> list[int | None]:
    """How many positions each layer's attention sees; None for all.

    Raises `UsageError` where that is not clear: some readers apply a window that `layer_types` does not mention, others
    do not.
    """
    layer, source, count = files.layer, files.source, files.layer["num_hidden_layers"]
    window, kinds = layer.get("sliding_window"), layer.get("layer_types")
    if kinds is None:
        if window is not None and layer.get("use_sliding_window", True):
            raise UsageError(f"draft head {source!r} has sliding_window={window!r} without layer_types; allowed: both")
        return [None] * count
    allowed = (WINDOWED, "full_attention")
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in allowed for kind in kinds):
        raise UsageError(
            f"draft head {source!r} has layer_types={kinds!r}; allowed: {WINDOWED!r} or 'full_attention' for each of "
            f"its {count} layers"
        )
    if WINDOWED in kinds and (not isinstance(window, int) or window < 1):
        raise UsageError(f"draft head {source!r} has sliding_window={window!r}; allowed: 1 or more")
    return [window if kind == WINDOWED else None for kind in kinds]


def check_size(files: HeadFiles, target: Loaded, name: str, size: int, expected: int) -> None:
    """Raise `UsageError` unless a head has the size of its target."""
    if size != expected:
        raise UsageError(
            f"draft head {files.source!r} is another target's: its {name} is {size}, that of {target.name!r} {expected}"
        )


def _config(files: HeadFiles, tensors: Mapping[str, Tensor], target_config: Any, target: Loaded) -> HeadConfig:
    layer, flags, source = files.layer, files.flags, files.source
    sizes = {"hidden_size": target_config.hidden_size, "vocab_size": target.backend.vocab_size}
    target_size = flags.get("target_hidden_size") or layer["hidden_size"]
    check_size(files, target, "target_hidden_size", target_size, sizes["hidden_size"])
    check_size(files, target, "vocab_size", layer["vocab_size"], sizes["vocab_size"])
    count = target_config.num_hidden_layers
    listed = _layers(files, count)
    # servers, with whose states heads are trained, pass on the states of layers in the order of the forward
    layers = tuple(sorted(listed)) if len(set(listed)) == len(listed) else listed
    if max(layers) >= count or min(layers) < 0:
        raise UsageError(
            f"draft head {source!r} reads layers {list(layers)} of its target; {target.name!r} has {count}, "
            f"allowed: 0 to {count - 1}"
        )
    if not files.is_of_speculators and not flags.get("norm_output", True):
        raise UsageError(f"draft head {source!r} has norm_output=False; allowed: True")
    for name in (EMBEDDING, OUTPUT):
        if layer["hidden_size"] != sizes["hidden_size"] and name not in tensors:
            raise UsageError(
                f"draft head {source!r} has hidden_size={layer['hidden_size']} and no tensor {name!r}; allowed: "
                f"{sizes['hidden_size']}, that of {target.name!r}, whose tensor it then uses"
            )
    return HeadConfig(
        layers=layers,
        target_hidden_size=target_size,
        token_ids=token_ids_of(files, tensors, target.backend.vocab_size),
        norm_before_residual=bool(flags.get("norm_before_residual", False)),
        norm_output=bool(flags.get("norm_output", False)) and files.is_of_speculators,
        windows=tuple(windows_of(files)),
        listed_layers=listed,
        unclear=_unclear(files),
        **layer_settings(files, target),
    )


def layer_settings(files: HeadFiles, target: Loaded) -> dict[str, Any]:
    """The fields of a `HeadConfig` that are read alike for all kinds of head."""
    layer, heads = files.layer, files.layer["num_attention_heads"]
    inverse_frequencies, rotation_scale = scaled_frequencies(files.source, layer)
    return {
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_heads": heads,
        "num_key_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or layer["hidden_size"] // heads,
        "vocab_size": target.backend.vocab_size,
        "eps": layer.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(layer),
        "max_length": target.backend.max_length,
        "inverse_frequencies": inverse_frequencies,
        "rotation_scale": rotation_scale,
    }


def _unclear(files: HeadFiles) -> tuple[str, ...]:
    """The settings of which `head_check` tries other values, too: layers, flags that are not set, and `norm_output`.

    `norm_output` is unclear because for `speculators` it norms what is fed back, for others what is scored.
    """
    open_flags = tuple(name for name in ("norm_before_residual", "norm_output") if name not in files.flags)
    is_read_twice = "norm_output" in files.flags and not files.is_of_speculators
    return ("layers", *open_flags, *(("norm_output",) if is_read_twice else ()))


def _layers(files: HeadFiles, count: int) -> tuple[int, ...]:
    """The layers whose entering hidden states a head reads; without any named, those of the official code."""
    named = files.flags.get("eagle_aux_hidden_state_layer_ids", files.flags.get("target_layer_ids"))
    if named is None or named == []:
        return 2, count // 2, count - 3
    if not isinstance(named, list) or not all(is_whole(i, -inf) for i in named):
        raise UsageError(f"draft head {files.source!r} reads layers {named!r}; allowed: a list of layer numbers")
    return tuple(i if files.is_of_speculators else i + 1 for i in named)  # the others number what leaves layers


def token_ids_of(files: HeadFiles, tensors: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """The target's id of each draft token, from their offsets `d2t`, in whatever order the trainer ranked them."""
    offsets, output, source = tensors.get("d2t"), tensors.get(OUTPUT), files.source
    if offsets is None:
        count = files.flags.get("draft_vocab_size") if output is None else len(output)
        if is_whole(count, 1, vocab_size - 1):
            raise SlipstreamError(
                f"draft head {source!r} scores {count} of {vocab_size} tokens, and has no tensor 'd2t', which says "
                "which they are; allowed: heads with 'd2t'"
            )
        return None
    if offsets.dim() != 1 or not len(offsets):
        raise SlipstreamError(f"draft head {source!r}: d2t is {list(offsets.shape)}; allowed: [draft tokens]")
    if offsets.dtype not in (torch.int32, torch.int64):
        type_name = _type_name(offsets.dtype)
        raise SlipstreamError(f"draft head {source!r}: d2t is of type {type_name}; allowed: int32, int64")
    ids = offsets.long() + torch.arange(len(offsets))
    if len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise SlipstreamError(
            f"draft head {source!r}: d2t names {len(ids.unique())} tokens for {len(ids)} scores, from {int(ids.min())} "
            f"to {int(ids.max())}; allowed: a token for each, from 0 to {vocab_size - 1}"
        )
    is_drafted = tensors.get("t2d")
    if is_drafted is not None and int(is_drafted.count_nonzero()) == len(ids) and not bool(is_drafted[ids].all()):
        raise SlipstreamError(f"draft head {source!r}: d2t names other tokens than t2d; allowed: the same")
    return ids


def read_tensors(files: HeadFiles) -> dict[str, Tensor]:
    """A head's tensors by `own_name`; those in floating point get the type that the user names, or that of `fc`."""
    from safetensors.torch import load_file

    path, options = _weights_file(files.folder, files.options), files.options
    if path is None:
        raise SlipstreamError(f"draft head {files.source!r} has no weights; allowed: {' or '.join(WEIGHTS)}")
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            is_named = isinstance(loaded, dict) and all(isinstance(name, str) for name in loaded)
            if not is_named or not all(isinstance(part, Tensor) for part in loaded.values()):
                raise ValueError("it holds something other than tensors by name")
    except Exception as error:  # of many kinds, depending on what the file asks to load
        raise SlipstreamError(
            f"draft head {files.source!r}: {path.name} could not be read: {one_line(error)}"
        ) from error
    named = {own_name(key): part for key, part in loaded.items()}
    for key in [key for key in named if re.match(r"layers\.[1-9]\d*\.hidden_norm\.", key)]:  # of ModelOpt
        named.setdefault(key.replace("hidden_norm", "input_layernorm"), named[key])
        named.pop(key)
    tensors = {key: _unrounded(files.source, named, key) for key in named if not key.endswith(SCALES)}
    dtype = torch.bfloat16
    if FEATURES in tensors:
        check_type(files.source, FEATURES, tensors[FEATURES])
        dtype = tensors[FEATURES].dtype
    if options.draft_type is not None:
        dtype = getattr(torch, options.draft_type)
    return {key: part.to(dtype) if part.is_floating_point() else part for key, part in tensors.items()}


def _unrounded(source: str, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor, or in bfloat16 what the numbers of 8 bits [outputs, inputs] in its place stand for.

    Their scales are one number for the tensor or for each output.
    """
    scale, tensor = tensors.get(name + "_scale"), tensors[name]
    if scale is None:
        return tensor
    if scale.numel() not in (1, len(tensor)) or tensor.dtype.itemsize != 1 or not scale.is_floating_point():
        raise SlipstreamError(
            f"draft head {source!r}: tensor {name!r} of {_type_name(tensor.dtype)} {list(tensor.shape)} has scales of "
            f"{_type_name(scale.dtype)} {list(scale.shape)}; allowed: 8-bit weights with one scale, or one per output"
        )
    return (tensor.float() * scale.float().reshape(-1, 1)).to(torch.bfloat16)


def _weights(files: HeadFiles, read: TensorReader, config: HeadConfig, target: Loaded) -> HeadWeights:
    size = config.hidden_size

    def layer(number: int, inputs: int) -> dict[str, Any]:
        name = f"layers.{number}."
        return {
            "qkv": read.product(projections(config, name, "qkv"), inputs),
            "head_norms": _head_norms(read, config, name),
            **after_attention(read, config, name),
        }

    weights = HeadWeights(
        **layer(0, 2 * size),
        fc=read.product({FEATURES: size}, len(config.layers) * config.target_hidden_size),
        lm_head=output_layer(read, config, target),
        token_norm=read("layers.0.input_layernorm.weight", size),
        hidden_norm=read("layers.0.hidden_norm.weight", size),
        final_norm=read("norm.weight", size),
        feature_norms=_feature_norms(files, read, config),
        further=[
            FurtherLayer(**layer(i, size), first_norm=read(f"layers.{i}.input_layernorm.weight", size))
            for i in range(1, len(config.windows))
        ],
    )
    read.check_all_read()
    return weights


def output_layer(read: TensorReader, config: HeadConfig, target: Loaded) -> Linear:
    """What makes scores of a head's outputs: the head's own layer if it brings one, else the target's."""
    if OUTPUT in read.tensors:
        return read.product({OUTPUT: config.draft_vocab_size}, config.hidden_size)
    model = target.backend.model  # type: ignore[attr-defined]
    output, dtype = model.get_output_embeddings(), model.dtype
    token_ids = None if config.token_ids is None else config.token_ids.to(read.device)

    def scores(outputs: Tensor) -> Tensor:
        every: Tensor = output(outputs.to(dtype))
        return every if token_ids is None else every[..., token_ids]

    return scores


def _head_norms(read: TensorReader, config: HeadConfig, name: str) -> Tensor | None:
    heads = {"q": config.num_heads, "k": config.num_key_heads}
    norms = {f"{name}self_attn.{part}_norm.weight": count for part, count in heads.items()}
    if not norms.keys() & read.tensors.keys():
        return None
    return torch.cat([read(norm, config.head_dim).expand(count, 1, -1) for norm, count in norms.items()])


def projections(config: HeadConfig, name: str, parts: str) -> dict[str, int]:
    """The outputs of some of a layer's projections of queries, keys and values, by name. parts: such as "qkv"."""
    heads = {"q": config.num_heads, "k": config.num_key_heads, "v": config.num_key_heads}
    return {f"{name}self_attn.{part}_proj.weight": heads[part] * config.head_dim for part in parts}


def after_attention(read: TensorReader, config: HeadConfig, name: str) -> dict[str, Any]:
    """The products and norm after a layer's attention, by the fields of `LayerWeights`. name: "layers.N."."""
    size, middle = config.hidden_size, config.intermediate_size
    return {
        "out": read.product({f"{name}self_attn.o_proj.weight": size}, config.num_heads * config.head_dim),
        "gate_up": read.product({f"{name}mlp.{part}_proj.weight": middle for part in ("gate", "up")}, size),
        "down": read.product({f"{name}mlp.down_proj.weight": size}, middle),
        "middle_norm": read(f"{name}post_attention_layernorm.weight", size),
    }


def _feature_norms(files: HeadFiles, read: TensorReader, config: HeadConfig) -> Tensor | None:
    count, size = len(config.layers), config.target_hidden_size
    if files.flags.get("fc_norm"):
        return torch.stack([read(f"fc_norm.{i}.weight", size) for i in range(count)])
    return read("input_norm.weight", count * size)[None] if files.flags.get("norm_before_fc") else None


@dataclass(frozen=True)
class TensorReader:
    """Reads a head's tensors. names: those that have been read."""

    files: HeadFiles
    tensors: Mapping[str, Tensor]
    device: torch.device
    names: set[str] = field(default_factory=set)

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name. Raises `SlipstreamError` if it is missing or of another shape."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            problem = "is missing" if tensor is None else f"is {list(tensor.shape)}"
            raise SlipstreamError(
                f"draft head {self.files.source!r}: tensor {name!r} {problem}; allowed: {list(shape)}"
            )
        check_type(self.files.source, name, tensor)
        self.names.add(name)
        return tensor.to(self.device)

    def product(self, parts: Mapping[str, int], inputs: int) -> Linear:
        """The joint product with the weights of these names, [outputs, inputs] each. parts: outputs by name."""
        weights = [self(name, outputs, inputs) for name, outputs in parts.items()]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        linear = nn.Linear(inputs, len(weight), bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            return linear
        num_weights = sum(tensor.numel() for tensor in self.tensors.values())
        return converter(num_weights, weight.dtype, self.files.options)(linear)

    def check_all_read(self) -> None:
        """Raise `SlipstreamError` if a tensor was not read: the head would compute something with it."""
        unread = sorted(name for name in self.tensors if name not in self.names and not UNREAD.fullmatch(name))
        if unread:
            raise SlipstreamError(
                f"draft head {self.files.source!r}: its config.json does not account for tensor {unread[0]!r}; "
                f"allowed: the tensors of its kind, such as {min(self.names)!r}"
            )


def check_type(source: str, name: str, tensor: Tensor) -> None:
    """Raise `SlipstreamError` for a tensor of another type than weights have."""
    if tensor.dtype not in TYPES:
        type_name, allowed = _type_name(tensor.dtype), ", ".join(map(_type_name, TYPES))
        raise SlipstreamError(f"draft head {source!r}: tensor {name!r} is of type {type_name}; allowed: {allowed}")


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def converter(num_weights: int, dtype: torch.dtype, options: LoadOptions) -> Callable[[nn.Linear], nn.Module]:
    """What converts a head's linear layers on a CPU: to the bits that the user names, else to the fastest form.

    That is 4 bits in a large head, else packed: between two drafts the target's weights displace a head's from the
    caches, so a draft costs reading all its bytes.
    """
    is_faster = dtype == torch.bfloat16 and num_weights >= SMALLEST
    if options.quantise not in BITS and (options.draft_type or options.fast is False or not is_faster):
        return compressed_or_packed
    return partial(quantised, bits=options.quantise if options.quantise in BITS else "int4", memory=HugePages())


def refuse_draft_dtype(
    source: str, options: LoadOptions, device: torch.device, dtype: torch.dtype | None = None, reason: str | None = None
) -> None:
    """Raise `UsageError` for a precision that a head cannot have.

    dtype: the target's, for heads that have no other. reason: why layers cannot be quantised, if that is known.
    """
    if options.quantise in BITS:
        reason = f"it is on {device}" if device.type != "cpu" else reason
        reason = "Slipstream's own kernels are not available" if reason is None and kernels() is None else reason
        if reason is not None:
            raise UsageError(
                f"draft_dtype={options.quantise!r}, but draft head {source!r} cannot be quantised: {reason}; allowed: "
                "'auto', or a type such as 'bfloat16'"
            )
    if dtype is not None and options.draft_type not in (None, _type_name(dtype)):
        raise UsageError(
            f"draft_dtype={options.draft_type!r}, but draft head {source!r} has its target's type; allowed: "
            f"{_type_name(dtype)!r}, 'auto', 'int4', 'int8'"
        )


def own_embedding(read: TensorReader, config: HeadConfig) -> nn.Module | None:
    """The head's own embedding, if it brings one."""
    if EMBEDDING not in read.tensors:
        return None
    return nn.Embedding.from_pretrained(read(EMBEDDING, config.vocab_size, config.hidden_size))


def rope_settings(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """A decoder layer's settings of rotary positions."""
    return layer.get("rope_parameters") or layer.get("rope_scaling") or {}


def rope_theta(layer: Mapping[str, Any]) -> float:
    """The base of the frequencies. layer: settings of a head's decoder layer."""
    theta: float = rope_settings(layer).get("rope_theta") or layer.get("rope_theta") or 10000.0
    return theta


def scaled_frequencies(source: str, layer: Mapping[str, Any]) -> tuple[Tensor | None, float]:
    """[D / 2] inverse frequencies, None without scaling, and the factor of cosines and sines.

    layer: settings of a head's decoder layer. Raises `UsageError` for kinds of scaling that are not computed, and for
    settings that are missing.
    """
    rope = rope_settings(layer)
    parameters = {name: value for name, value in rope.items() if name != "type"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    parameters["rope_type"] = kind = "default" if kind == MROPE else kind
    if kind not in ROPE_KINDS:
        allowed = ", ".join(map(repr, ROPE_KINDS))
        raise UsageError(f"draft head {source!r} has rope_type={kind!r}; allowed: {allowed}")
    if kind == "default":
        return None, 1.0
    from transformers import LlamaConfig  # takes seconds
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from slipstream.models.weights.transformers_reader import quietly

    parameters["rope_theta"] = rope_theta(layer)
    settings = {name: layer[name] for name in ROPE_SETTINGS if layer.get(name) is not None}
    try:
        with quietly():
            rotary = LlamaRotaryEmbedding(LlamaConfig(**settings, rope_parameters=parameters))
    except Exception as error:  # transformers' checks of settings raise errors of their own
        raise UsageError(
            f"draft head {source!r} has rope_type={kind!r} without what it needs: {one_line(error)}"
        ) from error
    return rotary.inv_freq, rotary.attention_scaling
