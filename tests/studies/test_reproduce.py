"""The figures that `farspan reproduce` promises, and that nothing in the engines knows what it is
compared with."""

from __future__ import annotations

import functools
import json
import statistics

import msgspec
import pytest

from farspan.cli.main import main
from farspan.domain.engine import Engine, load_engine
from farspan_studies.papers import cost_study, fabric_study, findings
from farspan_studies.papers.calibrate import constant, simplex, with_constants
from farspan_studies.papers.published import cost_study as study
from farspan_studies.papers.published import equal_cuts, fabric, published_plan
from tests.examples import slow_after


@functools.cache
def alpa() -> Engine:
    return load_engine("alpa2022")


@functools.cache
def cells() -> tuple[fabric_study.Cell, ...]:
    return fabric_study.cells(alpa())


@functools.cache
def study_cells() -> tuple[cost_study.StudyCell, ...]:
    return cost_study.study_cells(load_engine("torch2024"))


@functools.cache
def surface() -> tuple[cost_study.Setting, ...]:
    return cost_study.surface(load_engine("torch2024"))


def node() -> tuple[cost_study.Setting, ...]:
    return tuple(one for one in surface() if one.devices == 8)


NAMES = ("slm-100m", "slm-500m", "slm-1b", "slm-2b")


def test_every_row_is_priced() -> None:
    assert len(cells()) == 82
    assert sum(cell.counted for cell in cells()) == 12
    assert all(cell.minutes > 0 for cell in cells())


def test_twelve_cells() -> None:
    errors = [abs(cell.error) for cell in cells() if cell.counted and cell.error is not None]
    assert len(errors) == 12
    assert fabric_study.mape(cells()) <= 0.10
    assert max(errors) <= 0.20


def test_fitted_constants_are_at_their_optimum() -> None:
    at = fabric_study.misfit(alpa(), fabric_study.timed())
    for name in fabric_study.TIMES:
        for factor in (0.95, 1.05):
            moved = with_constants(alpa(), {name: constant(alpa(), name) * factor})
            assert fabric_study.misfit(moved, fabric_study.timed()) > at


def test_out_of_memory_verdicts() -> None:
    score = fabric_study.score(cells())
    assert (score.of, score.baseline, score.ceiling) == (79, 67, 76)
    assert score.right >= 70
    assert score.balanced >= 0.8


def test_prediction_error_is_small_with_one_data_cell_known() -> None:
    known = fabric_study.one_cell_known(alpa())
    assert len(known) == 4 and all(len(by) == 3 for by in known.values())
    assert statistics.median(abs(error) for by in known.values() for error in by.values()) <= 0.10


def test_open_slices_have_intervals() -> None:
    found = fabric_study.open_cells(cells())
    assert len(found) == 8
    assert all(low < 1 < high for low, high in (cell.interval for cell in found))


def test_findings() -> None:
    for by in findings.ratios(cells()).values():
        assert by["Shard"] > by["ZeRO2"] > by["Data"] > 1
    won = [
        max(by, key=lambda kind: by[kind])
        for by in findings.one_vm(cells()).values()
        if len(by) > 1
    ]
    assert won.count("Data") > len(won) / 2
    own = [
        c for c in cells() if c.gpus == "2 rtx6000" and c.slice == "UTAH-GPN" and c.model == "gpt2m"
    ]
    one = next(c for c in own if c.technique == "Data")
    two = next(
        c for c in cells() if c.slice == "TACC-TACC" and c.technique == "Pipeshard" and c.counted
    )
    assert one.minutes < two.minutes
    assert len(findings.findings(cells())) == 4


def test_our_own_best_comes_in_through_a_function() -> None:
    asked = []

    def best(model: object, cluster: object, train: object) -> None:
        asked.append(model)

    found = fabric_study.cells(alpa(), best)
    assert all(cell.best_minutes is None for cell in found)
    assert len(asked) == len({(cell.slice, cell.model, cell.gpus) for cell in found})


