"""Reads draft heads from the files that their trainers write, and those of the EAGLE-3 type as networks.

Three layouts of EAGLE-3: `speculators` (vLLM's), the official one of SafeAILab/EAGLE, which SpecForge and ModelOpt
share, and DeepSpec's. They name all tensors alike except the layer's (`layers.0`, `midlayer`), and number the
target's layers differently.
Nothing in the files is trusted: flags of other networks are refused, and every tensor has the size that the
configuration says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
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
from slipstream.models.cpu.packed_linear import compressed_or_packed
from slipstream.models.cpu.quantised_linear import SMALLEST, quantised
from slipstream.models.heads.head_backend import HeadBackend
from slipstream.models.heads.network import FurtherLayer, HeadConfig, HeadNetwork, HeadWeights, Linear
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.weights.model_files import is_gguf
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import file_of

FEATURES = "fc.weight"  # a tensor that every head has, and no model
EMBEDDING = "embed_tokens.weight"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ASSISTANT, DFLASH, DFLASH2, DSPARK = "assistant", "dflash", "dflash2", "dspark"
EAGLE1, EAGLE3 = "eagle1", "eagle3"
PEAGLE = "peagle"
PARD = "pard"  # an ordinary model that drafts with mask tokens
KINDS = {  # the kind of head by the architecture that config.json names
    **dict.fromkeys(("Eagle3Speculator", "Eagle3DraftModel"), EAGLE3),
    **dict.fromkeys(("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3Deprecated", "Qwen3Eagle3Model"), EAGLE3),
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH2,
    "Qwen3DSparkModel": DSPARK,
    # known, so that the refusal names them, but not read
    **{f"Gemma4{name}Model": f"{name} of Gemma 4" for name in ("DSpark", "Eagle3")},
    "MedusaModel": "medusa",
    "MLPSpeculatorPreTrainedModel": "mlp_speculator",
    **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), ASSISTANT),
}
# the kind of head by a setting, where config.json names no architecture
UNNAMED = {"medusa_num_heads": "medusa", "hydra_num_heads": "hydra"}
EMBEDDED_NAME = "smollm2_head"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
NESTED_FLAGS = ("eagle_config", "dflash_config")
NESTED = ("transformer_layer_config", *NESTED_FLAGS, "speculators_config")
MASK_FEATURE = "mask_hidden"
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # settings that may name the mask token
SCALE = "_scale"  # after a tensor's name, as compressed-tensors names the scales of 8-bit weights
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

    model: an assistant that is loaded already; it has no folder.
    """

    source: str
    folder: str
    settings: Mapping[str, Any]
    kind: str = EAGLE3
    model: Any = None

    @property
    def layer(self) -> Mapping[str, Any]:
        """The settings of the decoder layer, which `speculators` nests."""
        nested: Mapping[str, Any] = self.settings.get("transformer_layer_config", self.settings)
        return nested

    @property
    def flags(self) -> Mapping[str, Any]:
        """The settings of the head; ModelOpt and DFlash's authors nest them."""
        nested = [self.settings.get(name, {}) for name in NESTED_FLAGS]
        return {**self.settings, **nested[0], **nested[1]}

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
    if KINDS.get(type(source).__name__) == ASSISTANT:
        named = source.config.name_or_path or type(source).__name__
        return HeadFiles(named, "", source.config.to_dict(), ASSISTANT, source)
    files = _config_files(source, options)
    if files is None:
        return None
    kind = _kind(files.settings, files.folder, options)
    shown = EMBEDDED_NAME if Path(files.folder) == embedded_head() else files.source
    return None if kind is None else replace(files, source=shown, kind=kind)


def trained_kind(draft: str) -> str | None:
    """How a draft model was trained to draft: the kind of a head, `PARD`, or None for an ordinary model."""
    options = LoadOptions()
    files = _config_files(draft, options)
    if files is None:
        return None
    return _kind(files.settings, files.folder, options) or (PARD if "pard_token" in files.settings else None)


