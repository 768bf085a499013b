"""Programs that the interpreters of hosts run for `farspan cluster up`, and what they answer: which
wheels an interpreter can install, which it still lacks, and whether what was installed works.

They are sent as text, need the standard library and a wheel of pip, and print JSON.
"""

from __future__ import annotations

from typing import Any

from farspan.domain.problems import Refusal
from farspan.launch.hosts import Agent

ANSWER_TIMEOUT_S = 300.0
#: Prints what pip knows of this interpreter; pip's wheel holds the library that does.
TAGS_PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pip._vendor.packaging.tags import sys_tags
print(json.dumps([str(tag) for tag in sys_tags()]))
"""
#: Prints the requirements of farspan, by pip's own rules, that no wheel in the folder satisfies.
MISSING_PROGRAM = """
import json, sys, zipfile
from email.parser import HeaderParser
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename
asked = json.loads(sys.argv[3])
tags = set(sys_tags())
wheels = {}
for path in Path(sys.argv[2]).glob("*.whl"):
    name, version, _, built = parse_wheel_filename(path.name)
    if built & tags:
        wheels.setdefault(name, []).append((version, path))
todo = [Requirement(root) for root in asked["roots"]]
seen, missing, used = set(), set(), set()
while todo:
    requirement = todo.pop()
    name = canonicalize_name(requirement.name)
    if name in asked["pins"]:
        requirement.specifier &= type(requirement.specifier)("==" + asked["pins"][name])
    key = (name, *sorted(requirement.extras))
    if key in seen:
        continue
    seen.add(key)
    fits = requirement.specifier.contains
    found = [item for item in wheels.get(name, ()) if fits(item[0], prereleases=True)]
    if not found:
        missing.add(name + str(requirement.specifier))
        continue
    path = max(found)[1]
    used.add(path.name)
    with zipfile.ZipFile(path) as wheel:
        metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(wheel.read(metadata).decode())
    for line in headers.get_all("Requires-Dist") or ():
        needed = Requirement(line)
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        if not needed.marker or any(map(needed.marker.evaluate, environments)):
            todo.append(needed)
print(json.dumps({"missing": sorted(missing), "used": sorted(used)}))
"""
CHECK_PROGRAM = """
import json, platform, torch
import farspan.runtime.worker
from importlib.metadata import version
print(json.dumps({
    "farspan": version("farspan"), "torch": torch.__version__, "python": platform.python_version()
}))
"""


def ask_interpreter(agent: Agent, python: str, program: str, *words: str) -> Any:
    """Return the JSON that a program prints with an interpreter of a host.

    Raises Refusal (install-failed) where it fails.
    """
    answer = agent.ask(
        "ask_python", python=python, program=program, words=words, deadline_s=ANSWER_TIMEOUT_S
    )
    if "fault" in answer:
        raise Refusal(
            "install-failed",
            what=f"the Python of {agent.host.name} does not work",
            where=f"{agent.host.name}, {python}",
            fact=answer["fault"],
            remedy="farspan cluster down CLUSTER, then farspan cluster up CLUSTER",
        )
    return answer["printed"]
