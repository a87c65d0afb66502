"""A parent request and its split into children: the one place where choice indices and sample numbers are made.

Called by the router once per request, after tokenising. Knows nothing of HTTP or of groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.outputs import ChildSpec, FamilyRequest
from workers.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How a child's tokens become text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bare_logprobs: bool = False
    """Of log-probabilities, where they are asked for, those of the drawn tokens alone, as numbers without texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRequest:
    """What a client asked for: prompts as token ids, the sample numbers of each, and how to sample and write them.

    `parent_id` is internal and unique, whatever public id the client chose. Choice index = prompt number x number of
    samples + position of the sample number in `samples`.
    """

    parent_id: str
    prompts: tuple[tuple[int, ...], ...]
    samples: tuple[int, ...]
    params: SamplingParams
    text: TextOptions = TextOptions()

    @property
    def num_children(self) -> int:
        return len(self.prompts) * len(self.samples)

    def prompt_number(self, index: int) -> int:
        return index // len(self.samples)

    def sample_number(self, index: int) -> int:
        return self.samples[index % len(self.samples)]

    def children(self, prompt_number: int) -> tuple[ChildSpec, ...]:
        base = prompt_number * len(self.samples)
        return tuple(ChildSpec(base + k, sample) for k, sample in enumerate(self.samples))

    def family(self, prompt_number: int, children: Sequence[ChildSpec], sink: str, *, stream: bool) -> FamilyRequest:
        """The message that places `children` of one prompt on a group, reporting to the aggregator named `sink`.

        Stop strings are found where the text is, so with them tokens are wanted even without `stream`.
        """
        return FamilyRequest(
            parent_id=self.parent_id,
            prompt_number=prompt_number,
            prompt_token_ids=self.prompts[prompt_number],
            children=tuple(children),
            params=self.params,
            sink=sink,
            stream=stream or bool(self.text.stop),
        )
