"""The papers behind the arms of a report, as BibTeX entries and as lines of text."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.bench.arms import ASSISTED, HF, LLAMA, LLAMA_LOOKUP, LOOKUP, TUNED, Arm, parse_arm, uses_draft_model
from slipstream.bench.report.report_data import Records
from slipstream.version import __version__


@dataclass(frozen=True)
class Reference:
    """A work to cite."""

    key: str
    kind: str  # of the BibTeX entry
    authors: tuple[str, ...]  # "Family, Given"; a group in braces; "others" if there are more
    title: str
    year: int
    where: str = ""  # conference or journal; empty for software
    number: str = ""  # on arXiv
    url: str = ""

    def bibtex(self) -> str:
        """The entry of a .bib file."""
        venue = {"inproceedings": "booktitle", "article": "journal"}.get(self.kind, "version")
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            "year": str(self.year),
            venue: self.where,
            "eprint": self.number,
            "archiveprefix": "arXiv" if self.number else "",
            "url": self.url,
        }
        lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items() if value)
        return f"@{self.kind}{{{self.key},\n{lines}}}\n"

    def __str__(self) -> str:
        names = [author.partition(",")[0].strip("{}") for author in self.authors]
        who = names[0] if len(names) == 1 else f"{names[0]} and {names[1]}" if len(names) == 2 else f"{names[0]} et al."
        places = (self.where, self.number and f"arXiv {self.number}", self.url)
        return f"{who} ({self.year}): {self.title}. {', '.join(filter(None, places))}".rstrip(". ")


ICML, ICLR = "International Conference on Machine Learning", "International Conference on Learning Representations"
ARXIV = "arXiv preprint"
SLIPSTREAM = Reference("slipstream", "software", ("{The Slipstream authors}",), "Slipstream", 2026, __version__)
LEVIATHAN = Reference(
    "leviathan2023fast",
    "inproceedings",
    ("Leviathan, Yaniv", "Kalman, Matan", "Matias, Yossi"),
    "Fast Inference from Transformers via Speculative Decoding",
    2023,
    ICML,
    "2211.17192",
)
CHEN = Reference(
    "chen2023accelerating",
    "article",
    (
        "Chen, Charlie",
        "Borgeaud, Sebastian",
        "Irving, Geoffrey",
        "Lespiau, Jean-Baptiste",
        "Sifre, Laurent",
        "Jumper, John",
    ),
    "Accelerating Large Language Model Decoding with Speculative Sampling",
    2023,
    ARXIV,
    "2302.01318",
)
BLOCK = Reference(
    "sun2025block",
    "inproceedings",
    ("Sun, Ziteng", "Mendlovic, Uri", "Leviathan, Yaniv", "others"),
    "Block Verification Accelerates Speculative Decoding",
    2025,
    ICLR,
    "2403.10444",
)
MEDUSA = Reference(
    "cai2024medusa",
    "inproceedings",
    ("Cai, Tianle", "Li, Yuhong", "Geng, Zhengyang", "others"),
    "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    2024,
    ICML,
    "2401.10774",
)
PROMPT_LOOKUP = Reference(
    "saxena2023prompt",
    "misc",
    ("Saxena, Apoorv",),
    "Prompt Lookup Decoding",
    2023,
    url="https://github.com/apoorvumang/prompt-lookup-decoding",
)
SUFFIX = Reference(
    "oliaro2025suffixdecoding",
    "inproceedings",
    ("Oliaro, Gabriele", "Jia, Zhihao", "Campos, Daniel", "Qiao, Aurick"),
    "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
    2025,
    "Advances in Neural Information Processing Systems",
    "2411.04975",
)
RECYCLING = Reference(
    "luo2025turning",
    "inproceedings",
    ("Luo, Xianzhen", "Wang, Yixuan", "Zhu, Qingfu", "others"),
    "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
    2025,
    "Annual Meeting of the Association for Computational Linguistics",
    "2408.08696",
)
DRAFT_AND_VERIFY = Reference(
    "zhang2024draft",
    "inproceedings",
    ("Zhang, Jun", "Wang, Jue", "Li, Huan", "others"),
    "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
    2024,
    "Annual Meeting of the Association for Computational Linguistics",
    "2309.08168",
)
LAYER_SKIP = Reference(
    "elhoushi2024layerskip",
    "inproceedings",
    ("Elhoushi, Mostafa", "Shrivastava, Akshat", "Liskovich, Diana", "others"),
    "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding",
    2024,
    "Annual Meeting of the Association for Computational Linguistics",
    "2404.16710",
)
HETEROGENEOUS = Reference(
    "timor2025accelerating",
    "inproceedings",
    ("Timor, Nadav", "Mamou, Jonathan", "Korat, Daniel", "others"),
    "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
    2025,
    ICML,
    "2502.05202",
)
TRANSFORMERS = Reference(
    "wolf2020transformers",
    "inproceedings",
    ("Wolf, Thomas", "Debut, Lysandre", "Sanh, Victor", "others"),
    "Transformers: State-of-the-Art Natural Language Processing",
    2020,
    "Conference on Empirical Methods in Natural Language Processing: System Demonstrations",
    "1910.03771",
)
LLAMA_CPP = Reference(
    "llamacpp",
    "misc",
    ("Gerganov, Georgi", "others"),
    "llama.cpp",
    2023,
    url="https://github.com/ggml-org/llama.cpp",
)
OF_DRAFTERS: dict[str, tuple[Reference, ...]] = {
    "ngram": (PROMPT_LOOKUP,),
    "suffix": (SUFFIX,),
    "hybrid": (SUFFIX,),
    "token_recycling": (RECYCLING,),
    "layer_skip": (DRAFT_AND_VERIFY, LAYER_SKIP),
    "cross_vocabulary": (HETEROGENEOUS,),
}
OF_RULES: dict[str, tuple[Reference, ...]] = {"block": (BLOCK,), "typical": (MEDUSA,)}
OF_BASELINES: dict[str, tuple[Reference, ...]] = {
    HF: (TRANSFORMERS,),
    ASSISTED: (TRANSFORMERS,),
    TUNED: (TRANSFORMERS,),
    LOOKUP: (TRANSFORMERS, PROMPT_LOOKUP),
    LLAMA: (LLAMA_CPP,),
    LLAMA_LOOKUP: (LLAMA_CPP, PROMPT_LOOKUP),
}


def citations(data: Records) -> list[Reference]:
    """Slipstream, speculative decoding itself, and the methods of the arms; a draft head's paper is not known."""
    run_rule = str(data.header.settings.get("config", {}).get("acceptance", ""))
    works = [SLIPSTREAM, LEVIATHAN, CHEN]
    for arm in map(parse_arm, data.references):
        works += OF_BASELINES.get(arm.baseline or "", ())
        if arm.baseline is None:
            works += (*OF_DRAFTERS.get(_drafter(arm, data), ()), *OF_RULES.get(arm.acceptance or run_rule, ()))
    return list(dict.fromkeys(works))


def _drafter(arm: Arm, data: Records) -> str:
    name = (arm.drafter or "auto").partition(":")[0]
    if name != "auto":
        return name
    return "hybrid" if data.header.settings.get("draft") and uses_draft_model(arm) else "suffix"


def bibtex(data: Records) -> str:
    """The entries of `citations`."""
    return "\n".join(reference.bibtex() for reference in citations(data))
