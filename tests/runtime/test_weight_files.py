"""The weights of folders in one or many files: what is read and written, how much is held, and what
is refused by name before any value is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan import models
from farspan.domain.model import count_parameters
from farspan.domain.problems import Problem, Refusal
from farspan.models._weight_files import INDEX, WEIGHTS_FILE, locate_weights
from farspan.runtime.model import huggingface
from farspan.runtime.model.decoder import Decoder
from tests.runtime.test_huggingface import build, decoder
from tests.runtime.test_huggingface import tokenizer as tokenizer
from tests.waiting import LIMIT_S

transformers = pytest.importorskip("transformers")

SMALL_SHARDS = 30_000


def export(folder: Path, tokenizer: Path, name: str = "llama", **options: Any) -> Decoder:
    model = decoder(build(name))
    huggingface.export_model(
        folder, model.state_dict(), model.spec, tokenizer=tokenizer, end_of_text=0, **options
    )
    return model


@pytest.fixture
def sharded(tmp_path: Path, tokenizer: Path) -> Path:
    export(tmp_path / "sharded", tokenizer, max_shard_bytes=SMALL_SHARDS)
    return tmp_path / "sharded"


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_sharded_export_has_the_tensors_of_one_file(dtype, tmp_path, tokenizer):
    model = export(tmp_path / "many", tokenizer, dtype=dtype, max_shard_bytes=SMALL_SHARDS)
    export(tmp_path / "one", tokenizer, dtype=dtype)
    shards = shards_of(tmp_path / "many")
    assert len(shards) > 2 and not (tmp_path / "many" / WEIGHTS_FILE).exists()
    assert not list((tmp_path / "many").glob("*.tmp"))
    whole = load_file(tmp_path / "one" / WEIGHTS_FILE)
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    size = sum(tensor.nbytes for tensor in whole.values())
    assert index["metadata"] == {
        "total_parameters": count_parameters(model.spec),
        "total_size": size,
    }
    assert index["weight_map"].keys() == whole.keys()
    for shard in shards:
        content = load_file(shard)
        held = sum(tensor.nbytes for tensor in content.values())
        assert len(content) == 1 or held <= SMALL_SHARDS
        for name, tensor in content.items():
            assert index["weight_map"][name] == shard.name
            assert torch.equal(tensor, whole[name])
    # transformers and farspan read the same values from it.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype="auto")
    values = theirs.state_dict()
    assert all(torch.equal(whole[name], values[name]) for name in whole)
    spec, state = huggingface.read_model(tmp_path / "many")
    assert locate_weights(tmp_path / "many", spec).stored == dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name], parameter.detach().to(state[name].dtype))


def test_weight_too_large_for_fp16_is_refused(tmp_path, tokenizer):
    model = decoder(build("llama"))
    with torch.no_grad():
        model.norm.weight[3] = 7e4
    with pytest.raises(Refusal) as caught:
        huggingface.export_model(
            tmp_path,
            model.state_dict(),
            model.spec,
            tokenizer=tokenizer,
            end_of_text=0,
            dtype="fp16",
        )
    assert caught.value.problem.code == "cannot-export"
    assert caught.value.problem.where == "model.norm.weight"
    assert not (tmp_path / WEIGHTS_FILE).exists()


def drop_shard(folder: Path) -> None:
    shards_of(folder)[1].unlink()


def cut_shard(folder: Path) -> None:
    shard = shards_of(folder)[1]
    shard.write_bytes(shard.read_bytes()[:-10])


def cut_header(folder: Path) -> None:
    shard = shards_of(folder)[0]
    shard.write_bytes(shard.read_bytes()[:20])


def empty_shard(folder: Path) -> None:
    shards_of(folder)[0].write_bytes(b"")


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def leave_folder(folder: Path) -> None:
    shards_of(folder)[0].rename(folder.parent / "away.safetensors")
    change_index(folder, lambda places: places.update(dict.fromkeys(places, "../away.safetensors")))


def leave_by_dots(folder: Path) -> None:
    change_index(folder, lambda places: places.update({min(places): ".."}))


def leave_by_absolute_path(folder: Path) -> None:
    away = shards_of(folder)[0].rename(folder.parent / "away.safetensors")
    change_index(folder, lambda places: places.update({min(places): str(away)}))


def put_elsewhere(folder: Path) -> None:
    change_index(folder, lambda places: places.update({min(places): shards_of(folder)[-1].name}))


def name_twice(folder: Path) -> None:
    """The same key twice, with two files: JSON's last one wins in silence."""
    text = (folder / INDEX).read_text()
    places = json.loads(text)["weight_map"]
    name = min(places)
    other = next(shard.name for shard in shards_of(folder) if shard.name != places[name])
    last = f'"{max(places)}": "{places[max(places)]}"'
    (folder / INDEX).write_text(text.replace(last, f'{last}, "{name}": "{other}"'))


def store_twice(folder: Path) -> None:
    first, second = shards_of(folder)[:2]
    content = load_file(second)
    extra = dict(list(load_file(first).items())[:1])
    save_file(content | extra, second, metadata={"format": "pt"})


