"""Train the model of a run.yaml in Slurm jobs: print the sbatch script and submit it.

A job that comes to its limit saves and goes back into the queue until the run is finished.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.app.configs import default_name
from farspan.app.preflight_checks import unused_file, unused_path
from farspan.cli.arguments import load_config, takes_config, words_again
from farspan.cli.console import Console
from farspan.domain.escapes import shell_line
from farspan.domain.problems import command
from farspan.domain.run import RunFolder

HELP = "train in Slurm jobs"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    parser.add_argument(
        "--run", metavar="FOLDER", help="run directory to make or go on with (default: runs/NAME)"
    )
    parser.add_argument(
        "--print", dest="only_print", action="store_true", help="print the script and do no more"
    )
    parser.add_argument(
        "--follow", action="store_true", help="show the job's state, and why it waits, to its end"
    )
    parser.add_argument(
        "--probe",
        metavar="FILE",
        type=Path,
        help="measure the nodes in a job instead, and write a cluster file of them",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import slurm_jobs
    from farspan.cli.show_updates import Show

    config = load_config(given)
    folder = RunFolder(Path(given.run or Path("runs", default_name(config))))
    if given.probe is None:
        script = slurm_jobs.training_script(config, folder, words_again(given))
    else:
        script = slurm_jobs.probe_script(config, given.probe)
    # Before the script: an error at its end is easily overlooked.
    words = ["slurm", *words_again(given)]
    if not given.only_print and given.probe is None:
        another_run = command(*words, "--run", unused_path(folder.path))
        slurm_jobs.require_submittable(config, folder, another_run)
    elif not given.only_print:
        another_file = command(*words, "--probe", unused_file(given.probe))
        slurm_jobs.require_probe_file(given.probe, another_file)
    console.write_line(script)
    sites = slurm_jobs.site_scripts(config, folder) if given.probe is None else {}
    for site, text in sites.items():
        # As comments: what is printed may be submitted.
        heading = f"\nAt {config.slurm.sites[site].login}, for site {site}:\n\n{text}"
        console.write_line("\n".join(f"# {line}".rstrip() for line in heading.splitlines()))
    if given.only_print:
        console.answer({"script": script, **({"sites": sites} if sites else {})})
        return
    with Show(console) as show:
        if given.probe is None:
            submitted = slurm_jobs.submit_training(config, folder, script, show)
        else:
            submitted = slurm_jobs.submit_probe(config, given.probe, script, show)
        console.write_line(f"script: {submitted.script}")
        console.write_line(f"log: {submitted.log}")
        console.write_line(f"queue: {shell_line('squeue', '--jobs', submitted.id)}")
        if given.probe is None:
            console.write_line(f"progress: {command('status', folder.path)}")
        console.write_line(f"save and end: {shell_line('scancel', submitted.id)}")
        if given.follow:
            slurm_jobs.follow_job(submitted.id, show)
    console.answer(
        {
            "job": submitted.id,
            "script": str(submitted.script),
            "log": str(submitted.log),
            "queued": submitted.queued,
            **({"stuck": submitted.stuck} if submitted.stuck else {}),
        }
    )
