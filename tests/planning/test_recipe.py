"""What run.yaml leaves to the recipe, and what it does not."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from farspan import models
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.struct_files import content_hash
from farspan.domain.train import Muon, Optimizer, Regularization, Schedule
from farspan.planning.recipe import (
    CONTINUED_RATE,
    MOST_UPDATE,
    Continued,
    continued_recipe,
    peak_rate,
    studied_recipe,
    updating_share,
)
from farspan.semantics.identity import training_key
from farspan.techniques import Task, fsdp, zero1, zero2
from tests.planning.test_resolve import cluster, run
from tests.runtime.plans import HAND_PICKED
from tests.techniques import worlds

LARGE = {"model": {"layers": 3, "d_model": 384, "heads": 6}}


def settled(asked, **where):
    return run({"train": asked, **LARGE}, **where)


@pytest.mark.parametrize(("tokens", "muon"), [("1024 tokens", False), ("16k tokens", True)])
def test_muon_is_chosen_where_its_update_is_a_small_share_of_a_step(tokens, muon):
    found = settled({"batch": {"global": tokens}, "tokens": "1M"})
    share = updating_share(found.model, found.train.tokens_per_step)
    assert (share <= MOST_UPDATE) == muon == bool(found.train.optimizer.muon)
    assert f"{share:.0%} of a step" in found.origin["train.optimizer"]


def test_devices_that_read_fewer_tokens_each_spend_more_on_updates():
    few, many = (
        settled({"batch": {"global": "8k tokens"}, "tokens": "1M"}, devices=cluster(n))
        for n in (1, 8)
    )
    assert few.train.optimizer.muon and not many.train.optimizer.muon
    # By hand: 30 n n (2 m + n) over 6 tokens a parameter, of q, k, v, out (384 x 384) and gate, up,
    # down (384 x 1,024).
    n = 384
    m = few.model.d_ff
    layers = 3
    vocabulary = few.model.vocab_size
    updating = layers * 5 * (4 * 6.0 * n**3 + 3 * (4.0 * n * n * m + 2.0 * n**3))
    products = layers * (4 * n * n + 3 * n * m) + vocabulary * n
    assert updating_share(few.model, 8192) == pytest.approx(updating / (6 * products * 8192))


@pytest.mark.parametrize(
    "asked", ["muon", "adamw", {"kind": "muon"}, {"kind": "adamw", "lr": 0.01}]
)
def test_an_optimizer_that_is_asked_for_is_taken(asked):
    for tokens in ("1024 tokens", "16k tokens"):
        found = settled({"batch": {"global": tokens}, "tokens": "1M", "optimizer": asked})
        kind = asked if isinstance(asked, str) else asked["kind"]
        assert bool(found.train.optimizer.muon) == (kind == "muon")
        assert found.origin["train.optimizer"] == "run.yaml"


def test_the_plain_recipe_is_the_training_of_before():
    found = settled({"recipe": "plain", "batch": {"global": "16k tokens"}, "epochs": 3}).train
    assert found.optimizer == Optimizer(lr=found.optimizer.lr) and not found.regularization
    assert found.schedule == Schedule(warmup_steps=found.schedule.warmup_steps)


def test_muon_has_a_rate_of_its_own_that_falls_with_size_and_a_higher_one_for_the_embedding():
    found = settled({"batch": {"global": "16k tokens"}})
    count = count_parameters(found.model)
    assert found.train.optimizer.lr == peak_rate(count, muon=True) > peak_rate(count)
    assert found.train.optimizer.muon == Muon(embedding=3.0)
    assert (found.train.schedule.kind, found.train.schedule.floor) == ("linear", 0.0)
    assert found.origin["train.lr"].startswith("default: recipe auto, Muon at")
    rates = [peak_rate(10**n, muon=True) for n in range(4, 11)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 1e-2
    own = settled(
        {"batch": {"global": "16k tokens"}, "optimizer": {"lr": 0.02, "embedding": 1.5}}
    ).train.optimizer
    assert (own.lr, own.muon) == (0.02, Muon(embedding=1.5))


def test_single_keys_stand_against_either_recipe():
    keys = {"dropout": 0.1, "mask": 0.15, "reshuffle": True, "schedule": "wsd", "floor": 0.3}
    for recipe in ("auto", "plain"):
        asked = {
            "optimizer": {"weight_decay": 0.5, "average": 0.99},
            "recipe": recipe,
            "epochs": 2,
            **keys,
        }
        found = settled(asked)
        assert found.train.regularization == Regularization(dropout=0.1, mask=0.15, reshuffle=True)
        assert (found.train.schedule.kind, found.train.schedule.floor) == ("wsd", 0.3)
        assert (found.train.optimizer.weight_decay, found.train.optimizer.average) == (0.5, 0.99)
        assert {found.origin[f"train.{key}"] for key in (*keys, "weight_decay", "average")} == {
            "run.yaml"
        }


def test_documents_are_reshuffled_where_they_are_read_again():
    once, twice = (settled({"epochs": epochs}).train for epochs in (0.9, 2))
    assert not once.regular.reshuffle and twice.regular.reshuffle
    assert not settled({"epochs": 2, "reshuffle": False}).train.regular.reshuffle


def test_training_key_of_a_run_without_muon_is_that_of_earlier_versions():
    """A checkpoint of before Muon, whose manifest has this key, goes on."""
    plan = HAND_PICKED["zero 2"]
    train = plan.train
    before = {
        "lr": 3e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-5,
        "weight_decay": 0.1,
        "clip": 1.0,
    }
    assert msgspec.to_builtins(train.optimizer) == before
    key = content_hash(
        plan.model,
        plan.inputs.corpus,
        train.steps,
        train.batch,
        train.seq_len,
        train.precision,
        before,
        train.schedule,
        train.seed,
    )
    assert training_key(plan) == key
    for other in (
        replace(train, optimizer=replace(train.optimizer, muon=Muon())),
        replace(train, optimizer=replace(train.optimizer, average=0.9)),
        replace(train, regularization=Regularization(dropout=0.1)),
    ):
        assert training_key(replace(plan, train=other)) != key


@pytest.mark.parametrize(
    ("technique", "devices", "most"),
    [(fsdp, 6, 4), (fsdp, 4, None), (zero1, 6, None), (zero2, 6, 4), (zero2, 3, None)],
)
def test_more_devices_than_matrices_are_refused_with_how_many_there_are(technique, devices, most):
    model = replace(models.preset("gpt2").spec, layers=1 if technique is zero2 else 3)
    where = worlds.cluster((("fast",) * devices,))
    task = worlds.task(model, where)
    muon = replace(task.train, optimizer=replace(task.train.optimizer, muon=Muon()))
    found = technique.plan(Task(model, models.graph(model), where, muon, task.engine))
    if most is None:
        assert isinstance(found, Plan)
        return
    assert isinstance(found, Problem) and found.code == "cannot-plan"
    assert f"{most} matrices, for {devices} devices" in found.fact
    assert f"--cluster NAME:{most}" in found.remedy and "train.optimizer: adamw" in found.remedy
    assert isinstance(technique.plan(task), Plan)


@pytest.mark.parametrize(
    ("tokens_each", "share"),
    [
        (None, CONTINUED_RATE),
        (0, CONTINUED_RATE),
        (1, 1.0),
        (20, 1.0),
        (40, 0.5),
        (10_000, CONTINUED_RATE),
    ],
)
def test_model_takes_less_of_the_rate_the_more_it_was_trained(tokens_each, share):
    parameters = 1_000_000
    continued = Continued(None if tokens_each is None else tokens_each * parameters)
    assert continued.rate_share(parameters) == pytest.approx(share)


def test_model_that_farspan_has_trained_keeps_its_optimizer():
    assert continued_recipe(2.0, 100, Continued(5)) == studied_recipe(2.0, 100)
    assert continued_recipe(2.0, 100, Continued()).optimizer == "adamw"
