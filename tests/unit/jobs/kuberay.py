"""Facts of KubeRay's custom resources (1.5.1 and later), as far as our manifests use or could misspell them.

From its public API reference, https://ray-project.github.io/kuberay/reference/api/: names, types, what is required. Of
Kubernetes' own pod template only what a Ray pod of ours has.
"""


def record(*required, **fields):
    """An object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def listing(each):
    return {"type": "array", "items": each, "minItems": 1}


def one_of(*values):
    return {"enum": list(values)}


TEXT, FLAG, COUNT, NATURAL = (
    {"type": "string"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "integer", "minimum": 0},
)
TEXTS = {"type": "object", "additionalProperties": TEXT}  # KubeRay refuses numbers here: "0", not 0
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}}
RESOURCES = record(requests=QUANTITIES, limits=QUANTITIES)
METADATA = record("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)

ENV = record("name", name=TEXT, value=TEXT, valueFrom={"type": "object"})
CONTAINER = record(
    "name",
    "image",
    name=TEXT,
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    env=listing(ENV),
    resources=RESOURCES,
    ports=listing(
        record("containerPort", name={"type": "string", "maxLength": 15}, containerPort=COUNT, protocol=TEXT)
    ),
    volumeMounts=listing(record("name", "mountPath", name=TEXT, mountPath=TEXT, subPath=TEXT, readOnly=FLAG)),
    securityContext={"type": "object"},
)
TOLERATION = record(
    key=TEXT,
    operator=one_of("Exists", "Equal"),
    value=TEXT,
    effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
    tolerationSeconds=COUNT,
)
VOLUME = record(
    "name", name=TEXT, configMap=record("name", name=TEXT), emptyDir={"type": "object"}, secret={"type": "object"}
)
POD = record(
    "spec",
    metadata=record(labels=TEXTS, annotations=TEXTS),
    spec=record(
        "containers",
        containers=listing(CONTAINER),
        volumes=listing(VOLUME),
        nodeSelector=TEXTS,
        tolerations=listing(TOLERATION),
        serviceAccountName=TEXT,
        restartPolicy=one_of("Always", "OnFailure", "Never"),
        terminationGracePeriodSeconds=NATURAL,
        imagePullSecrets=listing(record("name", name=TEXT)),
    ),
)

HEAD = record(
    "template",
    template=POD,
    headService={"type": "object"},
    enableIngress=FLAG,
    resources=TEXTS,
    labels=TEXTS,
    rayStartParams=TEXTS,
    serviceType=one_of("ClusterIP", "NodePort", "LoadBalancer"),
)
WORKERS = record(
    "groupName",
    "minReplicas",
    "maxReplicas",
    "template",
    groupName=TEXT,
    replicas=NATURAL,
    minReplicas=NATURAL,
    maxReplicas=NATURAL,
    idleTimeoutSeconds=NATURAL,
    resources=TEXTS,
    labels=TEXTS,
    rayStartParams=TEXTS,
    template=POD,
    scaleStrategy={"type": "object"},
    numOfHosts=COUNT,
    suspend=FLAG,
)
AUTOSCALER = record(
    resources=RESOURCES,
    image=TEXT,
    imagePullPolicy=TEXT,
    securityContext={"type": "object"},
    idleTimeoutSeconds=NATURAL,
    upscalingMode=one_of("Default", "Aggressive", "Conservative"),
    version=one_of("v1", "v2"),
    env=listing(ENV),
    envFrom={"type": "array"},
    volumeMounts={"type": "array"},
)
CLUSTER_SPEC = record(
    "headGroupSpec",
    upgradeStrategy=record(type=one_of("Recreate", "None")),
    authOptions=record(mode=one_of("disabled", "token")),
    suspend=FLAG,
    managedBy=TEXT,
    autoscalerOptions=AUTOSCALER,
    headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions={"type": "object"},
    headGroupSpec=HEAD,
    rayVersion=TEXT,
    workerGroupSpecs=listing(WORKERS),
)
JOB_SPEC = record(
    activeDeadlineSeconds=COUNT,
    backoffLimit=NATURAL,
    rayClusterSpec=CLUSTER_SPEC,
    submitterPodTemplate=POD,
    metadata=TEXTS,
    clusterSelector=TEXTS,
    submitterConfig=record(backoffLimit=NATURAL),
    managedBy=TEXT,
    deletionStrategy={"type": "object"},
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    jobId=TEXT,
    submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    entrypointResources=TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    ttlSecondsAfterFinished=NATURAL,
    shutdownAfterJobFinishes=FLAG,
    suspend=FLAG,
)


def kind(name, version, **content):
    return record(
        "apiVersion",
        "kind",
        "metadata",
        apiVersion={"const": version},
        kind={"const": name},
        metadata=METADATA,
        **content,
    )


KINDS = {
    "RayCluster": kind("RayCluster", "ray.io/v1", spec=CLUSTER_SPEC),
    "RayJob": kind("RayJob", "ray.io/v1", spec=JOB_SPEC),
    "ConfigMap": kind("ConfigMap", "v1", data=TEXTS),
}
