"""At most one push in flight, and nothing lost or reordered by folding."""

from concurrent.futures import Future

from cluster.outbox import Outbox
from workers.outputs import ChildDelta, ChildRef, ParentDelta, StepOutput


class SlowSink:
    """Answers a push only when told to."""

    def __init__(self) -> None:
        self.pushed: list[StepOutput] = []
        self.futures: list[Future[list[ChildRef]]] = []

    def push(self, output: StepOutput) -> Future[list[ChildRef]]:
        self.pushed.append(output)
        self.futures.append(Future())
        return self.futures[-1]


def delta(parent: str, index: int, *tokens: int) -> ParentDelta:
    return ParentDelta(parent, {index: ChildDelta(index, list(tokens))})


def outbox(sink: SlowSink) -> tuple[Outbox, list[list[ChildRef]], list[BaseException]]:
    stops: list[list[ChildRef]] = []
    lost: list[BaseException] = []
    return Outbox("g", sink, stops.append, lost.append), stops, lost


def test_what_happens_during_a_push_is_folded_into_the_next():
    sink = SlowSink()
    box, _, _ = outbox(sink)
    box.add([delta("p", 0, 1)])
    for token in (2, 3):
        box.add([delta("p", 0, token), delta("q", 1, token)])
    assert len(sink.pushed) == 1
    sink.futures[0].set_result([])
    assert len(sink.pushed) == 2
    assert sink.pushed[1].parents["p"].children[0].token_ids == [2, 3]
    assert sink.pushed[1].parents["q"].children[1].token_ids == [2, 3]
    sink.futures[1].set_result([])
    assert box.empty and len(sink.pushed) == 2


def test_the_answer_of_a_push_names_children_to_stop():
    sink = SlowSink()
    box, stops, _ = outbox(sink)
    box.add([delta("p", 0, 1)])
    sink.futures[0].set_result([ChildRef("p", 0)])
    assert stops == [[ChildRef("p", 0)]]


def test_a_lost_sink_is_reported_once_and_never_pushed_to_again():
    sink = SlowSink()
    box, _, lost = outbox(sink)
    box.add([delta("p", 0, 1)])
    sink.futures[0].set_exception(ConnectionError("gone"))
    box.add([delta("p", 0, 2)])
    assert len(lost) == 1 and len(sink.pushed) == 1
