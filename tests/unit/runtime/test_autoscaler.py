"""Whether a cluster can grow, from what Ray's monitors write down."""

import json

from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from ray_lowcomm.runtime.ray_private import reports_autoscaling, reports_node_types


def status(active, launches=()):
    return json.dumps({"autoscaler_report": {"active_nodes": active, "pending_launches": dict(launches)}}).encode()


def test_the_first_autoscaler_names_types_of_nodes():
    assert reports_node_types(status({"ray.head.default": 1}))
    assert reports_node_types(status({}, {"spot_gpu": 2}))


def test_without_one_each_node_is_a_type_of_its_own():
    assert not reports_node_types(status({"node_269f9358721ff79a": 1, "node_00": 1}))


def test_nothing_is_known_yet():
    assert not reports_node_types(None)
    assert not reports_node_types(status({}))
    assert not reports_node_types(json.dumps({"autoscaler_report": None}).encode())


def reply(*types, autoscaler):
    message = GetClusterStatusReply()
    for name in types:
        message.cluster_resource_state.node_states.add(ray_node_type_name=name)
    if autoscaler:
        message.autoscaling_state.autoscaler_state_version = 3
    return message.SerializeToString()


def test_the_second_autoscaler_reports_to_the_gcs():
    assert reports_autoscaling(reply("headgroup", "workers", autoscaler=True))
    assert not reports_autoscaling(reply("headgroup", autoscaler=False))  # on Kubernetes, but of a fixed size
    assert not reports_autoscaling(reply("", autoscaler=True))
    assert not reports_autoscaling(b"")
