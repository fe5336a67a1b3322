"""Weights of other tools: what init_from accepts and refuses, and what export writes for them.

transformers is the reference, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nanoray.checkpoint import files
from nanoray.checkpoint.__main__ import main
from nanoray.checkpoint.files import load
from nanoray.checkpoint.foreign import load_weights
from nanoray.cli import parse_args
from nanoray.config import load_config
from nanoray.config.load import read_names
from nanoray.config.weights import outlines
from nanoray.config.weights.gpt2 import NAMES
from nanoray.config.weights.source import find
from nanoray.data.dataset import DatasetInfo
from nanoray.data.foreign_weights import describe_init
from nanoray.errors import ConfigError
from nanoray.models.build import build_model
from nanoray.models.gpt import GPT, ModelShape
from nanoray.tools.sample import main as sample
from nanoray.train.watch import statistics
from tests.harness import foreign
from tests.harness.commands import run
from tests.harness.foreign import POSITIONS, SIZES, VOCAB, logits_of

CLOSE = 1e-5
IDX = torch.randint(VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(1))
ACTIVATIONS: dict[str, str] = read_names(NAMES)["activations"]
SHAPE = ModelShape(2, 2, 32, POSITIONS, True, VOCAB, gelu="tanh")


@pytest.fixture(scope="module")
def gpt2() -> Any:
    """transformers' model, with the activation of GPT-2."""
    return foreign.transformers_gpt2()


@pytest.fixture(scope="module")
def gpt2_exact() -> Any:
    """The same weights with the exact GELU, as nanoGPT computes them."""
    return foreign.transformers_gpt2("gelu")


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


