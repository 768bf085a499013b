"""Train the model that a run.yaml asks for: text to tokens, a plan, pretraining, a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.app.configs import default_name
from farspan.app.jobs import is_active
from farspan.app.preflight_checks import refuse_existing, unused_path
from farspan.cli.arguments import load_config, takes_config, takes_without, words_again
from farspan.cli.console import Console
from farspan.cli.detach import run_detached, takes_detach
from farspan.domain.config import RunConfig
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder

HELP = "train a model as run.yaml says"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    parser.add_argument(
        "--run", metavar="FOLDER", help="run directory to make (default: runs/NAME)"
    )
    parser.add_argument(
        "--plan", metavar="PLAN.JSON", type=Path, help="run this plan, of farspan plan RUN.YAML -o"
    )
    parser.add_argument(
        "--until-done",
        action="store_true",
        help="begin the run or go on with it, and wait for hosts that are away",
    )
    takes_without(parser)
    parser.add_argument(
        "--print-unit",
        choices=("systemd", "cron", "slurm"),
        help="print what starts this command again after a crash or a reboot, and start nothing",
    )
    parser.add_argument(
        "--up", action="store_true", help="first install this farspan on the cluster's hosts"
    )
    takes_detach(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    config = load_config(given)
    path = Path(given.run or Path("runs", default_name(config)))
    if given.print_unit is not None:
        print_unit(given, config, path, console)
        return
    _require_slurm_job(given, config)
    if not given.until_done:
        refuse_without(given, path)
        refuse_existing(path, _new_run_remedy(given, path))
    # Hosts of a run that goes on may be away.
    if given.up and not (given.until_done and path.exists()):
        _set_up(config, console)
    if given.until_done:
        train_until_done(given, config, path, console)
        return
    if given.detach:
        words = ["train", *words_again(given), "--run", path]
        if given.plan is not None:
            words += ["--plan", given.plan]
        run_detached(words, RunFolder(path), console)
        return
    from farspan.app import training
    from farspan.app.plans import read_planned
    from farspan.cli.report_text import print_end
    from farspan.cli.show_updates import Show

    with Show(console) as show:
        if given.plan is None:
            folder = training.plan_run(path, config, show)
        else:
            planned = read_planned(given.plan, config, given.config, show)
            folder = training.make_run(path, config, planned, show)
        report = training.train_new(folder, show)
    print_end(report, console)
    console.answer({"run": str(path), "measurement": report.measurement})


def _require_slurm_job(given: argparse.Namespace, config: RunConfig) -> None:
    """Refuse a run of Slurm jobs outside of a job, before anything of it is made. Raises Refusal
    (launcher-unusable)."""
    from farspan.app.clusters import find_launcher
    from farspan.launch.slurm_allocation import SLURM, require_allocation

    if find_launcher(config.parallel) == SLURM:
        require_allocation(given.config, _slurm_command(given))


def _slurm_command(given: argparse.Namespace) -> str:
    """Return the command that submits the run of these arguments."""
    words = ["slurm", *words_again(given, leave_out="slurm")]
    words += [] if given.run is None else ["--run", given.run]
    return command(*words)


def _refuse_interrupted_start(given: argparse.Namespace, config: RunConfig) -> None:
    """Explain how a run that was stopped before its first step begins again, where that is not by
    this command: a Slurm job is submitted. Raises Refusal (interrupted)."""
    from farspan.app.clusters import find_launcher
    from farspan.launch.slurm_allocation import SLURM

    if find_launcher(config.parallel) == SLURM:
        raise Refusal(
            "interrupted",
            what="stopped as asked, before the first step",
            where=given.config,
            fact="what was finished so far is kept and used again",
            remedy=_slurm_command(given),
        )


def _new_run_remedy(given: argparse.Namespace, path: Path) -> str:
    """Write the same command for another folder and, where a run lies at `path`, what to do with
    that one."""
    words = ["train", *words_again(given), "--run", unused_path(path)]
    if given.plan is not None:
        words += ["--plan", given.plan]
    for option in ("up", "detach"):
        if getattr(given, option):
            words.append(f"--{option}")
    run = RunFolder(path)
    if not run.plan.exists():
        return command(*words)
    if is_active(run):
        return f"{command(*words)}   # this one is being trained: {command('status', path)}"
    return f"{command(*words)}   # to go on with this one: {run.resume_command()}"


def until_done_words(given: argparse.Namespace, path: Path) -> list[object]:
    """Return the words of the command that begins the run at `path` or resumes it."""
    words = ["train", *words_again(given), "--run", path, "--until-done"]
    for site in given.without:
        words += ["--without", site]
    return words


def refuse_without(given: argparse.Namespace, path: Path) -> None:
    """Refuse to give sites up in a run that is yet to begin."""
    if given.without:
        raise Refusal(
            "usage",
            what="--without is for a run that goes on",
            where="--without",
            fact="a new run uses the sites of its cluster file",
            remedy=command(*until_done_words(given, path)),
        )


def train_until_done(
    given: argparse.Namespace, config: RunConfig, path: Path, console: Console
) -> None:
    """Begin the run or resume it, and return when it is finished."""
    if given.plan is not None:
        raise Refusal(
            "usage",
            what="--until-done makes its own plan",
            where="--plan",
            fact="the same command has to begin the run and to go on with it",
            remedy=command("train", *words_again(given), "--run", path, "--plan", given.plan),
        )
    if given.detach:
        run_detached(until_done_words(given, path), RunFolder(path), console)
        return
    from farspan.app import training
    from farspan.cli.report_text import print_end
    from farspan.cli.show_updates import Show

    try:
        with Show(console) as show:
            report = training.train_until_done(
                path, config, given.config, show, without=tuple(given.without)
            )
    except KeyboardInterrupt:
        _refuse_interrupted_start(given, config)
        raise
    print_end(report, console)
    console.answer({"run": str(path), "measurement": report.measurement})


def print_unit(given: argparse.Namespace, config: RunConfig, path: Path, console: Console) -> None:
    """Print what starts this command again, of the kind that was asked for."""
    words = ["train", *words_again(given, absolute=True), "--run", path.absolute(), "--until-done"]
    for site in given.without:
        words += ["--without", site]
    if given.print_unit == "slurm":
        from farspan.app.slurm_jobs import training_script

        text = training_script(config, RunFolder(path), words_again(given))
    else:
        from farspan.app import job_units

        write = {"systemd": job_units.systemd_unit, "cron": job_units.cron_lines}
        text = write[given.print_unit](path.name, words)
    console.write_line(text.rstrip("\n"))
    console.answer({"unit": text})


def _set_up(config: RunConfig, console: Console) -> None:
    """Set up the cluster that the run asks for. Raises Refusal (usage) where it asks for none."""
    from farspan.app.cluster_hosts import require_set_up
    from farspan.cli.show_updates import Show

    name = config.parallel.cluster
    if name is None:
        raise Refusal(
            "usage",
            what="--up sets up the hosts of a cluster, and none is named",
            where="--up",
            fact="parallel.cluster is not set",
            remedy="--cluster CLUSTER.yaml",
        )
    with Show(console) as show:
        require_set_up(name, show)
