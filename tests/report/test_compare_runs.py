"""Runs against each other: only what differs is told, and only what can be compared is put in
order."""

from __future__ import annotations

import msgspec
import pytest

from farspan.corpus import tokenizer as tokenizers
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load, save
from farspan.report.compare import compare_runs
from farspan.report.history import open_run
from tests.report.fake_run import START, make_plan, train_events, write_run


def finished(folder):
    plan = make_plan(200)
    return write_run(folder, train_events(plan, first=0, last=200, at=START, reason="done"), plan)


@pytest.fixture
def pair(tmp_path):
    """Two runs of one configuration."""
    folders = []
    for name in ("a", "b"):
        folder = finished(tmp_path / name)
        (folder / "tokenizer.json").write_text('{"words": 1}')
        folders.append(folder)
    return folders


def rewrite(run, kind, change):
    events = [msgspec.json.decode(line) for line in run.events.read_bytes().splitlines()]
    changed = (change(event) if event["event"] == kind else event for event in events)
    run.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in changed))


def compared(folders):
    return compare_runs([open_run(folder) for folder in folders])


def lines(found, part="results"):
    return {line.what: line for line in getattr(found, part)}


def test_runs_that_are_alike_differ_in_nothing(pair):
    found = compared(pair)
    assert found.names == ("a", "b") and found.configuration == () and found.notes == ()
    assert found.same > 40
    assert all(line.best is None for line in found.results)


def test_comparison_lists_only_settings_that_differ(pair):
    run = RunFolder(pair[1])
    plan = load(run.plan, Plan)
    train = msgspec.structs.replace(plan.train, seed=7, batch=16)
    stage = msgspec.structs.replace(plan.replicas[0].stages[0], rows=(16,))
    replica = msgspec.structs.replace(plan.replicas[0], stages=(stage,))
    save(msgspec.structs.replace(plan, train=train, replicas=(replica,)), run.plan)
    found = lines(compared(pair), "configuration")
    assert set(found) == {"train.seed", "train.batch", "stage 1"}
    assert found["train.seed"].values == ("0", "7")


def test_losses_per_token_with_different_tokenizers_are_not_ranked(pair):
    (pair[1] / "tokenizer.json").write_text('{"words": 2}')
    rewrite(
        RunFolder(pair[1]),
        "validated",
        lambda event: event | {"bits_per_byte": event["bits_per_byte"] / 2},
    )
    found = compared(pair)
    assert lines(found)["validation loss, nats a token"].best is None
    assert lines(found)["validation loss, bits a byte"].best == 1
    assert any("Tokenizers differ" in note for note in found.notes)
    assert "tokenizer" in lines(found, "configuration")


def test_losses_on_different_validation_texts_are_not_ranked(pair):
    run = RunFolder(pair[1])
    corpus = load(run.corpus, CorpusManifest)
    val = msgspec.structs.replace(corpus.val, text_bytes=corpus.val.text_bytes + 1)
    save(msgspec.structs.replace(corpus, val=val, hash="a" * 16), run.corpus)
    found = compared(pair)
    assert all(
        lines(found)[name].best is None for name in lines(found) if name.startswith("validation")
    )
    assert any("texts differ" in note for note in found.notes)


def test_losses_on_one_corpus_read_from_two_paths_are_ranked(pair):
    run = RunFolder(pair[1])
    save(msgspec.structs.replace(load(run.corpus, CorpusManifest), source="/elsewhere"), run.corpus)
    rewrite(run, "validated", lambda event: event | {"bits_per_byte": event["bits_per_byte"] / 2})
    found = compared(pair)
    assert lines(found)["validation loss, bits a byte"].best == 1 and found.notes == ()


