"""How the children of one parent are sampled: the values, their ranges, and what makes a child's noise its own.

Plain frozen data without tensors or text, so that every layer above may share it. The router checks ranges with the
same table of limits before anything is spent; the engine only ever sees valid values.
"""

from dataclasses import dataclass

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling values shared by all children of a parent.

    A child draws its token at output position t from noise keyed by (seed, prompt number, sample number, t), so equal
    values here and an equal sample number give equal tokens, whatever runs beside it.

    Raises ValueError naming the field when a value is out of range.
    """

    max_tokens: int
    """Most tokens one child generates, >= 1."""
    seed: int
    """Signed 64-bit integer, drawn by the server when the client sent none."""
    temperature: float = 1.0
    """0..2; 0 is greedy."""
    top_k: int = 0
    """Keep the k largest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable one, 0..1."""
    repetition_penalty: float = 1.0
    """> 0; divides positive logits and multiplies negative ones of tokens seen in the prompt or the output."""
    presence_penalty: float = 0.0
    """-2..2; subtracted from the logit of every token seen in the output."""
    frequency_penalty: float = 0.0
    """-2..2; subtracted once per occurrence in the output."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are banned until this many tokens were generated."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value in -100..100) pairs added to the raw logits."""
    allowed_token_ids: tuple[int, ...] | None = None
    """When given, no other token may be drawn."""
    logprobs: int | None = None
    """How many of the most probable tokens to report per position (0..20) besides the drawn one; None: none at all."""

    def __post_init__(self) -> None:
        for name, ok in (
            ("max_tokens", self.max_tokens >= 1),
            ("seed", -(2**63) <= self.seed < 2**63),
            ("temperature", 0.0 <= self.temperature <= 2.0),
            ("top_k", self.top_k >= 0),
            ("top_p", 0.0 < self.top_p <= 1.0),
            ("min_p", 0.0 <= self.min_p <= 1.0),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf")),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens),
            ("logit_bias", all(-100.0 <= value <= 100.0 for _, value in self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS),
        ):
            if not ok:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
