import argparse

import pytest

from cluster.config import ClusterConfig
from deploy.errors import OptionError
from deploy.options import add_cluster_options, cluster_config, given, option_name, own_server_config


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_cluster_options(parser)
    return parser


def test_the_options_are_the_fields_and_the_configuration_file(parser):
    options = {action.option_strings[0] for action in parser._actions}
    assert options == {"-h", "--config"} | {option_name(name) for name in ClusterConfig.model_fields}


def test_help_says_what_the_fields_say(parser):
    text = " ".join(parser.format_help().split())
    for name, field in ClusterConfig.model_fields.items():
        assert field.description in text, name
        if field.default is not None and "default:" not in field.description and not isinstance(field.default, bool):
            assert f"{field.description} (default: {field.default})" in text, name


def test_nothing_given_is_the_default_configuration(parser):
    args = parser.parse_args([])
    assert given(args) == {}
    assert cluster_config(args) == ClusterConfig()


def test_every_field_can_be_set_and_keeps_its_type(parser):
    words = {
        "model": "m", "served_name": "s", "groups": 2, "tp": 3, "placement": "SPREAD", "host": "0.0.0.0", "port": 0,
        "address": "auto", "dashboard": False, "device": "cpu", "dtype": "float32", "max_model_len": 64,
        "max_running": 5,
        "max_step_tokens": 7, "kv_memory_gib": 0.5, "kv_blocks": 9, "block_size": 64, "prefix_cache": False,
        "exact_tp": True, "push_interval_s": 0.5, "max_n": 6, "max_children": 8, "batch_children": 3, "files_dir": "f",
        "threads": 1, "start_timeout_s": 3.5, "drain_timeout_s": 4.5, "collective_timeout_s": 2.5,
    }  # fmt: skip
    assert words.keys() == ClusterConfig.model_fields.keys()
    line = []
    for name, value in words.items():
        if isinstance(value, bool):
            line.append(option_name(name if value else f"no_{name}"))
        else:
            line += [option_name(name), str(value)]
    config = cluster_config(parser.parse_args(line))
    assert config.model_dump() == words
    assert {name: type(value) for name, value in config.model_dump().items()} == {
        name: type(value) for name, value in words.items()
    }


def test_only_what_was_given_overrides_the_file_and_the_file_the_defaults(parser, tmp_path):
    file = tmp_path / "choral.yaml"
    file.write_text("tp: 3\ngroups: 2\nprefix_cache: false\nport: 9000\n")
    args = parser.parse_args(["--config", str(file), "--groups", "4"])
    config = cluster_config(args, port=0, max_n=5)
    assert (config.tp, config.groups, config.prefix_cache, config.port, config.max_n) == (3, 4, False, 9000, 5)


def test_a_server_of_a_command_has_a_free_port_and_no_dashboard_unless_told_otherwise(parser, tmp_path):
    file = tmp_path / "choral.yaml"
    file.write_text("dashboard: true\n")
    for line, expected in (([], (0, False)), (["--config", str(file), "--port", "9000"], (9000, True))):
        config = own_server_config(parser.parse_args(line))
        assert (config.port, config.dashboard) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("tensor_parallel: 2\n", "unknown option 'tensor_parallel'"),
        ("tp: 0\n", "tp: "),
        ("tp: two\n", "tp: "),
        ("block_size: 33\n", "block_size: "),
        ("max_n: 9\nmax_children: 8\n", "max_n (9) is larger than max_children (8)"),
        ("- tp\n", "is not a mapping"),
        ("tp: [1\n", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_naming_what_is_wrong(parser, tmp_path, content, said):
    file = tmp_path / "choral.yaml"
    file.write_text(content)
    with pytest.raises(OptionError, match=said.replace("(", r"\(").replace(")", r"\)")):
        cluster_config(parser.parse_args(["--config", str(file)]))


def test_a_missing_file_is_named(parser, tmp_path):
    with pytest.raises(OptionError, match=r"nowhere\.yaml: No such file"):
        cluster_config(parser.parse_args(["--config", str(tmp_path / "nowhere.yaml")]))


def test_an_empty_file_changes_nothing(parser, tmp_path):
    file = tmp_path / "choral.yaml"
    file.write_text("# all defaults\n")
    assert cluster_config(parser.parse_args(["--config", str(file)])) == ClusterConfig()


@pytest.mark.parametrize("line", [["--tp", "two"], ["--device", "tpu"], ["--block-size", "33"], ["--max", "3"]])
def test_a_bad_option_ends_with_usage(parser, line, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(line)
    assert stopped.value.code == 2
    assert line[0] in capsys.readouterr().err
