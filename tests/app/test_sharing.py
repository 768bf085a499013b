"""What a continued model is exported with: its tokenizer, chat templates, licence and type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from farspan.app.restoring import restore_run
from farspan.cli.main import main
from farspan.domain.config import RunConfig
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load_yaml

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from farspan.models._base_files import BaseCard, read_card  # noqa: E402
from tests.app.instructed import continue_model, make_instructed_run  # noqa: E402

MESSAGES = [
    {"role": "user", "content": "Ein <|im_end|> Gruß\n"},
    {"role": "assistant", "content": ""},
]
#: Files of the model that an export has byte by byte.
SAME = (
    "LICENSE.txt",
    "Notice",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def instructed(tmp_path_factory) -> tuple[RunFolder, Path]:
    return make_instructed_run(tmp_path_factory.mktemp("sharing"))


@pytest.fixture(scope="module")
def exported(instructed, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main(["export", str(instructed[0].path), "--out", str(out)]) == 0
    return out


def test_tokenizer_templates_and_licence_are_exported_byte_by_byte(instructed, exported):
    _, model = instructed
    for name in SAME:
        assert (exported / name).read_bytes() == (model / name).read_bytes(), name
    others = {"README.md", "config.json", "model.safetensors"}
    files = {path.relative_to(exported).as_posix() for path in exported.rglob("*.*")}
    assert files | {"Notice"} == others | set(SAME)
    config = json.loads((exported / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 2, 0)


def test_exported_tokenizer_writes_and_reads_chats_as_the_model_did(instructed, exported):
    before = transformers.AutoTokenizer.from_pretrained(instructed[1])
    after = transformers.AutoTokenizer.from_pretrained(exported)
    for template in (None, "tool_use"):
        for tokenize in (False, True):
            options = {"chat_template": template, "tokenize": tokenize}
            chats = [
                words.apply_chat_template(MESSAGES, add_generation_prompt=True, **options)
                for words in (before, after)
            ]
            assert chats[0] == chats[1]
    assert after.apply_chat_template(MESSAGES, tokenize=False).startswith("<|im_start|>user\nEin")
    assert after.eos_token == "<|im_end|>" and after.pad_token == "<|endoftext|>"


def test_weights_are_exported_in_the_type_of_the_model_that_was_continued(
    instructed, exported, tmp_path, capsys
):
    run, _ = instructed
    words = ["export", str(run.path), "--out"]
    assert main([*words, str(tmp_path / "whole"), "--dtype", "fp32"]) == 0
    capsys.readouterr()
    assert main([*words, str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bf16"
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    stored = load_file(exported / "model.safetensors")
    assert whole.keys() == stored.keys()
    assert all(torch.equal(stored[name], whole[name].bfloat16()) for name in whole)
    assert not all(torch.equal(stored[name].float(), whole[name]) for name in whole)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    halved = tmp_path / "half"
    assert main(["export", str(run.path), "--dtype", "fp16", "--out", str(halved)]) == 0
    assert load_file(halved / "model.safetensors")["lm_head.weight"].dtype == torch.float16


def front_matter(folder: Path) -> dict:
    _, facts, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(facts)


def test_card_states_the_licence_and_origin_of_the_model(exported):
    assert front_matter(exported) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "small-instruct",
        "base_model_relation": "finetune",
        "language": ["en", "no"],
        "license": "other",
        "license_name": "small-licence",
        "license_link": "https://example.org/licence",
        "tags": ["farspan"],
    }
    card = (exported / "README.md").read_text()
    assert "continued the model `small-instruct`" in card and "follows\ninstructions" in card
    assert "`LICENSE.txt`, `Notice`" in card and "`somebody/larger`" in card
    assert str(exported.parent) not in card


def test_card_says_that_a_licence_is_unknown(instructed, tmp_path):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(instructed[0].path, run.path)
    for name in ("README.md", "LICENSE.txt", "Notice"):
        (run.base / name).unlink()
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    assert front_matter(tmp_path / "out")["license"] == "unknown"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The licence of that model is unknown" in card
    assert "Ask those who made it" in card


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("no front matter", BaseCard()),
        ("---\nlicense: mit\n", BaseCard()),
        ("---\n[1, 2]\n---\n", BaseCard()),
        ("---\na: {b\n---\n", BaseCard()),
        ("---\nlicense: 7\nlanguage: {a: b}\n---\n", BaseCard()),
        ("---\r\nlicense: [mit, apache-2.0]\r\n---\r\n", BaseCard(license="mit")),
        ("---\nlanguage: no\n---", BaseCard(languages=("no",))),
        ("---\nlicense: " + "x" * 999 + "\n---\n", BaseCard(license="x" * 200)),
    ],
)
def test_strange_cards_are_read_as_far_as_they_state_anything(text, card, tmp_path):
    (tmp_path / "README.md").write_text(text, newline="")
    assert read_card(tmp_path) == card


def test_model_with_another_tokenizer_gets_no_files_of_its_own_tokenizer(
    instructed, tmp_path, capsys
):
    run, model = instructed
    text = run.path.parent / "text"
    other = run.tokenizer
    continued = continue_model(tmp_path, text, model, f"tokenizer.use={other}")
    assert "it has a chat template" not in capsys.readouterr().err
    assert main(["export", str(continued.path), "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words("a")["input_ids"][0] == words.eos_token_id


def test_plan_says_once_what_continuing_does_to_a_chat_model(instructed, capsys):
    run, model = instructed
    words = ["plan", str(run.path.parent / "run.yaml"), "--from", str(model)]
    assert main([*words, "--set", "parallel.workers=1"]) == 0
    said = capsys.readouterr().out
    assert said.count("chat template") == 1 and "docs/models.md, Chat templates" in said


def test_link_out_of_the_model_is_refused_before_training(instructed, tmp_path, capsys):
    run, model = instructed
    secret = tmp_path / "secret"
    secret.write_text("key")
    linked = tmp_path / "linked"
    shutil.copytree(model, linked)
    (linked / "LICENSE").symlink_to(secret)
    words = ["train", str(run.path.parent / "run.yaml"), "--from", str(linked)]
    words += ["--run", str(tmp_path / "run"), "--set", "parallel.workers=1"]
    assert main([*words, "--set", "train.steps=1"]) != 0
    assert "path-unusable" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options", [["--dtype", "q4_k_m", "--format", "gguf"], ["--dtype", "q8_0"]]
)
def test_type_that_is_not_exported_is_refused_by_name(options, instructed, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(instructed[0].path), *options, "--out", str(out)]) == 15
    printed = capsys.readouterr().err
    assert options[1] in printed and "bf16" in printed and not out.exists()


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def use_unknown_positions(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0})


def lose_head(folder: Path) -> None:
    content = load_file(folder / "model.safetensors")
    del content["lm_head.weight"]
    save_file(content, folder / "model.safetensors")


def tie_another_head(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (use_unknown_positions, "rope_type"),
        (lose_head, "tensor 'lm_head.weight' is missing"),
        (tie_another_head, "tie_word_embeddings is true, but lm_head.weight is not"),
        (cut_weights, "its end is missing, 1 byte"),
    ],
)
@pytest.mark.parametrize("word", ["plan", "train"])
def test_model_that_cannot_be_continued_is_refused_before_any_text_is_read(
    word, damage, words, instructed, tmp_path, capsys
):
    run, model = instructed
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    damage(damaged)
    asked = [word, str(run.path.parent / "run.yaml"), "--from", str(damaged)]
    if word == "train":
        asked += ["--run", str(tmp_path / "run")]
    assert main(asked) == 30
    printed = capsys.readouterr()
    assert words in printed.err and "reading" not in printed.out


@pytest.mark.slow
def test_run_that_is_restored_from_a_copy_exports_the_same_files(instructed, tmp_path):
    run, model = instructed
    text = run.path.parent / "text"
    (tmp_path / "copies").mkdir()
    copied = continue_model(tmp_path, text, model, f"checkpoint.copy={tmp_path / 'copies'}")
    config = load_yaml(copied.config, RunConfig)
    before = {path.name: path.read_bytes() for path in copied.base.rglob("*.*")}
    shutil.rmtree(copied.path)
    restored = restore_run(copied.path, config)
    assert restored is not None
    assert {path.name: path.read_bytes() for path in restored.base.rglob("*.*")} == before
    assert (restored.base / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert main(["export", str(restored.path), "--out", str(tmp_path / "out")]) == 0
    for name in SAME:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes(), name


def test_chat_template_is_in_the_gguf_file(instructed, tmp_path):
    gguf = pytest.importorskip("gguf")
    run, model = instructed
    out = tmp_path / "model.gguf"
    assert main(["export", str(run.path), "--format", "gguf", "--out", str(out)]) == 0
    fields = gguf.GGUFReader(out).fields
    template = (model / "chat_template.jinja").read_text()
    assert fields["tokenizer.chat_template"].contents() == template
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_BF16