def _config_files(source: Any, options: LoadOptions) -> HeadFiles | None:
    """The folder and config.json of whatever the user named, not only of heads; None if there is no config.json."""
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        return None
    name = str(source)
    folder = name if isdir(name) else str(embedded_head()) if name == EMBEDDED_NAME else None
    if folder is None:
        if not HUB_ID.fullmatch(name) or is_gguf(name):  # the path of a file may look like a hub id
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
    if wrong := next((key for key in NESTED if not isinstance(settings.get(key, {}), dict)), None):
        raise UsageError(f"draft head {name!r}: config.json has {wrong}={settings[wrong]!r}; allowed: an object")
    return HeadFiles(name, folder, settings)


def _kind(settings: Mapping[str, Any], folder: str, options: LoadOptions) -> str | None:
    """The kind of a head; None for a model. A head of EAGLE-1 declares itself a Llama of one layer."""
    if "speculators_model_type" in settings:
        return str(settings["speculators_model_type"])
    architectures = settings.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    named = next((KINDS[name] for name in names if isinstance(name, str) and name in KINDS), None)
    named = named or next((kind for key, kind in UNNAMED.items() if key in settings), None)
    if named == EAGLE3 and any(name in settings for name in MASKS) and MASK_FEATURE in _tensor_names(folder, options):
        return PEAGLE
    if named is None and settings.get("num_hidden_layers") == 1 and FEATURES in _tensor_names(folder, options):
        return EAGLE1
    return named


def _tensor_names(folder: str, options: LoadOptions) -> Collection[str]:
    """The names of the tensors in a folder."""
    from safetensors import safe_open

    path = _weights_file(folder, options)
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
    read = TensorReader(files.source, tensors, target.backend.device)
    embed = own_embedding(read, config) or model.get_input_embeddings()
    return HeadNetwork(config, _weights(files, read, config), embed)


