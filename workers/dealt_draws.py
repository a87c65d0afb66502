"""The draws of a step over the ranks of a group: every rank draws its share, from whole rows of logits.

Each rank has computed its columns of all rows. They are exchanged so that a rank gets the rows of its own draws alone,
whole: a row's draw is the same code on the same bits as in a group of one. Every rank makes the same calls.
"""

from torch import Tensor

from kernels import ops
from workers.tensor_parallel import Communicator, Split


def draw(logits: Tensor, batch: ops.SampleBatch, comm: Communicator, vocab: Split) -> ops.SampleResult:
    """One token per draw from this rank's columns of the logits, [M, its part of `vocab`]; the same on every rank.

    `batch` names rows in ascending order.
    """
    if comm.size == 1:
        return ops.sample(logits, batch)
    shares = Split.even(len(batch.rows), comm.size)
    spans = [_rows(batch, shares.of(rank)) for rank in range(comm.size)]
    whole = comm.exchange_rows(logits, spans, vocab.sizes)
    mine = shares.of(comm.rank)
    result = ops.sample(whole, batch.part(mine.start, mine.stop, spans[comm.rank].start))
    width = max(int(batch.num_logprobs.max()), 0)
    packed = result.pack(width)
    words = packed.shape[1]
    joined = comm.all_gather_columns(packed.view(1, -1), [share * words for share in shares.sizes])
    return ops.SampleResult.unpack(joined.view(-1, words))


def _rows(batch: ops.SampleBatch, draws: slice) -> slice:
    """The rows of logits that some draws read."""
    if draws.start == draws.stop:
        return slice(0, 0)
    return slice(int(batch.rows[draws.start]), int(batch.rows[draws.stop - 1]) + 1)
