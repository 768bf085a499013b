"""Pictures of plans: every device, byte, pass and part of memory is drawn once, in the terminal and
on the page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from farspan.domain.plan import Edge, GradSync, Mesh, Replica, Stage
from farspan.domain.units import format_bytes
from farspan.estimate.estimate_plan import price
from farspan.estimate.traffic import between_sites, traffic
from farspan.planning.why import costs_of
from farspan.report.plan_page import PageText, plan_page
from farspan.report.plan_picture import Picture, picture
from farspan.report.plan_terminal import show
from tests.planning.worlds import ranking

TOLD = PageText(
    title="data & more",
    question="q",
    choice="c",
    tiles=(("Time", "1 min", "at <most>"),),
    heads=("#", "technique"),
    rows=(("1", "data"),),
    marked=0,
    refused=("diloco: no plan",),
    why=(("Why", ("because",)),),
)


def drawn(technique: str, where: str, *sites: str) -> tuple[Picture, object]:
    one = ranking(*sites, allow=("data", "zero2", "diloco"))
    found = next(c for c in one.candidates if (c.technique, c.where) == (technique, where))
    costs = costs_of(found.plan, one.cluster)
    return picture(found.plan, found.estimate, costs), costs


def pipeline(memory: int | None = None) -> Picture:
    """Four stages on two sites, 16 microbatches; on devices of so much memory."""
    one = ranking("FF", "SS", allow=("data",))
    base = next(c.plan for c in one.candidates if c.where == "all devices")
    cuts = (0, 4, 7, 11, 14)
    stages = tuple(
        Stage(
            units=(cuts[i], cuts[i + 1]),
            mesh=Mesh(ranks=(i,), shape=(1,), axes=("data",)),
            rows=(32,),
            grad_sync=GradSync(bucket_bytes=None),
        )
        for i in range(4)
    )
    replica = Replica(
        stages=stages, edges=(Edge(bits=16),) * 3, microbatches=16, in_flight=(5, 4, 3, 2)
    )
    train = msgspec.structs.replace(base.train, batch=32)
    plan = msgspec.structs.replace(base, train=train, replicas=(replica,))
    costs = costs_of(plan, one.cluster)
    shown = picture(plan, price(plan, costs), costs)
    if memory is None:
        return shown
    small = [
        msgspec.structs.replace(
            site,
            hosts=tuple(
                msgspec.structs.replace(
                    host,
                    boxes=tuple(
                        msgspec.structs.replace(box, capacity=memory, usable=0.9 * memory)
                        for box in host.boxes
                    ),
                )
                for host in site.hosts
            ),
        )
        for site in shown.sites
    ]
    return msgspec.structs.replace(shown, sites=tuple(small))


def text(shown: Picture, width: int = 96) -> str:
    return "\n".join("".join(part for part, _ in line) for line in show(shown, width))


class Balance(HTMLParser):
    """Fails on a tag that is not closed in order."""

    VOID = {"meta", "link", "rect", "line", "path", "br"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_every_device_stands_in_its_host_with_its_rows_and_memory() -> None:
    shown, _ = drawn("data", "all devices", "FF", "SS")
    assert [site.name for site in shown.sites] == ["s0", "s1"]
    assert sum(box.count for box in shown.boxes) == 4
    stage = shown.plan.replicas[0].stages[0]
    assert sum(box.rows * box.count for box in shown.boxes) == sum(stage.rows)
    assert sorted(box.memory.total for box in shown.boxes for _ in range(box.count)) == sorted(
        memory.total for memory in shown.estimate.memory
    )


def test_flows_are_the_bytes_that_the_plan_sends() -> None:
    shown, costs = drawn("data", "all devices", "FF", "SS")
    expected = between_sites(traffic(shown.plan, costs), costs.network)[("s0", "s1")]
    (flow,) = [flow for flow in shown.flows if flow.between_sites]
    assert flow.bytes == expected
    assert f"{format_bytes(flow.total)} a step: gradients" in text(shown)


def test_a_pipeline_draws_every_pass_once_and_ends_with_the_step() -> None:
    shown = pipeline()
    assert [lane.name for lane in shown.lanes] == ["stage 1", "stage 2", "stage 3", "stage 4"]
    for lane in shown.lanes:
        for kind in ("forward", "backward"):
            assert sorted(mark.number for mark in lane.marks if mark.kind == kind) == list(
                range(1, 17)
            )
        assert [mark.kind for mark in lane.marks].count("update") == 1
        assert all(
            a.end <= b.start + 1e-9 for a, b in zip(lane.marks, lane.marks[1:], strict=False)
        )
    assert shown.estimate.step_s <= shown.ends <= 1.3 * shown.estimate.step_s


def test_equal_replicas_share_one_lane_labelled_with_their_number() -> None:
    shown, _ = drawn("diloco", "all devices", "FF", "FF")
    names = [lane.alike for lane in shown.lanes]
    assert set(names) == {2}
    assert "2 replicas" in text(shown)


def test_plan_page_of_a_single_device_has_no_flows() -> None:
    shown, _ = drawn("data", "one fast of h0", "FF", "SS")
    assert "nothing leaves the host" in text(shown)
    assert shown.flows == ()


@pytest.mark.parametrize("width", [76, 96, 110])
def test_the_terminal_keeps_to_its_width(width: int) -> None:
    for shown in (pipeline(), drawn("diloco", "all devices", "FF", "SS")[0]):
        assert max(map(len, text(shown, width).splitlines())) <= width


def test_device_short_of_memory_is_marked_in_terminal_and_page() -> None:
    shown = pipeline(memory=10**9)
    assert not all(box.fits for box in shown.boxes)
    tints = {tint for line in show(shown, 96) for _, tint in line}
    assert "bad" in tints
    assert "too much" in plan_page(shown, TOLD)
    assert "too much" not in plan_page(pipeline(), TOLD)


@pytest.mark.parametrize(
    "make", [pipeline, lambda: drawn("data", "one fast of h0", "FF", "SS")[0], lambda: None]
)
def test_the_page_is_whole_offline_and_escaped(make) -> None:
    html = plan_page(make(), TOLD)
    checker = Balance()
    checker.feed(html)
    assert checker.open == []
    assert not re.search(r"""(?:src|href)=["']https?:""", html)
    assert "data &amp; more" in html and "at &lt;most&gt;" in html
    assert html == plan_page(make(), TOLD)
    for value in re.findall(r'(?:x|width)="(-?[\d.]+)%"', html):
        assert 0 <= float(value) <= 100.01
