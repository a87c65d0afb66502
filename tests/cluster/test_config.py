"""One tree of options: unknown keys refused, command line over file, the engine's part derived."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.config import ClusterConfig
from workers.config import EngineConfig


def test_overrides_win_over_the_file(tmp_path: Path):
    file = tmp_path / "choral.yaml"
    file.write_text("groups: 2\ntp: 3\n")
    config = ClusterConfig.load(file, {"tp": 1})
    assert (config.groups, config.tp) == (2, 1)


@pytest.mark.parametrize("text", ["grops: 2", "- 1", "port: 70000", "groups: 0", "max_n: 9999"])
def test_a_wrong_file_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "choral.yaml"
    file.write_text(text)
    with pytest.raises((ValueError, ValidationError)):
        ClusterConfig.load(file, {})


def test_an_empty_file_is_all_defaults(tmp_path: Path):
    file = tmp_path / "choral.yaml"
    file.write_text("")
    assert ClusterConfig.load(file, {}) == ClusterConfig()


def test_defaults_of_cluster_and_engine_agree():
    assert ClusterConfig().engine("folder") == EngineConfig(model_folder="folder")


@pytest.mark.parametrize("field", ["tp", "max_running", "max_step_tokens"])
def test_engine_options_out_of_range_are_named(field: str):
    with pytest.raises(ValueError, match=field):
        EngineConfig(model_folder="folder", **{field: 0})
