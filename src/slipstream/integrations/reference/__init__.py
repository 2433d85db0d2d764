"""Signatures of well-known teaching implementations over Slipstream's engine: change the import line, keep the code.

    from slipstream.integrations.reference import NucleusProcessor, speculative_generate

`generate_functions` and `logits_processor` offer the functions of romsto/Speculative-Decoding (and of its batched
relatives); `book_decoder` has the `SpeculativeDecoder` that book chapters build. Differences, where these are wrong:

- Greedy output is the target's own; sampled output follows the target's distribution. The one lossy option,
  skip_sample_adjustment=True, logs a warning.
- One and two tokens can be generated. Where nothing was drafted the acceptance rate is 0.0.
- Rows of a batch do not depend on each other, and each gets all the tokens it asked for.

Nothing is carried from one call to the next except the decoder itself, so times of calls can be compared.
"""

from slipstream.integrations.reference.book_decoder import SpeculativeDecoder
from slipstream.integrations.reference.generate_functions import (
    autoregressive_generate,
    speculative_generate,
    speculative_generate_batch,
)
from slipstream.integrations.reference.logits_processor import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)

__all__ = [
    "GreedyProcessor",
    "LogitsProcessor",
    "MultinomialProcessor",
    "NucleusProcessor",
    "SpeculativeDecoder",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "autoregressive_generate",
    "speculative_generate",
    "speculative_generate_batch",
]