def name_a_tensor_that_is_nowhere(folder: Path) -> None:
    shard = shards_of(folder)[0].name
    change_index(folder, lambda places: places.update({"model.extra.weight": shard}))


def change_first(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    shard = shards_of(folder)[0]
    content = load_file(shard)
    name = min(content)
    save_file(content | {name: change(content[name]).contiguous()}, shard)


def lie_about_type(folder: Path) -> None:
    shard = shards_of(folder)[0]
    shard.write_bytes(shard.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F16"', 1))


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (drop_shard, "path-missing", "model-00002-of-"),
        (cut_shard, "model-unsupported", "its end is missing, 10 bytes"),
        (cut_header, "model-unsupported", "the file is damaged"),
        (empty_shard, "model-unsupported", "the file is damaged"),
        (leave_folder, "model-unsupported", "'../away.safetensors', a file outside the folder"),
        (leave_by_dots, "model-unsupported", "'..', a file outside the folder"),
        (leave_by_absolute_path, "model-unsupported", "a file outside the folder"),
        (put_elsewhere, "model-unsupported", "which model.safetensors.index.json puts there"),
        (name_twice, "model-unsupported", "which model.safetensors.index.json puts there"),
        (store_twice, "model-unsupported", "is in model-00001-of-"),
        (name_a_tensor_that_is_nowhere, "model-unsupported", "'model.extra.weight'"),
        (
            lambda folder: change_first(folder, lambda tensor: tensor.double()),
            "model-unsupported",
            "is stored as F64; F32, BF16, F16 are read",
        ),
        (
            lambda folder: change_first(folder, lambda tensor: tensor.to(torch.float8_e4m3fn)),
            "model-unsupported",
            "is stored as F8_E4M3",
        ),
        (
            lambda folder: change_first(folder, lambda tensor: tensor[1:]),
            "model-unsupported",
            "config.json 331 rows",
        ),
        (
            lambda folder: change_first(folder, lambda tensor: tensor[:, 1:]),
            "model-unsupported",
            "values, config.json",
        ),
        (lie_about_type, "model-unsupported", "in F16"),
    ],
)
def test_damaged_shards_and_indexes_are_refused_by_their_headers(damage, code, words, sharded):
    spec = models.read_config(sharded)
    locate_weights(sharded, spec)
    damage(sharded)
    problem = refusal(sharded)
    assert problem.code == code and words in str(problem)


def refusal(folder: Path) -> Problem:
    with pytest.raises(Refusal) as caught:
        locate_weights(folder, models.read_config(folder))
    return caught.value.problem


def set_tied(folder: Path, tied: bool) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))


def test_heads_that_are_missing_or_are_not_the_embedding_are_refused(tmp_path, tokenizer):
    tied = tmp_path / "tied"
    export(tied, tokenizer, "llama")
    set_tied(tied, False)
    assert "tensor 'lm_head.weight' is missing" in refusal(tied).fact
    set_tied(tied, True)
    # A tied head may be stored in addition, if it is the embedding.
    content = load_file(tied / WEIGHTS_FILE)
    embedding = content["model.embed_tokens.weight"]
    save_file(content | {"lm_head.weight": embedding.clone()}, tied / WEIGHTS_FILE)
    spec, state = huggingface.read_model(tied)
    assert spec.tied and torch.equal(state["tok.weight"], embedding) and "head.weight" not in state
    for head in (embedding + 1e-6, embedding.bfloat16(), embedding[:-1].clone()):
        save_file(content | {"lm_head.weight": head}, tied / WEIGHTS_FILE)
        fact = refusal(tied).fact
        assert "tie_word_embeddings is true, but lm_head.weight is not the embedding" in fact


#: Prints how far the memory of this process rises above what it was while a model is read, in
#: bytes: its weights are put into a model that is there already.
MEASURE = """
import sys
from pathlib import Path
import torch
from farspan.runtime.model import huggingface

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

spec, state = huggingface.read_model(Path(sys.argv[1]))
own = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in state._shapes.items()}
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
for name, tensor in state.items():
    own[name].copy_(tensor)
    del tensor
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux measures it")
def test_reading_a_sharded_model_holds_no_more_than_its_largest_tensor_twice(tmp_path, tokenizer):
    """Once mapped from its file, and once as a copy; q, k and v are read together."""
    spec = models.family("llama").shape(
        d_model=512, layers=40, heads=8, vocab_size=4096, context=64, d_ff=1024
    )
    torch.manual_seed(0)
    model = Decoder(spec).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    huggingface.export_model(
        tmp_path,
        model.state_dict(),
        spec,
        tokenizer=tokenizer,
        end_of_text=0,
        dtype="bf16",
        max_shard_bytes=40_000_000,
    )
    size = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert size > 200e6 and len(shards_of(tmp_path)) > 4
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    # The libraries take a few MB at their first use.
    assert int(done.stdout) < 2 * largest + 16e6
