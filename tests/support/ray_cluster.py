"""A Ray cluster of two nodes on this machine. Prints its address; a line on standard input kills the second node."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}
    memory = {"object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "_system_config": quick} | memory)
    second = cluster.add_node(num_cpus=4, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second, allow_graceful=False)
        print("gone", flush=True)
    cluster.shutdown()