def read_peagle(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> HeadBackend:
    """A head of P-EAGLE: one of EAGLE-3, with a mask token and a mask feature for the tokens to come."""
    network = read_eagle3(files, tensors, target)
    name = next((name for name in MASKS if files.settings.get(name) is not None), MASKS[0])
    token = files.settings.get(name)
    if not is_whole(token, 0, target.backend.vocab_size - 1):
        raise UsageError(
            f"draft head {files.source!r} has {name}={token!r}; allowed: 0 to {target.backend.vocab_size - 1}"
        )
    size = len(network.config.layers) * network.config.target_hidden_size
    stored = {key: tensor.reshape(1, -1) for key, tensor in tensors.items() if key == MASK_FEATURE}
    feature = TensorReader(files.source, stored, target.backend.device)(MASK_FEATURE, 1, size)
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
    layers = _layers(files, count)
    if max(layers) >= count or min(layers) < 0:
        raise UsageError(
            f"draft head {source!r} reads layers {list(layers)} of its target; {target.name!r} has {count}, "
            f"allowed: 0 to {count - 1}"
        )
    if "speculators_model_type" not in files.settings and not flags.get("norm_output", True):
        raise UsageError(f"draft head {source!r} has norm_output=False; allowed: True")
    if layer["hidden_size"] != sizes["hidden_size"] and EMBEDDING not in tensors:
        raise UsageError(
            f"draft head {source!r} has hidden_size={layer['hidden_size']} and no embedding of its own; allowed: "
            f"{sizes['hidden_size']}, that of {target.name!r}, whose embedding it uses"
        )
    return HeadConfig(
        layers=layers,
        target_hidden_size=target_size,
        token_ids=token_ids_of(files, tensors, target.backend.vocab_size),
        norm_before_residual=bool(flags.get("norm_before_residual", False)),
        norm_output=bool(flags.get("norm_output", False)) and "speculators_model_type" in files.settings,
        windows=tuple(windows_of(files)),
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
    is_read_twice = "norm_output" in files.flags and "speculators_model_type" not in files.settings
    return ("layers", *open_flags, *(("norm_output",) if is_read_twice else ()))


def _layers(files: HeadFiles, count: int) -> tuple[int, ...]:
    """The layers whose entering hidden states a head reads; without any named, those of the official code."""
    named = files.flags.get("eagle_aux_hidden_state_layer_ids", files.flags.get("target_layer_ids"))
    if named is None:
        return 2, count // 2, count - 3
    if not isinstance(named, list) or not named or not all(is_whole(i, -inf) for i in named):
        raise UsageError(f"draft head {files.source!r} reads layers {named!r}; allowed: a list of layer numbers")
    # `speculators` numbers what enters layers, the others what leaves them
    return tuple(i if "speculators_model_type" in files.settings else i + 1 for i in named)


def token_ids_of(files: HeadFiles, tensors: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """The target's id of each draft token, from their offsets `d2t`."""
    offsets = tensors.get("d2t")
    if offsets is None:
        return None
    if offsets.dim() != 1 or not len(offsets):
        raise SlipstreamError(f"draft head {files.source!r}: d2t is {list(offsets.shape)}; allowed: [draft tokens]")
    if offsets.dtype not in (torch.int32, torch.int64):
        type_name = _type_name(offsets.dtype)
        raise SlipstreamError(f"draft head {files.source!r}: d2t is of type {type_name}; allowed: int32, int64")
    ids = offsets.long() + torch.arange(len(offsets))
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise SlipstreamError(
            f"draft head {files.source!r}: d2t names tokens {int(ids.min())} to {int(ids.max())}, not in rising order; "
            f"allowed: rising ids from 0 to {vocab_size - 1}"
        )
    return ids


def read_tensors(files: HeadFiles, options: LoadOptions) -> dict[str, Tensor]:
    """A head's tensors, named as in `speculators`; floating point ones are converted to the type of `fc`."""
    from safetensors.torch import load_file

    path = _weights_file(files.folder, options)
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
    named = {key.removeprefix("model.").replace("midlayer.", "layers.0."): part for key, part in loaded.items()}
    tensors = {key: _unrounded(named, key) for key in named if not key.endswith(SCALE)}
    dtype = torch.bfloat16
    if FEATURES in tensors:
        check_type(files.source, FEATURES, tensors[FEATURES])
        dtype = tensors[FEATURES].dtype
    return {key: part.to(dtype) if part.is_floating_point() else part for key, part in tensors.items()}


def _unrounded(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor, or what its 8-bit integers [outputs, inputs] and their scales [outputs, 1] stand for, in bfloat16."""
    scale = tensors.get(name + SCALE)
    return tensors[name] if scale is None else (tensors[name].float() * scale.float()).to(torch.bfloat16)


def _weights(files: HeadFiles, read: TensorReader, config: HeadConfig) -> HeadWeights:
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
        lm_head=read.product({"lm_head.weight": config.draft_vocab_size}, size),
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

    source: str
    tensors: Mapping[str, Tensor]
    device: torch.device
    names: set[str] = field(default_factory=set)

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name. Raises `SlipstreamError` if it is missing or of another shape."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            problem = "is missing" if tensor is None else f"is {list(tensor.shape)}"
            raise SlipstreamError(f"draft head {self.source!r}: tensor {name!r} {problem}; allowed: {list(shape)}")
        check_type(self.source, name, tensor)
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
        return converter(sum(tensor.numel() for tensor in self.tensors.values()), weight.dtype)(linear)

    def check_all_read(self) -> None:
        """Raise `SlipstreamError` if a tensor was not read: the head would compute something with it."""
        unread = sorted(name for name in self.tensors if name not in self.names and not UNREAD.fullmatch(name))
        if unread:
            raise SlipstreamError(
                f"draft head {self.source!r}: its config.json does not account for tensor {unread[0]!r}; allowed: the "
                f"tensors of its kind, such as {min(self.names)!r}"
            )


def check_type(source: str, name: str, tensor: Tensor) -> None:
    """Raise `SlipstreamError` for a tensor of another type than weights have."""
    if tensor.dtype not in TYPES:
        type_name, allowed = _type_name(tensor.dtype), ", ".join(map(_type_name, TYPES))
        raise SlipstreamError(f"draft head {source!r}: tensor {name!r} is of type {type_name}; allowed: {allowed}")


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def converter(num_weights: int, dtype: torch.dtype) -> Callable[[nn.Linear], nn.Module]:
    """What converts a head's linear layers to their fastest form on a CPU: to 4 bits in a large head, else packed.

    Between two drafts the target's weights displace a head's from the caches, so a draft costs reading all its bytes.
    """
    is_faster = dtype == torch.bfloat16 and num_weights >= SMALLEST
    return partial(quantised, bits="int4", memory=HugePages()) if is_faster else compressed_or_packed


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
    parameters["rope_type"] = kind = rope.get("rope_type", rope.get("type", "default"))
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
