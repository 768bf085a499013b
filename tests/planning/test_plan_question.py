"""What `--model` may name."""

import pytest

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import save
from farspan.planning.plan_question import model_of
from tests.planning.worlds import ranking


def test_a_plan_file_names_its_model(tmp_path):
    plan = ranking("F", allow=("data",)).candidates[0].plan
    save(plan, tmp_path / "plan.json")
    assert model_of(str(tmp_path / "plan.json")) == plan.model


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "model.json").write_text('{"layers": 2}')
    with pytest.raises(Refusal) as refused:
        model_of(str(tmp_path / "model.json"))
    assert "model.json" in str(refused.value.problem.where)
