"""The manifests hold to KubeRay's definitions and Ray's schema, with no key that these do not know."""

import argparse
import copy
import operator
import re
from functools import cache, reduce
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.config import ClusterConfig
from deploy.batch import run_batch
from deploy.cli import make_parser
from deploy.options import cluster_config
from deploy.serve_config import refuse_starter_fields
from tests.deploy.schemas import unknown_keys

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "deploy/kuberay").glob("*.yaml"))
SCHEMAS = ROOT.parent / "shared/schemas"
KINDS = ("raycluster", "rayjob", "rayservice")

needs_schemas = pytest.mark.skipif(not SCHEMAS.is_dir(), reason=f"KubeRay's definitions are not there: {SCHEMAS}")


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def closed(schema: Any) -> Any:
    """The schema with every object closed that lists its fields."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    open_anyway = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_anyway:
        result["additionalProperties"] = False
    return result


@cache
def validator(kind: str, api: str) -> jsonschema.Draft202012Validator:
    text = (SCHEMAS / f"kuberay-v1.7.0-ray.io_{kind.lower()}s.yaml").read_text()
    definition = yaml.load(text, yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)["spec"]
    version = api.removeprefix(f"{definition['group']}/")
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in definition["versions"] if v["name"] == version)
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft202012Validator(closed(schema))


def complaints(document: dict[str, Any]) -> list[str]:
    return [
        f"{error.json_path}: {error.message}"
        for error in validator(document["kind"], document["apiVersion"]).iter_errors(document)
    ]


def ray_cluster(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    return spec.get("rayClusterConfig") or spec.get("rayClusterSpec") or spec


def arguments(document: dict[str, Any]) -> ClusterConfig:
    """The cluster options a manifest runs Choral with, checked as Choral would."""
    if document["kind"] == "RayService":
        (app,) = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"]
        config = ClusterConfig.model_validate(app["args"])
        refuse_starter_fields(config)
        return config
    return cluster_config(job_options(document))


def job_options(document: dict[str, Any]) -> argparse.Namespace:
    """A job's command as Choral understands it; an option it does not know ends the test."""
    program, *words = document["spec"]["entrypoint"].split()
    assert program == "choral"
    return make_parser().parse_args(words)


def test_there_is_one_of_each_kind_for_cpus_and_for_gpus():
    assert [path.stem for path in MANIFESTS] == [f"{kind}-{device}" for kind in KINDS for device in ("cpu", "gpu")]


@needs_schemas
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_holds_to_the_definition(path: Path):
    assert complaints(load(path)) == []


@needs_schemas
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("where", "key", "value", "said"),
    [
        ((), "rayVersions", "2.60.0", "rayVersions"),
        (("headGroupSpec",), "raystartparams", {}, "raystartparams"),
        (("headGroupSpec", "template", "spec", "containers", 0), "imag", "x", "imag"),
        (("workerGroupSpecs", 0), "replicas", "four", "'four' is not of type 'integer'"),
        (("workerGroupSpecs", 0), "groupName", None, "groupName"),
        (("workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources"), "limit", {}, "limit"),
    ],
)
def test_a_broken_manifest_is_caught(path: Path, where, key: str, value, said: str):
    document = load(path)
    target = reduce(operator.getitem, where, ray_cluster(document))
    if value is None:
        del target[key]
    else:
        target[key] = value
    assert any(said in complaint for complaint in complaints(document))


@pytest.mark.parametrize("path", [p for p in MANIFESTS if "service" in p.stem], ids=lambda path: path.stem)
def test_the_serve_config_holds_to_rays_schema_and_a_broken_one_is_caught(path: Path):
    document = yaml.safe_load(load(path)["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(document)
    assert unknown_keys(ServeDeploySchema, document) == []
    for key, where in (("http_option", ()), ("prot", ("http_options",)), ("arg", ("applications", 0))):
        broken = copy.deepcopy(document)
        reduce(operator.getitem, where, broken)[key] = 1
        assert [found.rpartition(".")[2] for found in unknown_keys(ServeDeploySchema, broken)] == [key]
    document["applications"][0]["import_path"] = "no colon or dot"
    with pytest.raises(ValueError, match="import_path"):
        ServeDeploySchema.model_validate(document)


@pytest.mark.parametrize("path", [p for p in MANIFESTS if "cluster" not in p.stem], ids=lambda path: path.stem)
def test_the_groups_fit_the_workers_they_ask_for(path: Path):
    document = load(path)
    config = arguments(document)
    (workers,) = ray_cluster(document)["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    if config.device == "cuda":
        assert config.tp == 8 and config.groups > 1
        assert config.groups * config.tp == workers["replicas"] * int(limits["nvidia.com/gpu"])
    else:
        per_node = config.groups * config.tp / workers["replicas"]
        assert per_node * (config.threads or 1) <= int(limits["cpu"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pods_run_without_root_from_a_fixed_image_and_may_drain(path: Path):
    cluster = ray_cluster(load(path))
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["terminationGracePeriodSeconds"] > ClusterConfig().drain_timeout_s
        assert all(re.fullmatch(r"choral:\d+\.\d+\.\d+-(cpu|cuda)", c["image"]) for c in pod["containers"])
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    env = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    ray_drains_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert ClusterConfig().drain_timeout_s < ray_drains_s < pod["terminationGracePeriodSeconds"]


def test_a_job_runs_the_batch_command_on_the_cluster_it_is_in():
    for path in (p for p in MANIFESTS if "job" in p.stem):
        options = job_options(load(path))
        assert options.run is run_batch
        assert options.n > 1 and options.output and options.input
        assert cluster_config(options).address == "auto"
