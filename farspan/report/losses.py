"""What a validation loss is shown with: its tokens and weights, and what it means."""

from __future__ import annotations

from itertools import accumulate

from farspan.domain.corpus import CorpusManifest
from farspan.domain.cost import Measurement
from farspan.domain.run_events import Validated
from farspan.report.history import RunHistory

#: The training loss reported is the mean of these last steps: one step's loss is mostly noise.
LAST_STEPS = 20
#: What helps a model that has learned too little, one that has overfitted, one that was better, and
#: one whose training loss rose. No advice raises the learning rate: a loss that is high does not
#: say that it was too low.
LEARN_MORE = "more time or steps, or a smaller size"
REPEAT_LESS = "more text, a smaller size, or fewer epochs: it has overfitted its training text"
LOWER_RATE_AFTER_BEST = "a lower train.optimizer.lr: it was better before"
LOWER_RATE = "a lower train.optimizer.lr: the training loss rose"
#: A model is called overfitted that has read its text at least this often, and whose training loss
#: is this far below the validation loss. Choices, not fits.
OVERFITTED_EPOCHS = 2.0
OVERFITTED_NATS = 1.0
#: Nats by which a training loss ends above its lowest mean where it is said to have risen: means of
#: several steps vary by less. A choice, not a fit.
ROSE_NATS = 0.3
#: Fewer steps than these make a mean that is mostly noise: a short run is compared with its start.
FEWEST_MEAN_STEPS = 5


def read_on(tokens: int | None, of: int | None) -> str:
    """Format `on 17,408 of 83,210 tokens`; nothing for a run of a version that recorded neither."""
    if tokens is None or of is None:
        return ""
    return f"on {tokens:,} of {of:,} tokens"


def exact(loss: float, standard_error: float | None) -> str:
    """Format `4.829`, or `4.829 ± 0.012 (standard error)` of a sample."""
    number = f"{loss:.3f}"
    return f"{number} ± {standard_error:.3f} (standard error)" if standard_error else number


def format_validation(event: Validated) -> str:
    """Format a validation's loss, and the tokens it is of."""
    number = exact(event.loss, event.standard_error)
    return f"{number} {read_on(event.tokens, event.of)}".rstrip()


def format_headline(measured: Measurement) -> str:
    """Format the loss that a run is known by, and the tokens it is of."""
    assert measured.val_loss is not None
    number = exact(measured.val_loss, measured.val_standard_error)
    return f"{number} {read_on(measured.val_tokens, measured.val_of)}".rstrip()


def entropies(run: RunHistory, event: Validated | None) -> dict[str, float]:
    """Return those of the tokens that a validation read; of all of the split where an earlier
    version recorded none."""
    if event is None or event.unigram_nats is None or event.bigram_nats is None:
        return {"unigram": run.corpus.unigram_nats, "bigram": run.corpus.bigram_nats}
    return {"unigram": event.unigram_nats, "bigram": event.bigram_nats}


def comparable_loss(event: Validated) -> tuple[float, int, int | None]:
    """Return a validation's loss on the tokens that all validations of its run read, their number,
    and of how many."""
    if event.sample_loss is None or event.sample_tokens is None:
        return event.loss, event.tokens, event.of
    return event.sample_loss, event.sample_tokens, event.of


def last_validation(run: RunHistory) -> Validated | None:
    """Return the validation that a run is known by."""
    return run.history.validations[-1] if run.history.validations else None


def loss_notes(run: RunHistory, measured: Measurement) -> list[str]:
    """Note which weights were kept, where they are not the last ones, and that a model has learned
    too little."""
    lines = []
    end = last_validation(run)
    start = start_validation(run)
    if start is not None and end is not None and end.step > 0:
        lines.append(compare_start(start, end))
    if end is not None and end.sources:
        lines.append(describe_sources(run.corpus, start, end))
    bests = [event for event in run.history.validations if event.best]
    if bests and end is not None and bests[-1].step < end.step:
        best_loss, tokens, of = comparable_loss(bests[-1])
        last_loss, _, _ = comparable_loss(end)
        best = f"{bests[-1].step:,}: {best_loss:.3f} {read_on(tokens, of)}".rstrip()
        lines.append(
            f"that is of the last step, {end.step:,}; embed, generate and export load the best "
            f"weights, of step {best}, where the last have {last_loss:.3f}"
        )
    if short := warn_shortfall(run, measured):
        lines.append(short)
    return lines


def describe_sources(corpus: CorpusManifest, start: Validated | None, end: Validated) -> str:
    """Describe the loss of each source of a mixture, nats a token; with what it was `start`ed
    with."""
    replayed = {part.name for part in corpus.parts or () if part.replay}
    described = []
    for name, source in (end.sources or {}).items():
        text = f"{name} {source.loss:.3f}"
        if start is not None and start is not end and start.sources:
            text += f" (before {start.sources[name].loss:.3f})"
        if name in replayed:
            text += ", replayed and not counted"
        described.append(text)
    return f"validation loss by source: {'; '.join(described)}"


def start_validation(run: RunHistory) -> Validated | None:
    """Return the validation of the model that a run continues, before its first step."""
    first = run.history.validations[0] if run.history.validations else None
    return first if first is not None and first.step == 0 else None


def compare_start(start: Validated, end: Validated) -> str:
    """Compare the model that a run went on from with what became of it, on the same tokens."""
    before, tokens, of = comparable_loss(start)
    after, _, _ = comparable_loss(end)
    gained = before - after
    direction = "lower" if gained >= 0 else "higher"
    loss_before = f"{before:.3f} {read_on(tokens, of)}".rstrip()
    return (
        f"before training the model's validation loss was {loss_before}: now it is {after:.3f}, "
        f"{abs(gained):.3f} nats {direction}"
    )


def warn_shortfall(run: RunHistory, measured: Measurement) -> str | None:
    """Warn of a model above the unigram entropy, with what would help."""
    loss = measured.val_loss
    unigram = measured.unigram_nats
    if loss is None or unigram is None or loss <= unigram:
        return None
    epochs = measured.tokens / max(1, run.corpus.epoch_tokens(run.plan.train.shares))
    overfitted = measured.train_loss < min(unigram, loss - OVERFITTED_NATS)
    if _loss_rose(run):
        helps = LOWER_RATE
    elif overfitted and epochs >= OVERFITTED_EPOCHS:
        helps = REPEAT_LESS
    elif measured.best_val_loss is not None and measured.best_val_loss < unigram:
        helps = LOWER_RATE_AFTER_BEST
    else:
        helps = LEARN_MORE
    return (
        "the model has learned less than word frequencies: its validation loss is "
        f"{loss - unigram:.2f} nats above the "
        f"unigram entropy; what would help: {helps}"
    )


def _loss_rose(run: RunHistory) -> bool:
    """Return whether the training loss ended clearly above its lowest mean of the same number of
    steps (a quarter of the run, LAST_STEPS at most), or of a short run above its first."""
    sums = [0.0, *accumulate(timed.step.loss for timed in run.history.steps)]
    window = min(LAST_STEPS, max(1, len(run.history.steps) // 4))
    means = []
    for first, end in zip(sums, sums[window:], strict=False):
        means.append((end - first) / window)
    if not means:
        return False
    before = min(means) if window >= FEWEST_MEAN_STEPS else means[0]
    return means[-1] > before + ROSE_NATS
