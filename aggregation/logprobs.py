"""Log-probabilities of token ids as log-probabilities of texts with their exact bytes.

Called once per generated token by `child` when the client asked for log-probabilities. Knows nothing of
sampling.
"""

from aggregation.results import PositionLogprobs, TextLogprob
from aggregation.vocabulary import Vocabulary
from workers.outputs import TokenLogprobs

FLOOR = -9999.0


def floored(logprob: float) -> float:
    """Minus infinity becomes the floor, so that the value can be written as JSON."""
    return logprob if logprob > FLOOR else FLOOR


def text_logprob(vocabulary: Vocabulary, token_id: int, logprob: float) -> TextLogprob:
    """One token."""
    shown = vocabulary.shown(token_id)
    return TextLogprob(shown.text, token_id, floored(logprob), shown.bytes)


def position_logprobs(vocabulary: Vocabulary, entry: TokenLogprobs) -> PositionLogprobs:
    """One output position; the drawn token is appended to the most probable ones if it is not among them."""
    drawn = text_logprob(vocabulary, entry.token_id, entry.logprob)
    top = [
        text_logprob(vocabulary, token_id, logprob)
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    ]
    if entry.token_id not in entry.top_ids:
        top.append(drawn)
    return PositionLogprobs(drawn, tuple(top))