def refused(path: Path | str, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as error:
        begun_with(Path(path) if isinstance(path, Path) else path, **overrides)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- in ------------------------------------------------------------------------------------------

ACCEPTED: dict[str, foreign.Maker] = {
    "one file": foreign.one_file,
    "the hub's first files": foreign.hub_folder,
    "several files": foreign.several_files,
    "a stale copy in a later file": foreign.stale_copy,
    "bin": foreign.bin_file,
    "bin before torch 1.6": partial(foreign.bin_file, legacy=True),
    "several bins": foreign.bin_files,
    "a file of the folder": lambda path, model: foreign.one_file(path, model) / "model.safetensors",
    "config.json": lambda path, model: foreign.one_file(path, model) / "config.json",
    "a bin of the folder": lambda path, model: foreign.bin_file(path, model) / "pytorch_model.bin",
}
ACCEPTED_EXACT: dict[str, foreign.Maker] = {
    "nanoGPT": lambda path, model: foreign.nanogpt_checkpoint(path / "x.pt", model),
    "nanoGPT's folder": lambda path, model: (
        foreign.nanogpt_checkpoint(path / "ckpt.pt", model).parent
    ),
    "nanoGPT compiled": partial(
        lambda path, model, **how: foreign.nanogpt_checkpoint(path / "c.pt", model, **how),
        compiled=True,
    ),
    "the first nanoGPT": partial(
        lambda path, model, **how: foreign.nanogpt_checkpoint(path / "c.pt", model, **how),
        first=True,
    ),
    "transformers with gelu": foreign.one_file,
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_logits_are_those_of_transformers(kind: str, gpt2: Any, tmp_path: Path) -> None:
    ours = begun_with(ACCEPTED[kind](tmp_path / "gpt2", gpt2))
    assert ours.shape == SHAPE
    torch.testing.assert_close(logits_of(ours, IDX), logits_of(gpt2, IDX), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("kind", ACCEPTED_EXACT)
def test_logits_of_an_exact_gelu_are_those_of_transformers(
    kind: str, gpt2_exact: Any, tmp_path: Path
) -> None:
    ours = begun_with(ACCEPTED_EXACT[kind](tmp_path / "w", gpt2_exact))
    assert ours.shape.gelu == "exact"
    torch.testing.assert_close(logits_of(ours, IDX), logits_of(gpt2_exact, IDX), atol=CLOSE, rtol=0)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "AveragedModel": AveragedModel,
    "DataParallel": nn.DataParallel,
    "compiled": torch.compile,
    "all of them": lambda model: nn.DataParallel(torch.compile(AveragedModel(model))),
    "a class's own attribute": lambda model: nn.ModuleDict(
        {"model": nn.ModuleDict({"module": model})}
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_of_a_wrapped_model(wrapper: str, gpt2: Any, tmp_path: Path) -> None:
    """As torch's own wrappers name the tensors in their state_dict."""
    foreign.write_config(tmp_path, gpt2)
    wrapped = WRAPPED[wrapper](deepcopy(gpt2))
    tensors = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    assert not any(name.startswith("transformer.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = begun_with(tmp_path)
    torch.testing.assert_close(logits_of(ours, IDX), logits_of(gpt2, IDX), atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    ("before", "in_layers", "text"),
    [
        ("module.", "", "names without module."),
        ("_orig_mod.module.model.", "", "names without _orig_mod. and module. and model."),
        ("", "_checkpoint_wrapped_module.", "names without _checkpoint_wrapped_module."),
        (
            "_fsdp_wrapped_module.",
            "_orig_mod._fsdp_wrapped_module.",
            "_fsdp_wrapped_module. and _or",
        ),
    ],
)
def test_prefixes_in_any_nesting_are_named(
    before: str, in_layers: str, text: str, gpt2: Any, tmp_path: Path
) -> None:
    foreign.write_config(tmp_path, gpt2)
    tensors = {}
    for name, tensor in foreign.tensors_of(gpt2).items():
        tensors[before + re.sub(r"(\.h\.\d+\.)", rf"\1{in_layers}", name)] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = begun_with(tmp_path)
    torch.testing.assert_close(logits_of(ours, IDX), logits_of(gpt2, IDX), atol=CLOSE, rtol=0)
    assert text in note_on(tmp_path)


def test_either_name_of_the_tied_embedding_will_do(gpt2: Any, tmp_path: Path) -> None:
    """safetensors' save_model keeps one of the two, here that of the output layer."""
    foreign.write_config(tmp_path, gpt2)
    save_model(gpt2, str(tmp_path / "model.safetensors"))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in names
    assert "transformer.wte.weight" not in names
    ours = begun_with(tmp_path)
    torch.testing.assert_close(logits_of(ours, IDX), logits_of(gpt2, IDX), atol=CLOSE, rtol=0)
    assert "wte.weight from lm_head.weight, which is tied to it" in note_on(tmp_path)
    # Not of a model that does not tie them
    foreign.write_config(tmp_path, gpt2, tie_word_embeddings=False)
    assert "has tie_word_embeddings False" in refused(tmp_path)
    # A plain file needs no words.
    plain = foreign.one_file(tmp_path / "plain", gpt2)
    assert "names without" not in note_on(plain)
    assert "which is tied" not in note_on(plain)


def note_on(path: Path) -> str:
    """Return the line on the weights at the start of a run."""
    config = load_config(overrides={"init_from": str(path)})
    (line,) = describe_init(config, dataset_of(VOCAB, foreign.BYTES))
    return line


def test_the_form_of_gelu_matters(gpt2: Any, gpt2_exact: Any) -> None:
    """Else the tests above would pass with either form."""
    apart = (logits_of(gpt2, IDX) - logits_of(gpt2_exact, IDX)).abs().max()
    assert apart > 10 * CLOSE


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation_has_the_form_that_the_table_says(activation: str) -> None:
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-4, 4, 101)
    form = {"exact": "none", "tanh": "tanh"}[ACTIVATIONS[activation]]
    expected = torch.nn.functional.gelu(x, approximate=form)
    torch.testing.assert_close(activations.ACT2FN[activation](x), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_head": 4}, "has n_head 2, and here n_head = 4"),
        ({"gelu": "exact"}, "has gelu tanh, and"),
    ],
)
def test_equal_shapes_of_another_model_are_refused(
    changes: dict[str, Any], text: str, gpt2: Any, tmp_path: Path
) -> None:
    """A configuration made in Python has not been compared with the weights before."""
    folder = foreign.one_file(tmp_path / "w", gpt2)
    with pytest.raises(ConfigError) as error:
        load_weights(GPT(replace(SHAPE, **changes)), find(str(folder)))
    assert text in str(error.value)


def test_fewer_positions_are_the_first_ones(gpt2: Any, tmp_path: Path) -> None:
    ours = begun_with(foreign.one_file(tmp_path / "w", gpt2), block_size="10")
    assert ours.shape.block_size == 10
    short = IDX[:, :10]
    torch.testing.assert_close(logits_of(ours, short), logits_of(gpt2, short), atol=CLOSE, rtol=0)


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    """Rows that are no tokens are zeros, and get no probability; logits of the others are equal."""
    theirs = foreign.transformers_gpt2(vocab_size=250)
    ours = begun_with(foreign.one_file(tmp_path / "w", theirs), vocab_size=250)
    assert ours.tok_emb.weight.shape == (256, 32)
    assert torch.equal(ours.tok_emb.weight[250:], torch.zeros(6, 32))
    idx = IDX % 250
    assert logits_of(ours, idx).shape == (3, 250)
    torch.testing.assert_close(logits_of(ours, idx), logits_of(theirs, idx), atol=CLOSE, rtol=0)


def test_sixteen_bits_are_widened(gpt2: Any, tmp_path: Path) -> None:
    folder = foreign.one_file(tmp_path / "w", gpt2)
    tensors = load_file(folder / "model.safetensors")
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    ours = begun_with(folder)
    assert ours.tok_emb.weight.dtype == torch.float32
    assert torch.equal(ours.tok_emb.weight, tensors["transformer.wte.weight"].bfloat16().float())


def test_the_driver_needs_no_torch(gpt2: Any, tmp_path: Path, forked: dict[str, str]) -> None:
    """Every kind of source is described by a process without torch; a file of torch.save by a child's,
    which is forked.
    """
    paths = [
        foreign.several_files(tmp_path / "a", gpt2),
        foreign.bin_file(tmp_path / "b", gpt2),
        foreign.bin_file(tmp_path / "c", gpt2, legacy=True),
        foreign.nanogpt_checkpoint(tmp_path / "d.pt", gpt2),
        foreign.own_checkpoint(tmp_path / "e" / "checkpoints", SHAPE),
        exported(tmp_path, foreign.own_checkpoint(tmp_path / "f" / "checkpoints", SHAPE)),
    ]
    program = (
        "import os, sys; sys.modules['torch'] = None; sys.executable = os.environ['PYTHON']\n"
        "from nanoray.config import load_config\n"
        "for path in sys.argv[1:]:\n"
        "    print(load_config(overrides={'init_from': path}).n_embd)\n"
    )
    command = [sys.executable, "-c", program, *map(str, paths)]
    env = os.environ | forked
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["32"] * len(paths), done.stderr


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


def other_names(model: Any, folder: Path) -> Path:
    foreign.write_config(folder, model)
    tensors = {f"layer.{name}": tensor for name, tensor in foreign.tensors_of(model).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def cut_off(model: Any, folder: Path) -> Path:
    path = foreign.one_file(folder, model) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def pointer(model: Any, folder: Path) -> Path:
    path = foreign.one_file(folder, model) / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    return folder


def without_shard(model: Any, folder: Path) -> Path:
    max(foreign.several_files(folder, model).glob("model-*")).unlink()
    return folder


def bare(model: Any, folder: Path) -> Path:
    folder.mkdir()
    save_file(foreign.tensors_of(model), folder / "x.safetensors")
    return folder / "x.safetensors"


def state_dict_alone(model: Any, folder: Path) -> Path:
    folder.mkdir()
    torch.save(foreign.tensors_of(model), folder / "x.pt")
    return folder / "x.pt"


def text_file(model: Any, folder: Path) -> Path:
    folder.mkdir()
    (folder / "x.pt").write_text("no weights")
    return folder / "x.pt"


def unfinished_run(model: Any, folder: Path) -> Path:
    (folder / "checkpoints" / "step_00000005").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return folder


def of_images(model: Any, folder: Path) -> Path:
    step = foreign.own_checkpoint(folder / "checkpoints", SHAPE)
    state = json.loads((step / "state.json").read_text())
    state["meta"]["dataset"]["kind"] = "images"
    (step / "state.json").write_text(json.dumps(state))
    return folder


C = SIZES["n_embd"]
REFUSED: dict[str, tuple[Any, str]] = {
    "llama": (partial(changed, model_type="llama"), "has model_type llama, and nanoray's GPT is a"),
    "relu": (partial(changed, activation_function="relu"), "has activation_function relu, and"),
    "a narrow MLP": (partial(changed, n_inner=5 * C), f"has n_inner {5 * C}, and nanoray's GPT"),
    "another epsilon": (partial(changed, layer_norm_epsilon=1e-6), "has layer_norm_epsilon 1e-06"),
    "scaled by layer": (
        partial(changed, scale_attn_by_inverse_layer_idx=True),
        "has scale_attn_by_inverse_layer_idx True, and nanoray's GPT computes False",
    ),
    "cross attention": (partial(changed, add_cross_attention=True), "has add_cross_attention True"),
    "untied by its word": (partial(changed, tie_word_embeddings=False), "tie_word_embeddings"),
    "untied by its weights": (
        partial(with_tensors, lm_head__weight=torch.zeros(VOCAB, C)),
        "has an output layer that is not its embedding",
    ),
    "sizes of another": (
        partial(changed, n_embd=64),
        "has transformer.wte.weight of shape [256, 32], and",
    ),
    "a size that is none": (partial(changed, n_layer="two"), "n_layer 'two', which is no size"),
    "fewer layers": (partial(changed, n_layer=1), "has 12 tensor(s) that a GPT-2 has not"),
    "more layers": (partial(changed, n_layer=3), "has no tensor h.2.ln_1.weight; copy it again"),
    "a classifier": (
        partial(with_tensors, score__weight=torch.zeros(2, C)),
        "has 1 tensor(s) that a GPT-2 has not, such as score.weight",
    ),
    "a tensor less": (
        partial(with_tensors, transformer__ln_f__bias=None),
        "has no tensor ln_f.bias; copy it again",
    ),
    "not finite": (
        partial(with_tensors, transformer__ln_f__bias=torch.full((C,), torch.nan)),
        "norm.bias of",
    ),
    "quantized": (
        partial(with_tensors, transformer__ln_f__bias=torch.ones(C, dtype=torch.int8)),
        "has the type int8; give weights that are not quantized",
    ),
    "a fork of nanoGPT": (
        lambda model, folder: foreign.nanogpt_checkpoint(folder / "c.pt", model, use_relu=True),
        "has model_args use_relu = True, which nanoGPT has not, so its model may compute another",
    ),
    "two models in one file": (
        partial(with_tensors, module__transformer__ln_f__bias=torch.zeros(C)),
        "has module.transformer.ln_f.bias and transformer.ln_f.bias, which may both be ln_f.bias",
    ),
    "a part of another model": (
        partial(
            with_tensors,
            transformer__ln_f__bias=None,
            module__transformer__ln_f__bias=torch.zeros(C),
        ),
        "has names with module. and with nothing before them; save the tensors of one model",
    ),
    "an average beside the model": (
        partial(with_tensors, ema__module__transformer__ln_f__bias=torch.zeros(C)),
        "that a GPT-2 has not, such as ema.module.transformer.ln_f.bias",
    ),
    "names of another program": (
        other_names,
        "others, such as layer.transformer.h.0.attn.c_attn.bias, layer.transformer.h.0.attn",
    ),
    "cut off": (cut_off, "bytes instead of"),
    "a pointer": (pointer, "is a pointer of Git LFS and not the weights; run `git lfs pull` there"),
    "a shard less": (without_shard, "which its index lists; download the folder again"),
    "tensors alone": (bare, "does not say what its model is: no model_shape in its header"),
    "a state_dict alone": (state_dict_alone, "has no model_args, which say n_head; give nanoGPT's"),
    "no weights": (text_file, "is no file of weights that torch.save wrote"),
    "a run without checkpoint": (unfinished_run, "has no complete checkpoint; give another run"),
    "a resnet": (of_images, "is a checkpoint of another model than a gpt"),
    "an empty folder": (
        lambda model, folder: folder.mkdir() or folder,
        "contains no weights: looked",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(kind: str, gpt2: Any, tmp_path: Path) -> None:
    make, text = REFUSED[kind]
    message = refused(make(gpt2, tmp_path / "w"))
    assert text in message
    assert str(tmp_path / "w") in message
    assert ";" in message, "without a remedy"


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("gpt2", "downloads nothing; where there is internet, `hf download openai-community/gpt2 "),
        ("gpt2-xl", "`hf download openai-community/gpt2-xl --local-dir gpt2-xl`"),
        ("openai-community/gpt2", "`hf download openai-community/gpt2 --local-dir gpt2`"),
        ("scratch", "drop --init_from: without it the weights are random"),
        ("resume", "a run continues with --resume auto"),
        ("out/ckpt.pt", "there is no such file or folder; check the path"),
        ("/nowhere/gpt2", "there is no such file or folder; check the path"),
    ],
)
def test_a_word_that_is_no_path(word: str, text: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(word)
    assert message.startswith(f"init_from = {word}")
    assert text in message
    assert "did you mean" not in message


def test_hugging_faces_cache(tmp_path: Path, monkeypatch: Any) -> None:
    """Files of a cache are links; a name that is no path is answered with the folder in the cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "downloads nothing" in refused("gpt2")
    folder = tmp_path / "hub" / "models--openai-community--gpt2"
    blobs = foreign.written_gpt2(folder / "blobs")
    for commit in ("aaa", "bbb"):
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in blobs.iterdir():
            (snapshot / file.name).symlink_to(file)
    assert refused("gpt2").endswith(f"cache has it; give --init_from {folder}")
    assert "has 2 versions in snapshots/; give one of them" in refused(folder)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb")
    assert find(str(folder)).path == folder / "snapshots" / "bbb"
    assert begun_with(folder).shape == SHAPE


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
    assert "it refers to posix.mkdir, which is code" in refused(path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Code(trap)))
    assert trap.exists(), "the trap works"


_OUTLINE = Path(outlines.__file__).with_name("torch_outline.py")


def outlined(path: Path, more: str = "") -> list[str]:
    """Return what the reader of a file prints, and after it the most memory that it took, in KiB."""
    program = (
        "import re, runpy\n"
        f"main = runpy.run_path({str(_OUTLINE)!r})['main']\n{more}\n"
        f"main({[str(path)]!r})\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    script = path.with_suffix(".py")
    script.write_text(program)
    return run(str(script)).stdout.splitlines()


def test_the_reader_of_a_checkpoint_reads_no_numbers_and_has_a_limit(tmp_path: Path) -> None:
    peaks = []
    for name, count in (("small.pt", 1), ("large.pt", 64 << 20)):
        torch.save(
            {"model": {"w": torch.zeros(count)}, "model_args": {"n_head": 2}}, tmp_path / name
        )
        text, peak = outlined(tmp_path / name)
        assert json.loads(text) == {"tensors": {"w": [count]}, "model_args": {"n_head": 2}}
        peaks.append(int(peak))
    small, large = peaks
    assert large - small < 64 << 10, "a quarter of the file's 256 MiB"

    # With less than torch itself needs
    limited = outlined(tmp_path / "small.pt", more="main.__globals__['_MEMORY'] = 1 << 20")
    assert not any("tensors" in line for line in limited)


# ---- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--n_layer=3"], "n_layer = 3, but the weights of init_from = "),
        (["--n_head", "4"], "have n_head 2; drop n_head: it comes from the weights"),
        (["--n_embd=64"], "have n_embd 32; drop n_embd"),
        (["--bias=false"], "bias = False, but the weights"),
        (["--gelu=exact"], "have gelu tanh; drop gelu"),
        (["--positions=rotary"], "have positions learned; drop positions"),
        (["--experts=4"], "have experts 0; drop experts"),
        (["--block_size=25"], "have 24 positions; use 24 or less"),
        (["--model=resnet"], "would be ignored: model = resnet has no such option"),
    ],
)
def test_a_key_that_contradicts_the_weights(
    flags: list[str], text: str, gpt2: Any, tmp_path: Path
) -> None:
    folder = foreign.one_file(tmp_path / "w", gpt2)
    with pytest.raises(ConfigError) as error:
        parse_args([f"--init_from={folder}", *flags], "nanoray train", "")
    assert text in str(error.value)
    # The same in a file
    file = tmp_path / "own.yaml"
    key, _, value = flags[0].removeprefix("--").partition("=")
    value = value or flags[1]
    file.write_text(f"init_from: {folder}\n{key}: {value}\n")
    with pytest.raises(ConfigError) as error:
        load_config(str(file), "tiny")
    assert text in str(error.value)


def test_what_agrees_with_the_weights_may_be_given(gpt2: Any, tmp_path: Path) -> None:
    folder = foreign.one_file(tmp_path / "w", gpt2)
    flags = ["--n_layer=2", "--bias", "--gelu=tanh", "--block_size=8", "--dropout=0.1"]
    config = parse_args([f"--init_from={folder}", *flags], "nanoray train", "").config
    assert (config.n_layer, config.bias, config.block_size) == (2, True, 8)


@pytest.mark.parametrize("preset", ["moe-tiny", "shakespeare-fast", "gpt2-124m"])
def test_weights_replace_the_sizes_of_a_preset(preset: str, gpt2: Any, tmp_path: Path) -> None:
    folder = foreign.one_file(tmp_path / "w", gpt2)
    config = load_config(None, preset, {"init_from": str(folder)})
    shape = ModelShape.of(config, VOCAB)
    assert shape == SHAPE
    assert config.expected_val_loss == {}


def test_config_json_is_read_again(gpt2: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """From another folder, too: the path in it is whole."""
    foreign.one_file(tmp_path / "w", gpt2)
    monkeypatch.chdir(tmp_path)
    config = load_config(overrides={"init_from": "w"})
    assert config.init_from == str(tmp_path / "w")
    (tmp_path / "config.json").write_text(config.to_json())
    monkeypatch.chdir("/")
    assert load_config(str(tmp_path / "config.json")) == config


@pytest.mark.parametrize("layer", [[], ["--preset=tiny"]], ids=["flags alone", "with a preset"])
def test_a_resumed_run_has_its_own_weights(
    layer: list[str], gpt2: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """The same command with --resume works, without the file; another init_from is refused."""
    monkeypatch.chdir(tmp_path)
    folder = foreign.one_file(tmp_path / "w", gpt2)
    flags = [*layer, "--init_from=w", "--block_size=12"]
    before = parse_args(flags, "nanoray train", "").config
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.json").write_text(before.to_json())
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()

    again = parse_args([*flags, f"--resume={run}"], "nanoray train", "").config
    assert ModelShape.of(again, VOCAB) == ModelShape.of(before, VOCAB)
    assert again.init_from == before.init_from == str(folder)
    for other, text in (
        ("--init_from=v", f"has its own weights and began with those of {folder}; drop init_from"),
        ("--init_from=scratch", "has its own weights"),
    ):
        with pytest.raises(ConfigError) as error:
            parse_args([*layer, other, f"--resume={run}"], "nanoray train", "")
        assert text in str(error.value)

    # A run that began with random weights
    (run / "config.json").write_text(load_config(preset="tiny").to_json())
    with pytest.raises(ConfigError, match="has its own weights and began with random ones; drop"):
        parse_args([*layer, "--init_from=v", f"--resume={run}"], "nanoray train", "")


def dataset_of(vocab_size: int, tokenizer: dict[str, Any]) -> DatasetInfo:
    return DatasetInfo("words", "note", Path("/"), "uint16", vocab_size, 99, 99, "", "", tokenizer)


CHARS = {"kind": "char", "chars": "abc"}


@pytest.mark.parametrize(
    ("vocab_size", "tokenizer", "text"),
    [
        (65, {"kind": "char", "chars": "x" * 65}, "has 65 (char with 65 characters): the ids mean"),
        (50257, {"kind": "gpt2"}, "has a vocabulary of 256 tokens, and words has 50257 (gpt2)"),
        (250, {"kind": "char", "chars": "x" * 250}, "has 250 (char with 250 characters)"),
        (256, {"kind": "byte"}, ""),
        (250, {"kind": "ids", "vocab_size": 250}, ""),  # 256 is 250 padded
        (190, {"kind": "ids", "vocab_size": 190}, "has 190 (ids)"),
    ],
)
def test_the_tokens_must_be_those_of_the_weights(
    vocab_size: int, tokenizer: dict[str, Any], text: str, gpt2: Any, tmp_path: Path
) -> None:
    folder = foreign.one_file(tmp_path / "w", gpt2)
    config = load_config(overrides={"init_from": str(folder)})
    dataset = dataset_of(vocab_size, tokenizer)
    if not text:
        (line,) = describe_init(config, dataset)
        assert line.startswith(
            f"init   Hugging Face GPT-2 in {folder}: 2 layers, 2 heads, width 32"
        )
        assert ("the last 6 get no probability" in line) == (vocab_size == 250)
        return
    with pytest.raises(ConfigError) as error:
        describe_init(config, dataset)
    assert text in str(error.value)


def test_other_characters_of_the_same_number(tmp_path: Path) -> None:
    shape = ModelShape(2, 2, 32, POSITIONS, True, 3)
    step = foreign.own_checkpoint(tmp_path / "checkpoints", shape, CHARS)
    config = load_config(overrides={"init_from": str(step), "tokenizer": "char"})
    assert describe_init(config, dataset_of(3, CHARS))
    with pytest.raises(ConfigError, match="the ids mean other texts; use data prepared with the"):
        describe_init(config, dataset_of(3, {"kind": "char", "chars": "abd"}))
    with pytest.raises(ConfigError, match="tokens of byte: the ids mean other texts; use --token"):
        describe_init(config, dataset_of(256, {"kind": "byte"}))


def test_text_gets_the_tokens_of_the_weights(tmp_path: Path) -> None:
    """Without --tokenizer; a folder of tokens has its own, and --tokenizer wins."""
    step = foreign.own_checkpoint(tmp_path / "checkpoints", SHAPE)
    for given, kind in (
        ({}, "byte"),
        ({"tokenizer": "char"}, "char"),
        ({"dataset": str(tmp_path)}, "auto"),
    ):
        config = load_config(None, "tiny", {"init_from": str(step), **given})
        assert config.tokenizer == kind, given


# ---- text ----------------------------------------------------------------------------------------


def test_samples_of_transformers_weights_are_its_own(
    gpt2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The likeliest tokens; without a known tokenizer, prompt and text are ids."""
    folder = foreign.one_file(tmp_path / "w", gpt2)
    flags = ["--temperature", "0", "--max_new_tokens", "8", "--device", "cpu"]
    assert sample([str(folder), "--prompt", "5 7 11", *flags]) == 0
    captured = capsys.readouterr()
    prompt = torch.tensor([[5, 7, 11]])
    expected = gpt2.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert captured.out.split() == [str(i) for i in expected[0].tolist()]
    assert f"{folder} · Hugging Face GPT-2" in captured.err


def test_samples_of_an_export_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ModelShape(2, 2, 32, POSITIONS, True, VOCAB, 2, 1, 8, rotary=True)
    step = foreign.own_checkpoint(tmp_path / "checkpoints", shape)
    out = exported(tmp_path, step)
    capsys.readouterr()
    flags = ["--prompt", "To be", "--temperature", "0", "--device", "cpu"]
    assert sample([str(out), *flags]) == 0
    from_export = capsys.readouterr().out
    assert from_export.startswith("To be")
    assert sample([str(tmp_path / "nowhere.pt")]) != 0


# ---- out -----------------------------------------------------------------------------------------


def exported(tmp_path: Path, step: Path, kind: str = "safetensors") -> Path:
    name = {"huggingface": "hf", "nanogpt": "ckpt.pt", "safetensors": "m.safetensors"}[kind]
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


@pytest.mark.parametrize("kind", ["huggingface", "nanogpt", "safetensors"])
def test_out_and_in_again_changes_no_bit(kind: str, tmp_path: Path) -> None:
    shape = ModelShape(2, 2, 32, POSITIONS, True, 250)
    step = foreign.own_checkpoint(tmp_path / "checkpoints", shape)
    ours = begun_with(exported(tmp_path, step, kind), vocab_size=250)
    before = load(step).model
    assert ours.shape == shape
    for name, tensor in ours.state_dict().items():
        rows = 250 if name in ("tok_emb.weight", "lm_head.weight") else len(tensor)
        assert torch.equal(tensor[:rows], before[name][:rows]), name


def test_in_and_out_again_changes_no_bit(gpt2: Any, tmp_path: Path) -> None:
    folder = foreign.one_file(tmp_path / "w", gpt2)
    ours = begun_with(folder)
    step = foreign.own_checkpoint(tmp_path / "checkpoints", SHAPE)
    state = load(step)
    state.model = dict(ours.state_dict())
    step = files.save(tmp_path / "again", state, keep=1)
    out = exported(tmp_path, step, "huggingface")
    before = load_file(folder / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_and_a_run_are_sources(tmp_path: Path) -> None:
    """With experts and rotary positions, which only nanoray's own formats can express."""
    shape = ModelShape(2, 2, 32, POSITIONS, False, VOCAB, 4, 2, 16, 1, rotary=True, gelu="tanh")
    run = tmp_path / "run"
    step = foreign.own_checkpoint(run / "checkpoints", shape)
    (run / "run.json").write_text("{}")
    before = load(step).model
    for path in (step, run, step / "model.safetensors", exported(tmp_path, step)):
        ours = begun_with(path)
        assert ours.shape == shape
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    # A longer context needs no weights
    assert begun_with(run, block_size=48).shape.block_size == 48


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused(file: str, tmp_path: Path) -> None:
    step = foreign.own_checkpoint(tmp_path / "checkpoints", SHAPE)
    data = (step / file).read_bytes()
    (step / file).write_bytes(data.replace(b"e-05", b"e-04") if b"e-05" in data else data[:-1])
    message = refused(step)
    assert "damaged" in message or "is not JSON" in message


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("huggingface", {"rotary": True}, "positions = rotary: GPT-2 has nothing like it"),
        ("nanogpt", {"rotary": True}, "positions = rotary: nanoGPT has nothing like it"),
        ("nanogpt", {"gelu": "tanh"}, "gelu = tanh: nanoGPT has nothing like it"),
        (
            "huggingface",
            {"experts": 2, "experts_per_token": 1, "expert_hidden": 8},
            "experts = 2: GPT-2 has nothing like it",
        ),
    ],
)
def test_what_a_format_cannot_express_is_refused(
    kind: str,
    changes: dict[str, Any],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ModelShape(2, 2, 32, POSITIONS, True, VOCAB, **changes)
    step = foreign.own_checkpoint(tmp_path / "checkpoints", shape)
    out = tmp_path / "out"
    assert main(["export", str(step), "--format", kind, "--out", str(out)]) == 2
    assert text in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("huggingface", "x.pt"), ("nanogpt", "x.safetensors"), ("safetensors", "x.pth")],
)
def test_a_name_of_another_format_is_refused(
    kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "nowhere", "--format", kind, "--out", name]) == 2
    assert f"--format {kind} does not write {name}" in capsys.readouterr().err


# ---- the form of GELU, elsewhere -----------------------------------------------------------------


def test_every_gelu_of_a_model_has_the_form_of_its_shape(monkeypatch: Any) -> None:
    """Experts, shared experts and the MLP: all calls of one pass."""
    forms = []
    gelu = torch.nn.functional.gelu

    def listen(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        forms.append(approximate)
        return gelu(x, approximate=approximate)

    monkeypatch.setattr(torch.nn.functional, "gelu", listen)
    for experts, calls in ((0, 2), (4, 2 * (4 + 1))):
        sizes = {"experts": experts, "experts_per_token": 2, "expert_hidden": 8}
        shape = ModelShape(
            2, 2, 32, 8, True, VOCAB, **sizes, shared_experts=int(experts > 0), gelu="tanh"
        )
        forms.clear()
        GPT(shape)(IDX[:, :8], IDX[:, :8])
        assert forms == ["tanh"] * calls


def test_dead_units_are_those_of_the_form() -> None:
    """A limit between the two forms, at an input at which the tanh form is smaller."""
    x = torch.full((1, 2, 3), -4.5)
    exact, tanh = (torch.nn.functional.gelu(x[0, 0, 0], approximate=a) for a in ("none", "tanh"))
    assert exact.abs() > tanh.abs()
    limit = float((exact.abs() + tanh.abs()) / 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "DEAD", limit)
        assert statistics.dead_share(x, "none") == 0.0
        assert statistics.dead_share(x, "tanh") == 100.0


def test_the_form_belongs_to_the_shape() -> None:
    """Older checkpoints, which do not name it, are exact ones."""
    exact = ModelShape.of(load_config(preset="tiny"), 65)
    assert "gelu" not in exact.to_dict()
    tanh = ModelShape.of(load_config(None, "tiny", {"gelu": "tanh"}), 65)
    assert tanh.to_dict()["gelu"] == "tanh"
    assert ModelShape(**tanh.to_dict()) == tanh
    with pytest.raises(ConfigError, match="gelu = quick is none of exact, tanh; use one"):
        ModelShape(**{**exact.to_dict(), "gelu": "quick"})
