"""At most one push in flight, and nothing lost or reordered by folding."""

from concurrent.futures import Future

from cluster.outbox import PATIENCE_S, Outbox, pace
from workers.outputs import ChildDelta, ChildRef, Haste, ParentDelta, StepOutput


class SlowSink:
    """Answers a push only when told to."""

    def __init__(self) -> None:
        self.pushed: list[StepOutput] = []
        self.futures: list[Future[list[ChildRef]]] = []

    def push(self, output: StepOutput) -> Future[list[ChildRef]]:
        self.pushed.append(output)
        self.futures.append(Future())
        return self.futures[-1]


def delta(parent: str, index: int, *tokens: int, haste: Haste = Haste.SOON) -> ParentDelta:
    return ParentDelta(parent, {index: ChildDelta(index, list(tokens))}, haste=haste)


def outbox(sink: SlowSink) -> tuple[Outbox, list[list[ChildRef]]]:
    stops: list[list[ChildRef]] = []
    return Outbox("g", sink, stops.append, interval_s=0), stops


def test_what_happens_during_a_push_is_folded_into_the_next():
    sink = SlowSink()
    box, _ = outbox(sink)
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
    box, stops = outbox(sink)
    box.add([delta("p", 0, 1)])
    sink.futures[0].set_result([ChildRef("p", 0)])
    assert stops == [[ChildRef("p", 0)]]


def test_a_lost_sink_is_never_pushed_to_again():
    sink = SlowSink()
    box, _ = outbox(sink)
    box.add([delta("p", 0, 1)])
    sink.futures[0].set_exception(ConnectionError("gone"))
    box.add([delta("p", 0, 2)])
    assert len(sink.pushed) == 1


def test_tokens_share_a_push_but_first_and_last_ones_do_not_wait():
    now = 0.0
    sink = SlowSink()
    box = Outbox("g", sink, lambda refs: None, interval_s=1.0, clock=lambda: now)

    def add(part: ParentDelta) -> int:
        box.add([part])
        for future in sink.futures:
            if not future.done():
                future.set_result([])
        return len(sink.pushed)

    assert add(delta("p", 0, 1)) == 1
    assert [add(delta("p", 0, token)) for token in (2, 3)] == [1, 1]
    assert not box.empty
    now = 1.0
    assert add(delta("p", 0, 4)) == 2
    assert sink.pushed[1].parents["p"].children[0].token_ids == [2, 3, 4]
    assert add(delta("q", 0, 5, haste=Haste.NOW)) == 3
    assert add(delta("p", 0, 6)) == 3
    assert add(delta("p", 0, 7, haste=Haste.NOW)) == 4
    assert sink.pushed[3].parents["p"].children[0].token_ids == [6, 7]
    assert box.empty


def test_tokens_nobody_reads_yet_go_with_others_or_at_the_end_or_after_a_while():
    now = 0.0
    sink = SlowSink()
    box = Outbox("g", sink, lambda refs: None, interval_s=1.0, clock=lambda: now)
    box.add([delta("p", 0, 1, haste=Haste.NONE)])
    now = PATIENCE_S / 2
    box.add([delta("p", 0, 2, haste=Haste.NONE)])
    assert not sink.pushed
    box.add([delta("q", 0, 1)])
    assert [sorted(output.parents) for output in sink.pushed] == [["p", "q"]]
    sink.futures[0].set_result([])
    box.add([delta("p", 0, 3, haste=Haste.NONE)])
    assert len(sink.pushed) == 1 and not box.empty
    box.flush()
    assert sink.pushed[1].parents["p"].children[0].token_ids == [3]
    sink.futures[1].set_result([])
    now = 4.0
    box.add([delta("p", 0, 4, haste=Haste.NONE)])
    assert len(sink.pushed) == 3


def test_what_must_not_wait_follows_a_push_that_was_in_flight():
    sink = SlowSink()
    box = Outbox("g", sink, lambda refs: None, interval_s=1.0, clock=lambda: 0.0)
    box.add([delta("p", 0, 1)])
    box.add([delta("p", 0, 2, haste=Haste.NOW)])
    sink.futures[0].set_result([])
    assert len(sink.pushed) == 2


def test_pushes_that_carry_much_are_rarer_up_to_a_bound():
    assert [pace(parents, parents) for parents in (1, 33, 1000)] == [1.0, 6.0, 6.0]
    assert [pace(1, children) for children in (1, 17, 1000)] == [1.0, 2.0, 6.0]
