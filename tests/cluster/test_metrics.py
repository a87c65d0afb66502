"""The metrics page is what Prometheus reads, with sums over all parts."""

from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import add_up, render


def test_numbers_of_a_name_are_summed_and_the_rest_left_out():
    parts = [{"children_running": 2, "exact": True, "group": "a"}, {"children_running": 3}]
    assert add_up(parts) == {"children_running": 5}


def test_the_page_parses_and_types_are_right():
    page = render({"children_running": 2, "preemptions_total": 4, "kv_blocks_total": 9})
    families = {f.name: f for f in text_string_to_metric_families(page)}
    assert families["choral_children_running"].type == "gauge"
    assert families["choral_preemptions"].type == "counter"
    assert families["choral_kv_blocks_total"].type == "gauge"
    assert families["choral_kv_blocks_total"].samples[0].value == 9
    assert all(f.documentation for f in families.values())
