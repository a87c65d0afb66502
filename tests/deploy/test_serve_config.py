"""What `choral config` prints is what Serve takes: known keys only, and arguments that give the same options back."""

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.config import ClusterConfig
from deploy import application
from deploy.cli import main
from deploy.serve_config import BUILDER, HTTP_FIELDS, RAY_FIELDS, refuse_starter_fields, serve_config
from tests.deploy.schemas import unknown_keys

OPTIONS = ["--groups", "2", "--tp", "3", "--placement", "STRICT_SPREAD", "--kv-memory-gib", "0.5", "--no-prefix-cache"]


def printed(capsys, *options: str):
    assert main(["config", *options]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_serve_takes_the_file_and_knows_every_key(capsys):
    document = printed(capsys, *OPTIONS, "--host", "0.0.0.0", "--port", "9000")
    parsed = ServeDeploySchema.model_validate(document)
    assert unknown_keys(ServeDeploySchema, document) == []
    assert (parsed.http_options.host, parsed.http_options.port) == ("0.0.0.0", 9000)
    (app,) = parsed.applications
    module, _, name = app.import_path.partition(":")
    assert (app.import_path, module) == (BUILDER, application.__name__)
    assert getattr(application, name) is application.build


def test_the_arguments_are_the_options(capsys):
    (app,) = printed(capsys, *OPTIONS)["applications"]
    expected = ClusterConfig(groups=2, tp=3, placement="STRICT_SPREAD", kv_memory_gib=0.5, prefix_cache=False)
    assert ClusterConfig.model_validate(app["args"]) == expected
    assert app["args"].keys() == {"groups", "tp", "placement", "kv_memory_gib", "prefix_cache"}


def test_a_configuration_file_gives_arguments_too_and_folders_their_whole_path(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "choral.yaml").write_text("model: weights\nfiles_dir: files\nmax_n: 9\n")
    (app,) = printed(capsys, "--config", "choral.yaml")["applications"]
    folders = {"model": str(tmp_path / "weights"), "files_dir": str(tmp_path / "files")}
    assert app["args"] == {"groups": 1, "tp": 1, "max_n": 9, **folders}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--address", "auto"], "address"),
        (["--no-dashboard"], "dashboard"),
        (["--start-timeout-s", "3"], "start_timeout_s"),
        (["--port", "0"], "port"),
    ],
)
def test_what_has_no_place_in_the_file_is_refused_by_name(capsys, options, named):
    assert main(["config", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and named in captured.err


def test_no_option_is_lost():
    values = ClusterConfig().model_dump()
    arguments = serve_config(ClusterConfig(**values))["applications"][0]["args"]
    assert arguments.keys() | HTTP_FIELDS | RAY_FIELDS == values.keys()


@pytest.mark.parametrize("field", sorted(HTTP_FIELDS | RAY_FIELDS))
def test_the_application_refuses_arguments_without_effect(field):
    with pytest.raises(ValueError, match=field):
        refuse_starter_fields(ClusterConfig(**{field: ClusterConfig().model_dump()[field]}))
