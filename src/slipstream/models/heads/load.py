"""Turns a draft head's folder into a draft model for a target, by the kind of head."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from torch import Tensor

from slipstream.core.interfaces import Backend
from slipstream.errors import UsageError
from slipstream.models.heads.assistant import load_assistant
from slipstream.models.heads.dflash_files import read_dflash
from slipstream.models.heads.eagle1 import read_eagle1
from slipstream.models.heads.eagle3 import read_eagle3, read_peagle
from slipstream.models.heads.features import model_for
from slipstream.models.heads.head_backend import HeadBackend
from slipstream.models.heads.head_files import HeadFiles
from slipstream.models.heads.head_kinds import ASSISTANT, DFLASH, DFLASH2, DSPARK, EAGLE1, EAGLE3, PEAGLE
from slipstream.models.heads.head_tensors import read_tensors, refuse_draft_dtype
from slipstream.models.heads.mtp import load_mtp
from slipstream.models.loaded import MTP, Loaded, LoadOptions

READERS: dict[str, Callable[[HeadFiles, Mapping[str, Tensor], Loaded], Backend]] = {
    DFLASH: read_dflash,
    DFLASH2: read_dflash,
    DSPARK: read_dflash,
    EAGLE1: lambda *files: HeadBackend(read_eagle1(*files)),
    EAGLE3: lambda *files: HeadBackend(read_eagle3(*files)),
    PEAGLE: read_peagle,
}


def load_head(files: HeadFiles, target: Loaded, options: LoadOptions) -> Loaded:
    """A head as a draft model for this target."""
    model_for(f"draft head {files.source!r}", target)  # refuses targets without hidden states
    if files.kind == MTP:
        return load_mtp(target, options, files)
    if files.kind not in (ASSISTANT, *READERS):
        allowed = ", ".join(map(repr, sorted((ASSISTANT, MTP, *READERS))))
        raise UsageError(f"draft head {files.source!r} is of type {files.kind!r}; allowed: {allowed}")
    refuse_draft_dtype(files.source, options, target.backend.device)
    backend: Backend
    tensors: Mapping[str, Tensor]
    if files.kind == ASSISTANT:
        backend = assistant = load_assistant(files, target, options)
        tensors = assistant.model.state_dict()
    else:
        tensors = read_tensors(files)
        backend = READERS[files.kind](files, tensors, target)
    return Loaded(
        backend,
        files.source,
        target.end_ids,
        target.tokenizer,
        fingerprint=f"{files.kind} {_digest(files, tensors)} {options.precision}",
        source=files.folder,
    )


def _digest(files: HeadFiles, tensors: Mapping[str, Tensor]) -> str:
    """A digest that identifies a head, from its settings and its one-dimensional tensors."""
    digest = hashlib.blake2b(repr(files.settings).encode(), digest_size=10)
    for _, tensor in sorted(tensors.items()):
        if tensor.dim() == 1:
            digest.update((tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy().tobytes())
    return digest.hexdigest()