def test_losses_on_different_samples_of_a_text_are_not_ranked(pair):
    for folder in pair:
        plan = load(RunFolder(folder).plan, Plan)
        train = msgspec.structs.replace(plan.train, validate_tokens=1000)
        save(msgspec.structs.replace(plan, train=train), RunFolder(folder).plan)
    rewrite(RunFolder(pair[1]), "validated", lambda event: event | {"loss": event["loss"] / 2})
    assert lines(compared(pair))["validation loss, nats a token"].best == 1
    (pair[1] / "tokenizer.json").write_text(
        '{"words": 2}'
    )  # As many tokens are then another part of the text.
    found = compared(pair)
    assert all(
        lines(found)[name].best is None for name in lines(found) if name.startswith("validation")
    )
    (pair[1] / "tokenizer.json").write_text('{"words": 1}')
    rewrite(RunFolder(pair[1]), "validated", lambda event: event | {"tokens": event["tokens"] // 2})
    found = compared(pair)
    assert all(
        lines(found)[name].best is None for name in lines(found) if name.startswith("validation")
    )
    assert any("different parts" in note for note in found.notes)


def test_step_time_and_memory_of_a_smaller_model_are_not_ranked_better(pair):
    run = RunFolder(pair[1])
    plan = load(run.plan, Plan)
    save(
        msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, layers=1)), run.plan
    )
    rewrite(run, "step", lambda event: event | {"step_s": event["step_s"] / 3, "memory_bytes": 5})
    found = lines(compared(pair))
    assert [found[name].best for name in ("step, middle half", "run time", "peak memory")] == [
        None
    ] * 3


def test_a_step_is_best_only_beyond_its_spread(pair):
    def scaled(factor):
        rewrite(
            RunFolder(pair[1]), "step", lambda event: event | {"step_s": factor * event["step_s"]}
        )

    scaled(1.001)
    assert lines(compared(pair))["step, middle half"].best is None
    scaled(3.0)
    assert lines(compared(pair))["step, middle half"].best == 0


def test_steps_with_different_numbers_of_tokens_are_not_ranked(pair):
    run = RunFolder(pair[1])
    plan = load(run.plan, Plan)
    save(
        msgspec.structs.replace(
            plan, train=msgspec.structs.replace(plan.train, batch=2 * plan.train.batch)
        ),
        run.plan,
    )
    rewrite(run, "step", lambda event: event | {"step_s": 3 * event["step_s"]})
    found = lines(compared(pair))
    assert found["step, middle half"].best is None and found["run time"].best is None


def test_runs_with_the_same_name_are_named_by_their_paths(tmp_path):
    folders = [finished(tmp_path / name / "run") for name in ("a", "b")]
    for folder in folders:
        tokenizers.train_bpe_tokenizer(["alpha beta"] * 50, 300).save(folder / "tokenizer.json")
    assert compare_runs([open_run(folder) for folder in folders]).names == tuple(map(str, folders))


def test_losses_are_put_in_order_only_over_the_same_tokens(pair):
    """Which tokens these are each validation says; a run of an earlier version, which did not say,
    is in no order."""

    def read(folder, **fields):
        rewrite(RunFolder(folder), "validated", lambda event: event | fields)

    def order():
        found = compared(pair)
        names = ("validation loss, nats a token", "validation loss, bits a byte")
        return [lines(found)[name].best for name in names], found.notes

    rewrite(
        RunFolder(pair[1]), "validated", lambda event: event | {"loss": 1.0, "bits_per_byte": 0.5}
    )
    for folder in pair:
        read(folder, tokens=17_000, of=83_000, read="these")
    assert order() == ([1, 1], ())
    read(pair[1], read="others")  # As many tokens, but not the same ones.
    best, notes = order()
    assert best == [None, None] and any("different parts" in note for note in notes)
    shown = lines(compared(pair))["validation loss is"].values
    assert shown == ("on 17,000 of 83,000 tokens",) * 2
    for folder in pair:
        read(folder, tokens=83_000)  # Windows of unlike lengths, but all of the split.
    assert order() == ([1, 1], ())
    rewrite(
        RunFolder(pair[0]),
        "validated",
        lambda e: {k: v for k, v in e.items() if k not in ("of", "read")},
    )
    assert order()[0] == [None, None]
