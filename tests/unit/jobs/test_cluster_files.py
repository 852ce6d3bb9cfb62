"""The cluster files are valid: Ray's schema for the launcher, KubeRay's for Kubernetes, ours for the runs in them."""

import copy
import re
import shlex
import tomllib
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray._private.label_utils import validate_node_label_syntax
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv

from jobs.train import JobConfig
from ray_lowcomm.config import load_config
from tests.unit.jobs.kuberay import KINDS

CLUSTER, CONFIGS = Path("jobs/cluster"), Path("jobs/configs")
LAUNCHERS = ["aws.yaml", "gcp.yaml"]
MANIFESTS = ["raycluster.yaml", "rayjob.yaml"]
MINE = re.compile(r"my-|example\.org|subnet-|serviceAccount")  # what nobody can use as it is


def launcher(name):
    """As `ray up` has it, before it asks the cloud."""
    return prepare_config(yaml.safe_load((CLUSTER / name).read_text()))


def manifests(name):
    return {each["kind"]: each for each in yaml.safe_load_all((CLUSTER / name).read_text())}


def cluster_spec(name):
    found = manifests(name)
    return found["RayCluster"]["spec"] if "RayCluster" in found else found["RayJob"]["spec"]["rayClusterSpec"]


def workers_of(config):
    return {n: t for n, t in config["available_node_types"].items() if n != config["head_node_type"]}


# ---- the launcher ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_file_fits_the_schema_of_ray(name):
    validate_config(launcher(name))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_schema_would_have_noticed(name):
    wrong = launcher(name)
    wrong["idle_timeout"] = 5
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout"):
        validate_config(wrong)
    wrong = launcher(name)
    next(iter(workers_of(wrong).values()))["label"] = {}
    with pytest.raises(jsonschema.ValidationError, match="label"):
        validate_config(wrong)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_has_a_head_without_gpu_and_spot_workers_from_none(name):
    config = launcher(name)
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert "spot" not in str(head["node_config"]).lower()
    for worker in workers_of(config).values():
        assert worker["min_workers"] == 0 < worker["max_workers"] <= config["max_workers"]
        assert worker["resources"]["GPU"] == 1
        assert "spot" in str(worker["node_config"]).lower()
        validate_node_label_syntax(worker["labels"])
        assert worker["labels"]["ray.io/region"] == config["provider"]["region"]
        assert worker["labels"]["ray.io/availability-zone"] in config["provider"]["availability_zone"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_has_token_authentication_and_this_ray(name):
    config = launcher(name)
    assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"
    assert config["docker"]["image"].startswith(f"rayproject/ray:{ray.__version__}-py311")
    start = [line for line in config["head_start_ray_commands"] if "ray start" in line]
    assert len(start) == 1
    assert "--dashboard-host=127.0.0.1" in start[0]  # the job server is reached through ssh
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start[0]


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_fits_kuberay(name):
    for kind, manifest in manifests(name).items():
        jsonschema.validate(manifest, KINDS[kind])


WRONG = {
    "unknown field": (("spec", "enableAutoscaling"), True),
    "number for a text": (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    "unknown field of a pod": (("spec", "headGroupSpec", "template", "spec", "serviceaccount"), "ray"),
    "unknown mode": (("spec", "authOptions", "mode"), "tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_facts_would_have_noticed(case):
    (*path, last), value = WRONG[case]
    wrong = copy.deepcopy(manifests("raycluster.yaml")["RayCluster"])
    at = wrong
    for name in path:
        at = at[name]
    at[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, KINDS["RayCluster"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_cluster_on_kubernetes_grows_from_none_and_has_a_token(name):
    spec = cluster_spec(name)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["rayVersion"] == ray.__version__
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    pods = [head["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    assert {pod["spec"]["restartPolicy"] for pod in pods} == {"Never"}
    images = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    assert len(images) == 1
    assert images.pop().endswith(f":{ray.__version__}")
    assert "gpu" not in str(head["template"])
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
        validate_node_label_syntax(group["labels"])
        assert "spot" in str(group["template"]["spec"]["nodeSelector"]).lower()
        assert "nvidia.com/gpu" in str(group["template"]["spec"]["tolerations"])
    assert len({str(group["labels"]) for group in spec["workerGroupSpecs"]}) == len(spec["workerGroupSpecs"])


def test_job_finds_its_configuration_and_its_replicas_find_room(tmp_path):
    found = manifests("rayjob.yaml")
    spec, settings = found["RayJob"]["spec"], found["ConfigMap"]
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (mount,) = head["containers"][0]["volumeMounts"]
    assert head["volumes"] == [{"name": mount["name"], "configMap": {"name": settings["metadata"]["name"]}}]
    assert settings["metadata"]["name"] == found["RayJob"]["metadata"]["name"]
    ((file, text),) = settings["data"].items()
    (tmp_path / file).write_text(text)
    python, minus_m, module, *argv = shlex.split(spec["entrypoint"])
    assert (python, minus_m, module) == ("python", "-m", "jobs.train")
    here = [word.replace(mount["mountPath"], str(tmp_path)) for word in argv]
    assert here != argv
    config = load_config(here, JobConfig, {})

    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    has = container["resources"]["limits"]
    assert has == container["resources"]["requests"]
    needs = config.fleet.resources_per_replica
    assert needs["CPU"] <= float(has["cpu"])
    assert needs["GPU"] == float(has["nvidia.com/gpu"])
    assert config.fleet.max_replicas <= group["maxReplicas"]
    assert config.run.output_dir.startswith("gs://")


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_two_regions():
    config = load_config(["--config", str(CONFIGS / "two_regions.yaml")], JobConfig, {}).resolved()
    regions = [cohort.label_selector["ray.io/region"] for cohort in config.fleet.cohorts]
    assert len(set(regions)) == 2
    assert config.run.output_dir.startswith("s3://")
    assert config.strategy.name == "topk_diloco"
    assert 1 <= config.fleet.min_replicas < config.fleet.max_replicas == 4


def test_runtime_env_installs_what_the_project_needs():
    given = yaml.safe_load((CLUSTER / "runtime_env.yaml").read_text())
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = [line for line in project["dependencies"] if not line.startswith("ray")]
    assert given["pip"]["packages"] == wanted
    assert RuntimeEnv(**given).to_dict()["pip"]["packages"] == wanted
    job = yaml.safe_load(manifests("rayjob.yaml")["RayJob"]["spec"]["runtimeEnvYAML"])
    RuntimeEnv(**job)
    for env in (given, job):  # Ray reads it as a whole number of seconds
        assert int(env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 3


@pytest.mark.parametrize("file", sorted([*CLUSTER.glob("*.yaml"), *CONFIGS.glob("*.yaml")]), ids=lambda file: file.name)
def test_what_a_user_has_to_change_is_marked(file):
    lines = file.read_text().splitlines()
    unmarked = [
        f"{file}:{number}: {line}"
        for number, (line, before) in enumerate(zip(lines, ["", *lines], strict=False), 1)
        if MINE.search(line) and not line.startswith("#") and not line.endswith(("&accounts", "*accounts"))
        if "# EDIT" not in line and "# EDIT" not in before
    ]
    assert unmarked == []
