"""Weights: what `nanoray checkpoint import` takes, what init_from accepts, and what export writes.

transformers is the reference, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanoray.checkpoint.files import load
from nanoray.checkpoint.init_from import load_weights
from nanoray.cli import parse_args
from nanoray.cli.checkpoint import main
from nanoray.cli.weights import main as weights
from nanoray.config import load_config
from nanoray.config.weights import find
from nanoray.data.dataset import DatasetInfo
from nanoray.data.initial_weights import describe_init
from nanoray.errors import ConfigError
from nanoray.models.build import build_model
from nanoray.models.gpt import GPT, ModelShape
from tests.harness import foreign
from tests.harness.foreign import POSITIONS, SIZES, VOCAB, logits_of, own_weights

CLOSE = 1e-5
IDX = torch.randint(VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(1))
SHAPE = ModelShape(2, 2, 32, POSITIONS, True, VOCAB, gelu="tanh")


@pytest.fixture(scope="module")
def gpt2() -> Any:
    """transformers' model, with the activation of GPT-2."""
    return foreign.transformers_gpt2()


def imported(path: Path) -> Path:
    """Return the file that `nanoray checkpoint import` makes of another tool's weights."""
    out = path.with_name("imported.safetensors")
    assert weights([str(path), "--out", str(out)]) == 0
    return out


def begun_with(path: Path, vocab_size: int = VOCAB, **overrides: Any) -> GPT:
    """Return the model of a run that begins with the weights of `path`."""
    config = load_config(overrides={"init_from": str(path), **overrides})
    model = build_model(config, vocab_size)
    assert isinstance(model, GPT)
    with torch.no_grad():  # what is not overwritten shows
        for p in model.parameters():
            p.fill_(torch.nan)
    load_weights(model, find(config.init_from))
    assert all(p.isfinite().all() for p in model.parameters())
    return model.eval()


# ---- in ------------------------------------------------------------------------------------------

KINDS: dict[str, foreign.Maker] = {
    "one file": foreign.one_file,
    "the hub's first files": foreign.hub_folder,
    "several bins": foreign.bin_files,
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, gpt2: Any, tmp_path: Path) -> None:
    ours = begun_with(imported(KINDS[kind](tmp_path / "gpt2", gpt2)))
    assert ours.shape == SHAPE
    torch.testing.assert_close(logits_of(ours, IDX), logits_of(gpt2, IDX), atol=CLOSE, rtol=0)