def test_cost_study_on_held_out_models() -> None:
    assert cost_study.study_error(study_cells(), study().held_out) <= 0.15
    assert cost_study.study_error(study_cells(), study().fitted_on) <= 0.15


def test_cost_study_findings() -> None:
    schemes = cost_study.scheme_ratios(node(), NAMES)
    assert all(schemes[name] > 1 for name in NAMES[:3]) and schemes["slm-2b"] < 1
    gains = cost_study.flash_gains(node(), NAMES)
    assert gains["slm-100m"][0] == max(gain for gain, _ in gains.values())
    assert gains["slm-100m"][1] > gains["slm-2b"][1]
    assert statistics.fmean(cost_study.gpu_ratios(node(), NAMES).values()) <= 1.0
    for name in ("slm-100m", "slm-500m", "slm-1b"):
        enough, largest = cost_study.saturation(node(), name)
        assert enough.memory_bytes < largest.memory_bytes


@pytest.mark.parametrize(("name", "most"), [("alpa2022", 7), ("torch2024", 5)])
def test_few_global_parameters(name: str, most: int) -> None:
    used = load_engine(name)
    assert 0 < len(used.fitted) <= most
    assert set(used.fitted) <= {field.name for field in msgspec.structs.fields(Engine)}


@pytest.mark.parametrize("name", ["alpa2022", "torch2024", "farspan"])
def test_no_constant_is_keyed_by_what_is_compared(name: str) -> None:
    """No field and no key of a field names a technique, a slice, a model or a device."""
    published = fabric()
    words = {
        *published.plans,
        *published.clusters,
        *study().schemes,
        *published.usable_memory,
        *NAMES,
    }
    words |= {row.model for row in published.rows} | {
        "data",
        "zero2",
        "shard",
        "pipeshard",
        "ddp",
        "fsdp",
    }
    values = msgspec.to_builtins(load_engine(name))
    keys = set(values) | {
        key for value in values.values() if isinstance(value, dict) for key in value
    }
    assert not {str(key).lower() for key in keys} & {word.lower() for word in words}


def test_published_plans_are_as_published() -> None:
    plan = next(
        c.plan for c in fabric_study.cases() if c.counted and c.row.technique == "Pipeshard"
    )
    (replica,) = plan.replicas
    assert [len(stage.mesh.ranks) for stage in replica.stages] == [2, 2]
    assert replica.microbatches == 4
    graph = fabric_study.cases()[0].graph
    # 24 blocks of 12 d^2 and a head of 50,256 d: 14 blocks before the cut, 10 and the head after
    # it.
    assert equal_cuts(graph, 2, 64) == [0, 15, 26]


def test_a_published_plan_that_does_not_divide_evenly_is_refused() -> None:
    case = next(c for c in fabric_study.cases() if c.counted and c.row.technique == "Shard")
    model = msgspec.structs.replace(case.model, d_model=768, d_ff=3072, heads=6, kv_heads=6)
    published = fabric()
    with pytest.raises(ValueError, match="6 cannot be divided evenly over 4 devices"):
        published_plan("Shard", published.plans["Shard"], model, case.cluster, published.settings)


def test_simplex_finds_the_bottom_of_a_bowl() -> None:
    assert simplex(
        lambda p: (p[0] - 1) ** 2 + 10 * (p[1] + 2) ** 2, [0.0, 0.0], 120
    ) == pytest.approx([1, -2], abs=1e-3)


@pytest.mark.parametrize("paper", slow_after(1, ["slm-cost", "fabric"]))
def test_json_is_one_object(
    paper: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from farspan_studies.commands import reproduce as command

    found = surface()
    monkeypatch.setattr(command, "best_plan", lambda *_: None)
    monkeypatch.setattr(cost_study, "surface", lambda used: found)
    assert main(["reproduce", paper, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"cells", "mape", "median", "parameters", "sensitivity", "findings"} <= answer.keys()
    assert len(answer["cells"]) == (82 if paper == "fabric" else 48)
    if paper == "fabric":
        assert all(error <= 0.12 for error in answer["leave_one_out"].values())
