"""Documents that were found, put into another order by how likely the model finds the query behind
each passage.

    mean over the query's tokens of log p(token | passage, tokens before)

Query likelihood is of Ponte and Croft 1998; by a language model, of arXiv 2204.07496. Shapes: B
passages, S positions, D size of a state, Q tokens of the query.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from farspan.corpus.tokenizer import Tokenizer
from farspan.retrieval.pooling import bf16_is_fast
from farspan.runtime.model.decoder import Decoder

#: Tokens of a query that are read at most: passages are cut where both would be more than the
#: model's context.
_QUERY_TOKENS = 64
#: What stands between a passage and the query.
_BETWEEN = "\n\n"
#: Passages a batch.
_ROWS = 32


@torch.inference_mode()
def log_likelihoods(
    model: Decoder, tokenizer: Tokenizer, query: str, passages: Sequence[str]
) -> npt.NDArray[np.float32]:
    """Mean log-probability (N), in nats, of a token of the query behind each passage; 0 for a query
    without tokens."""
    asked = tokenizer.encode_batch([query])[0][: min(_QUERY_TOKENS, model.spec.context // 2)]
    room = model.spec.context - len(asked) - 1
    read = [
        text[:room]
        for text in tokenizer.encode_batch([f"{passage}{_BETWEEN}" for passage in passages])
    ]
    found_N = np.zeros(len(passages), np.float32)
    # Shortest first, so that rows of a batch are of nearly one length.
    order = sorted(range(len(read)), key=lambda row: len(read[row])) if asked else []
    for start in range(0, len(order), _ROWS):
        rows = order[start : start + _ROWS]
        batch = [torch.tensor([tokenizer.end_of_text, *read[row], *asked]) for row in rows]
        found_N[rows] = (
            _means(model, batch, torch.tensor(asked), tokenizer.end_of_text).cpu().numpy()
        )
    return found_N


def _means(model: Decoder, batch: Sequence[Tensor], asked_Q: Tensor, end: int) -> Tensor:
    device, count = model.tok.weight.device, len(asked_Q)
    # Padding lies behind the query, where causal attention cannot see.
    tokens_BS = pad_sequence(list(batch), batch_first=True, padding_value=end).to(device)
    first_B1 = torch.tensor([len(text) - count - 1 for text in batch], device=device)[:, None]
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16_is_fast(device)):
        states_BSD = model.hidden(tokens_BS)
    places_BQ1 = (first_B1 + torch.arange(count, device=device))[:, :, None]
    states_BQD = torch.gather(states_BSD.float(), 1, places_BQ1.expand(-1, -1, states_BSD.shape[2]))
    logits_NV = F.linear(states_BQD, model.head_VD.float()).flatten(0, 1)
    targets_N = asked_Q.to(device).repeat(len(batch))
    return -F.cross_entropy(logits_NV, targets_N, reduction="none").view(len(batch), count).mean(1)
