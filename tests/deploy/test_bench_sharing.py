import pytest

from deploy.bench_charts import draw_sharing
from deploy.bench_floor import FloorError
from deploy.bench_sharing import POINTS, PROMPTS_SIZE, SIZES_PROMPT, SharingPoint, measure_sharing, sharing_points
from kernels import ops


def test_every_point_is_measured_both_ways(tiny_checkpoint):
    points = sharing_points(tiny_checkpoint("llama"), [(20, 1), (40, 3)], steps=3)
    assert [(point.prompt_len, point.n) for point in points] == [(20, 1), (40, 3)]
    assert all(min(point.shared_s, point.apart_s) > 0 for point in points)


def test_a_difference_in_bits_is_an_error(tiny_checkpoint, monkeypatch):
    build = ops.AttentionBatch.build

    def crooked(*args, share_prefix):
        args[3].add_(int(share_prefix))
        return build(*args, share_prefix=share_prefix)

    monkeypatch.setattr(ops.AttentionBatch, "build", crooked)
    with pytest.raises(FloorError, match="changed the logits"):
        sharing_points(tiny_checkpoint("llama"), [(20, 3)], steps=3)


def test_what_goes_wrong_in_its_process_is_told(tmp_path):
    with pytest.raises(FloorError, match=r"config\.json"):
        measure_sharing(tmp_path)


def test_two_charts_are_drawn(tmp_path):
    points = [SharingPoint(length, n, 0.01, 0.01 + n * length / 1e6) for length, n in POINTS]
    assert {(SIZES_PROMPT, 128), (8000, PROMPTS_SIZE)} <= set(POINTS)
    written = draw_sharing(points, tmp_path / "new")
    assert [path.name for path in written] == ["step-by-n.png", "step-by-prompt.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
