"""A summary of FABRIC's resources, in the structure that `/portalresources/summary` answers and
that fablib reads (sites, hosts, components with capacity, allocated and available)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Degrees north and east.
LOCATIONS = {
    "UTAH": (40.76, -111.89),
    "MASS": (42.2, -72.5),
    "GPN": (39.1, -94.58),
    "TACC": (30.39, -97.73),
    "STAR": (41.9, -87.62),
    "BRIST": (51.45, -2.6),
    "GATECH": (33.77, -84.39),
    "AMST": (52.35, 4.95),
}
#: Machines: site, number, GPUs, how many, and how many of them are taken.
MACHINES = (
    ("UTAH", 1, "", 0, 0),
    ("UTAH", 2, "RTX6000", 3, 1),
    ("UTAH", 3, "Tesla T4", 2, 0),
    ("MASS", 1, "RTX6000", 2, 0),
    ("MASS", 2, "A30", 2, 2),
    ("TACC", 1, "RTX6000", 2, 0),
    ("TACC", 2, "Tesla T4", 2, 0),
    ("GATECH", 1, "A30", 2, 0),
    ("AMST", 1, "A30", 2, 0),
    ("STAR", 1, "A40", 2, 2),
)


def describe_machine(site: str, number: int, gpu: str, capacity: int, taken: int) -> dict[str, Any]:
    components = {"SharedNIC-ConnectX-6": {"capacity": 127, "allocated": 8, "available": 119}}
    if gpu:
        counts = {"capacity": capacity, "allocated": taken, "available": capacity - taken}
        components[f"GPU-{gpu}"] = counts
    return {
        "name": f"{site.lower()}-w{number}.fabric-testbed.net",
        "site": site,
        "state": "Active",
        "cores_capacity": 128,
        "cores_allocated": 68,
        "cores_available": 60,
        "ram_capacity": 478,
        "ram_allocated": 178,
        "ram_available": 300,
        "disk_capacity": 2233,
        "disk_allocated": 233,
        "disk_available": 2000,
        "components": components,
    }


def recorded_summary() -> dict[str, Any]:
    hosts = [describe_machine(*machine) for machine in MACHINES]
    sites = []
    for name, location in LOCATIONS.items():
        names = [host["name"] for host in hosts if host["site"] == name]
        site = {"name": name, "state": "Active", "location": location, "hosts": names}
        sites.append({**site, "components": {}})
    return {"sites": sites, "hosts": hosts, "links": [], "facility_ports": []}


def write_summary(folder: Path) -> Path:
    path = folder / "resources.json"
    path.write_text(json.dumps({"data": [recorded_summary()], "size": 1, "status": 200}))
    return path
