"""Write a run.yaml for a folder of text, a file, `pydocs` or `hf:NAME`."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.console import Console
from farspan.domain.problems import Refusal, command
from farspan.domain.struct_files import missing_path, write_atomically
from farspan.domain.units import parse_duration

HELP = "write a run.yaml for a folder of text"

TEMPLATE = """\
# farspan run file. Only `data` is needed; every other line is optional and shows a choice.
data: {source}
size: auto              # auto, tiny, small, medium, large, xl, or a number of parameters such as 30M
budget: {{time: {time}}}      # the model and the number of steps are chosen so that training fits

# model: {{family: llama, context: 512}}
# tokenizer: {{vocab: 8192}}            # or a tokenizer file, folder or hub id
# train: {{epochs: 2, batch: {{global: 16k tokens}}, precision: auto, schedule: cosine, seed: 0}}
# parallel: {{workers: 2}}              # processes on this machine
# checkpoint: {{every: 5m, keep: 3}}
"""  # noqa: E501


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder or file of text, pydocs, or hf:NAME[:CONFIG]"
    )
    parser.add_argument("--out", default="run.yaml", help="file to write (default: run.yaml)")
    parser.add_argument(
        "--time", default="10m", help="time budget to write, such as 90s or 2h (default: 10m)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    import yaml

    from farspan.corpus.sources import open_source
    from farspan.planning.quantities import parse_positive

    parse_positive(parse_duration, given.time, "--time", "10m")
    out = Path(given.out)
    if out.exists():
        raise Refusal(
            "run-exists",
            what="this file exists already",
            where=out,
            fact="it is not written over",
            remedy=(
                f"{command('train', out)}, or: "
                f"{command('init', given.source, '--out', 'OTHER.yaml')}"
            ),
        )
    if not out.absolute().parent.is_dir():
        raise missing_path(out.absolute().parent)
    source = open_source(given.source)
    source.fingerprint()
    name = given.source
    if not name.startswith(("hf:", "pydocs")):
        name = str(Path(name).expanduser())
    quoted = yaml.safe_dump(name, width=float("inf")).splitlines()[0]
    text = TEMPLATE.format(source=quoted, time=given.time)
    write_atomically(out, text.encode())
    console.write_line(f"wrote {out}; next: {command('train', out)}")
    console.answer({"path": str(out), "source": name})
