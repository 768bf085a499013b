"""What the testbed adds to a slice that it has made, as fablib reads it: addresses of VMs, hardware
addresses of cards. Runs under the interpreter that has fablib."""

from __future__ import annotations

import sys

from fabrictestbed.slice_editor import ExperimentTopology, Labels
from fim.slivers.capacities_labels import ReservationInfo

topology = ExperimentTopology()
topology.load(graph_string=sys.stdin.read())
for number, (_, node) in enumerate(sorted(topology.nodes.items()), start=1):
    node.set_property(pname="management_ip", pval=f"2001:db8::{number}")
    state = ReservationInfo(reservation_id=f"r{number}", reservation_state="Active")
    node.set_property(pname="reservation_info", pval=state)
    for card, (_, interface) in enumerate(sorted(node.interfaces.items()), start=1):
        labels = Labels(mac=f"02:00:00:00:0{number}:0{card}")
        interface.set_property(pname="label_allocations", pval=labels)
sys.stdout.write(topology.serialize())