def test_logits_are_those_of_nanogpt(tmp_path: Path) -> None:
    """Its GELU is the exact one, and its linear layers are torch's."""
    theirs = foreign.transformers_gpt2("gelu")
    path = foreign.nanogpt_checkpoint(tmp_path / "ckpt.pt", theirs, compiled=True)
    ours = begun_with(imported(path))
    torch.testing.assert_close(logits_of(ours, IDX), logits_of(theirs, IDX), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("changes", [{"n_head": 4}, {"gelu": "exact"}])
def test_equal_shapes_of_another_model_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """A configuration made in Python has not been compared with the weights before."""
    path = own_weights(tmp_path / "w.safetensors", SHAPE)
    with pytest.raises(ConfigError, match="is of a model of the shape"):
        load_weights(GPT(replace(SHAPE, **changes)), find(str(path)))


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    """Rows that are no tokens are zeros, and get no probability; logits of the others are equal."""
    theirs = foreign.transformers_gpt2(vocab_size=250)
    ours = begun_with(imported(foreign.one_file(tmp_path / "w", theirs)), vocab_size=250)
    assert ours.tok_emb.weight.shape == (256, 32)
    assert torch.equal(ours.tok_emb.weight[250:], torch.zeros(6, 32))
    idx = IDX % 250
    assert logits_of(ours, idx).shape == (3, 250)
    torch.testing.assert_close(logits_of(ours, idx), logits_of(theirs, idx), atol=CLOSE, rtol=0)


# ---- refused -------------------------------------------------------------------------------------


def changed(model: Any, folder: Path, **changes: Any) -> Path:
    foreign.one_file(folder, model)
    foreign.write_config(folder, model, **changes)
    return folder


def with_tensors(model: Any, folder: Path, **tensors: Any) -> Path:
    """A folder with other tensors; None leaves one out."""
    foreign.write_config(folder, model)
    found = foreign.tensors_of(model) | {k.replace("__", "."): t for k, t in tensors.items()}
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder


def state_dict_alone(model: Any, folder: Path) -> Path:
    folder.mkdir()
    torch.save(foreign.tensors_of(model), folder / "x.pt")
    return folder / "x.pt"


C = SIZES["n_embd"]
REFUSED: dict[str, tuple[Any, str]] = {
    "llama": (partial(changed, model_type="llama"), "has model_type llama, and nanoray's GPT comp"),
    "untied by its weights": (
        partial(with_tensors, lm_head__weight=torch.zeros(VOCAB, C)),
        "has an output layer that is not its embedding",
    ),
    "sizes of another": (partial(changed, n_embd=64), "of shape [256, 32] for wte.weight, and"),
    "more layers": (partial(changed, n_layer=3), "has nothing for h.2.ln_1.weight"),
    "a fork of nanoGPT": (
        lambda model, folder: foreign.nanogpt_checkpoint(folder / "c.pt", model, use_relu=True),
        "model_args has use_relu = True, which nanoGPT has not, so its model may compute another",
    ),
    "a state_dict alone": (state_dict_alone, "has no model_args; give nanoGPT's"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_gpt2_is_refused_in_one_line(
    kind: str, gpt2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, text = REFUSED[kind]
    out = tmp_path / "out.safetensors"
    path = make(gpt2, tmp_path / "w")
    capsys.readouterr()  # transformers shows its progress
    assert weights([str(path), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert text in message
    assert message.count("\n") == 1
    assert not out.exists()


class Code:
    """Unpickled by Python's own means it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["model_args", "model", "rest"])
def test_code_in_a_checkpoint_is_not_run(where: str, gpt2: Any, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    path = foreign.nanogpt_checkpoint(tmp_path / "ckpt.pt", gpt2)
    content = torch.load(path, weights_only=True)
    if where == "rest":
        content["config"] = Code(trap)
    else:
        content[where]["x"] = Code(trap)
    torch.save(content, path)
    assert weights([str(path), "--out", str(tmp_path / "out")]) == 2
    assert not trap.exists()
    pickle.loads(pickle.dumps(Code(trap)))
    assert trap.exists(), "the trap works"


# ---- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [[], ["--preset=tiny"]], ids=["flags alone", "with a preset"])
def test_a_resumed_run_has_its_own_weights(
    layer: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    """The same command with --resume works, without the file; another init_from is refused."""
    monkeypatch.chdir(tmp_path)
    path = own_weights(tmp_path / "w.safetensors", SHAPE)
    flags = [*layer, "--init_from=w.safetensors", "--block_size=12"]
    before = parse_args(flags, "nanoray train", "").config
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.json").write_text(before.to_json())
    path.unlink()

    again = parse_args([*flags, f"--resume={run}"], "nanoray train", "").config
    assert ModelShape.of(again, VOCAB) == ModelShape.of(before, VOCAB)
    assert again.init_from == before.init_from == str(path)
    with pytest.raises(ConfigError) as error:
        parse_args([*layer, "--init_from=v", f"--resume={run}"], "nanoray train", "")
    assert f"has its own weights and began with those of {path}; drop" in str(error.value)

    # A run that began with random weights
    (run / "config.json").write_text(load_config(preset="tiny").to_json())
    with pytest.raises(ConfigError, match="has its own weights and began with random ones; drop"):
        parse_args([*layer, "--init_from=v", f"--resume={run}"], "nanoray train", "")


def dataset_of(vocab_size: int, tokenizer: dict[str, Any]) -> DatasetInfo:
    return DatasetInfo("words", "note", Path("/"), "uint16", vocab_size, 99, 99, "", "", tokenizer)


CHARS = {"kind": "char", "chars": "abc"}


@pytest.mark.parametrize(
    ("trained_on", "dataset", "fits"),
    [
        ((256, {"kind": "byte"}), (256, {"kind": "byte"}), True),
        ((256, {}), (256, {"kind": "byte"}), True),
        ((256, {"kind": "byte"}), (256, {"kind": "ids", "vocab_size": 256}), True),
        ((256, {}), (65, {"kind": "char", "chars": "x" * 65}), False),
        ((256, {}), (50257, {"kind": "gpt2"}), False),
        ((3, CHARS), (3, {"kind": "char", "chars": "abd"}), False),
        ((256, {"kind": "char", "chars": "x" * 256}), (256, {"kind": "byte"}), False),
    ],
)
def test_the_tokens_must_be_those_of_the_weights(
    trained_on: tuple[int, dict[str, Any]],
    dataset: tuple[int, dict[str, Any]],
    fits: bool,
    tmp_path: Path,
) -> None:
    vocab_size, tokenizer = trained_on
    shape = replace(SHAPE, vocab_size=vocab_size)
    path = own_weights(tmp_path / "w.safetensors", shape, tokenizer)
    config = load_config(overrides={"init_from": str(path)})
    if fits:
        (line,) = describe_init(config, dataset_of(*dataset))
        assert line.startswith(f"init   the weights of {path}: 2 layers, 2 heads, width 32")
        return
    with pytest.raises(ConfigError, match="the ids mean other texts; use the data and the token"):
        describe_init(config, dataset_of(*dataset))


# ---- text ----------------------------------------------------------------------------------------


# ---- out -----------------------------------------------------------------------------------------


def exported(tmp_path: Path, step: Path, kind: str = "safetensors") -> Path:
    name = {"huggingface": "hf", "safetensors": "m.safetensors"}[kind]
    out = tmp_path / name
    assert main(["export", str(step), "--format", kind, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_transformers_reads_an_export(
    gelu: str, bias: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = ModelShape(2, 2, 32, POSITIONS, bias, 250, gelu=gelu)
    step = foreign.own_checkpoint(tmp_path / "checkpoints", shape)
    out = exported(tmp_path, step, "huggingface")
    assert ("GPT-2 always has biases: they are zeros" in capsys.readouterr().out) == (not bias)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(out).eval()
    ours = GPT(shape)
    ours.load_state_dict(load(step).model)
    idx = IDX % 250
    expected = logits_of(ours.eval(), idx)
    torch.testing.assert_close(logits_of(theirs, idx), expected, atol=CLOSE, rtol=0)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", ["huggingface", "safetensors"])
def test_out_and_in_again_changes_no_bit(kind: str, tmp_path: Path) -> None:
    shape = ModelShape(2, 2, 32, POSITIONS, True, 250)
    step = foreign.own_checkpoint(tmp_path / "checkpoints", shape)
    path = exported(tmp_path, step, kind)
    ours = begun_with(path if kind == "safetensors" else imported(path), vocab_size=250)
    before = load(step).model
    assert ours.shape == shape
    for name, tensor in ours.state_dict().items():
        rows = 250 if name in ("tok_emb.weight", "lm_head.weight") else len(tensor)
        assert torch.equal(tensor[:rows], before[name][:rows]), name


def test_a_run_begins_with_an_export(tmp_path: Path) -> None:
    """With experts and rotary positions, which only nanoray's own format can express."""
    shape = ModelShape(2, 2, 32, POSITIONS, False, VOCAB, 4, 2, 16, 1, rotary=True, gelu="tanh")
    step = foreign.own_checkpoint(tmp_path / "checkpoints", shape)
    before = load(step).model
    path = exported(tmp_path, step)
    ours = begun_with(path)
    assert ours.shape == shape
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    # A longer context needs no weights
    assert begun_with(path, block_size=48).shape.block_size == 48


# ---- the form of GELU, elsewhere -----------------------------------------------------------------
