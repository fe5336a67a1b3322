"""The dump of a model: its figures against formulas, a real batch and a real run's pieces; each
check with its bug.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.files import load, open_checkpoint, save
from nanoray.cli import parse_args
from nanoray.config import make_config
from nanoray.errors import ConfigError
from nanoray.forecast.owners import MOST_RANKS
from nanoray.mesh.layout import Layout
from nanoray.models.build import build_model
from nanoray.models.costs import activation_memory, count_parameters, flops_per_token
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.resnet_costs import activation_memory as resnet_memory
from nanoray.models.resnet_costs import flops_per_image
from nanoray.tools.inspect.__main__ import main
from nanoray.tools.inspect.layers import layers_of, totals
from nanoray.tools.inspect.subject import Subject, find_subject
from nanoray.tools.inspect.text import figures_of
from nanoray.tools.inspect.tree import dump, format_ranks
from nanoray.tools.inspect.verify import verify, verify_model
from tests.harness.browser import in_chromium, require_width
from tests.harness.ranks import make_spec, run_ranks

OWN = "examples/own_model.py"
RESNET = [
    "--model",
    "resnet",
    "--resnet_depth",
    "8",
    "--micro_batch_size",
    "2",
    "--global_batch_size",
    "2",
]


def subject_of(*flags: str, target: str = "tiny", ranks: int | None = None) -> Subject:
    return find_subject(target, [*flags], ranks, "main")


def modules(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in told["modules"]}


def check(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in found["checks"] if row["check"] == name)


# Figures.


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--precision=bf16", "--attention=flash", "--bias=true"),
        ("--activation_checkpointing=block",),
        ("--experts=4", "--experts_per_token=2", "--shared_experts=1", "--dp_mode=zero1"),
    ],
)
def test_layers_add_up_to_the_whole_formulas(flags: tuple[str, ...]) -> None:
    """The FLOPs are MFU's, the bytes those that a dry run prints, with the part of the logits that
    waits.
    """
    subject = subject_of(*flags)
    shape, config, micro = subject.shape, subject.config, subject.batch.micro
    assert isinstance(shape, ModelShape)
    layers = layers_of(subject, [])
    assert [layer.name for layer in layers] == [
        "embedding",
        "blocks.0",
        "blocks.1",
        "norm, head, loss",
    ]
    sums = totals(layers)
    tokens, how = micro * shape.block_size, config.activation_checkpointing
    assert sums["parameters"] == count_parameters(shape)
    again = layers[1].forward_flops if how == "block" else 0
    assert (
        sums["forward_flops"] + sums["backward_flops"]
        == tokens * flops_per_token(shape) + 2 * again
    )  # type: ignore[operator]
    parts = activation_memory(shape, micro, config.precision, how)
    kept = parts["activations"] + parts["copies"] + 4 * tokens * shape.logit_columns
    # A block that is computed again is there for a moment, and waits for nothing
    if how == "block":
        assert sums["kept"] < kept  # type: ignore[operator]
    else:
        assert sums["kept"] == kept
    assert (sums["weights"], sums["optimizer"]) == (
        4 * count_parameters(shape),
        8 * count_parameters(shape),
    )


def test_layers_of_a_resnet_add_up() -> None:
    subject = subject_of(*RESNET)
    sums = totals(layers_of(subject, []))
    assert sums["forward_flops"] + sums["backward_flops"] == 2 * flops_per_image(subject.shape)  # type: ignore
    assert sums["kept"] == resnet_memory(subject.shape, 2, "fp32")["activations"]  # type: ignore[arg-type]


def test_the_tree_of_a_gpt() -> None:
    told = dump(subject_of())
    rows = modules(told)
    qkv, norm2 = rows["blocks.1.attn.qkv"], rows["blocks.1.norm2"]
    assert (qkv["inputs"], qkv["outputs"]) == (
        [((12, 32, 32), "float32")],
        [((12, 32, 96), "float32")],
    )
    tokens = 12 * 32
    assert (qkv["forward_flops"], qkv["backward_flops"]) == (
        2 * 32 * 96 * tokens,
        4 * 32 * 96 * tokens,
    )
    assert norm2["reads"] == ["blocks.0", "blocks.1.attn"], (
        "the residual stream, and what attention adds"
    )
    assert rows["blocks.1.attn.proj"]["reads"] == ["blocks.1.attn.qkv"], (
        "through attention, which is no module"
    )
    assert rows["dropout"]["reads"] == ["tok_emb", "pos_emb"]
    assert (told["loss_reads"], told["unused"]) == (["lm_head"], [])
    tied = next(row for row in told["tensors"] if row["name"] == "lm_head.weight")
    assert tied["tied_to"] == "tok_emb.weight"
    block = 2 * 12 * 32**2 + 4 * 32 * 32  # its matrices, and attention to 32 positions
    assert sum(row["forward_flops"] for row in told["modules"]) == tokens * (
        2 * block + 2 * 32 * 65
    )


def test_owners_by_axis() -> None:
    """Rank = (p·dp + d)·tp + t; with tp the middle dimension of (3, C, C) is cut, and a stage has
    one block.
    """
    told = dump(subject_of("--tp=2", "--pp=2", "--dp_mode=zero2", "--grad_accum_steps=2", ranks=8))
    rows = {row["name"]: row for row in told["tensors"]}
    qkv, emb = rows["blocks.1.attn.qkv.weight"], rows["tok_emb.weight"]
    assert qkv["owner"].startswith("pp: stage 1; tp: 1/2 along dim 1 of 3×32×32; dp zero2: ")
    assert [piece["ranks"] for piece in qkv["held"]] == [[4, 6], [5, 7]]
    assert qkv["held"][1]["boxes"] == [[[0, 3], [16, 32], [0, 32]]]
    assert emb["owner"].startswith("pp: stages 0 and 1; tp: 1/2 along dim 0 of 128×32")
    assert sum(len(piece["ranks"]) for piece in emb["updated"]) >= 4, "each stage updates its copy"
    assert rows["norm.weight"]["owner"].startswith("pp: stage 1; tp: whole on each")
    assert rows["lm_head.weight"]["tied_to"] == "tok_emb.weight"


def test_groups_of_replicas_hold_the_same() -> None:
    """Of dp 4 in two groups, ranks 0 and 2 hold and update the same, and so do 1 and 3."""
    told = dump(subject_of("--dp_mode=fsdp", "--replicas=2", ranks=4))
    assert told["layout"]["replicas"] == 2
    assert "4 = dp 4 (2 replicas), fsdp" in figures_of(told)["ranks"]
    rows = {row["name"]: row for row in told["tensors"]}
    qkv = rows["blocks.1.attn.qkv.weight"]
    assert "over the 2 ranks of a group, the same in each of 2 groups" in qkv["owner"]
    for pieces in (qkv["held"], qkv["updated"]):
        assert [piece["ranks"] for piece in pieces] == [[0, 2], [1, 3]]

    assert dump(subject_of("--dp_mode=zero1", "--replicas=2"))["ranks"] == 4, "the least"

    # A rank's share is the one that it has in a run of one group alone.
    alone = dump(subject_of("--dp_mode=fsdp", ranks=2))
    assert [layer["weights"] for layer in told["layers"]] == [
        layer["weights"] for layer in alone["layers"]
    ]
    sliced = dump(subject_of("--dp_mode=zero1", "--replicas=2", ranks=4))
    emb = next(row for row in sliced["tensors"] if row["name"] == "tok_emb.weight")
    assert {tuple(piece["ranks"]) for piece in emb["updated"]} <= {(0, 2), (1, 3)}


def test_ranks_as_text() -> None:
    assert format_ranks([9, 0, 1, 2, 8, 5]) == "0-2 5 8-9"


# One batch.


def verified(
    subject: Subject, model: nn.Module, told: dict[str, Any] | None = None
) -> dict[str, Any]:
    x, _ = subject.example or (None, None)
    assert isinstance(x, Tensor)
    source = torch.Generator().manual_seed(1)
    if x.is_floating_point():
        batch = (
            torch.randn(x.shape, generator=source),
            torch.randint(10, x.shape[:1], generator=source),
        )
    else:
        batch = (
            torch.randint(65, x.shape, generator=source),
            torch.randint(65, x.shape, generator=source),
        )
    return verify_model(subject, told or dump(subject), model, *batch)


def new_model(subject: Subject) -> nn.Module:
    torch.manual_seed(1)
    return build_model(subject.config, subject.dataset.vocab_size)


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        ((), 1e-3),
        (("--precision=bf16", "--attention=flash", "--bias=true"), 0.1),
        (("--activation_checkpointing=block", "--attention=plain"), 1e-3),
        (("--positions=rotary", "--loss_chunk=32", "--optimizer=muon"), 0.03),
        (("--experts=4", "--experts_per_token=2", "--shared_experts=1"), 0.05),
        (tuple(RESNET), 0.05),
    ],
)
def test_a_batch_keeps_what_was_predicted(flags: tuple[str, ...], tolerance: float) -> None:
    subject = subject_of(*flags)
    found = verified(subject, new_model(subject))
    assert found["ok"], found["checks"]
    for row in found["layers"]:
        assert row["kept_measured"] == pytest.approx(row["kept"], rel=tolerance, abs=2048), row[
            "name"
        ]
        assert row["optimizer_measured"] == row["optimizer"], row["name"]


def test_what_selective_checkpointing_keeps_is_not_measured() -> None:
    subject = subject_of("--activation_checkpointing=selective")
    found = verified(subject, new_model(subject))
    assert found["ok"]
    assert {row["kept_measured"] for row in found["layers"]} == {None}


def test_an_untied_weight_is_found() -> None:
    subject = subject_of()
    model = new_model(subject)
    assert isinstance(model, GPT)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found = verified(subject, model)
    assert not found["ok"]
    assert check(found, "tied")["found"] == (
        "lm_head.weight is not tok_emb.weight: they are two tensors, and would drift apart"
    )
    want, have = (
        f"{count_parameters(subject.shape):,}",
        f"{count_parameters(subject.shape) + 128 * 32:,}",
    )  # type: ignore[arg-type]
    assert check(found, "parameters")["found"] == f"{have} parameters, by the formula {want}"


def test_a_parameter_without_gradient_is_found() -> None:
    subject = subject_of()
    model = new_model(subject)
    down = model.get_submodule("blocks.1.mlp.down")
    down.forward = lambda x: nn.functional.linear(x, down.weight.detach())  # type: ignore
    found = verified(subject, model)
    assert check(found, "gradients")["problems"] == ["blocks.1.mlp.down.weight has no gradient"]
    assert check(found, "called")["ok"], "it is called, and its input has a gradient"


class Bypassed(nn.Module):
    """A block whose MLP is left out, or is computed and thrown away."""

    def __init__(self, block: nn.Module, computed: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            block.norm1,
            block.attn,
            block.norm2,
            block.mlp,
        )
        self.computed = computed

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache)
        if self.computed:
            self.mlp(self.norm2(x))
        return x


@pytest.mark.parametrize("computed", [False, True])
def test_a_dead_branch_is_found(computed: bool) -> None:
    subject = subject_of()
    model = new_model(subject)
    assert isinstance(model, GPT)
    model.blocks[0] = Bypassed(model.blocks[0], computed)
    found = verified(subject, model)
    problems = check(found, "called")["problems"]
    if computed:
        assert problems == [
            f"the loss does not depend on the result of blocks.0.{name}"
            for name in ("norm2", "mlp")
        ]
    else:
        assert problems == [
            "blocks.0.norm2 (LayerNorm) is never called",
            "blocks.0.mlp (MLP) is never called",
        ]
        assert "blocks.0.norm2 inputs nothing, in the tree (" in check(found, "shapes")["found"]
    assert len(check(found, "gradients")["problems"]) == 3
    assert not found["ok"]


def test_another_connection_is_found() -> None:
    subject = subject_of()
    model = new_model(subject)
    block = model.get_submodule("blocks.1")
    block.forward = lambda x, cache=None: x + block.attn(block.norm1(x)) + block.mlp(block.norm2(x))  # type: ignore
    found = verified(subject, model)
    (problem,) = check(found, "connections")["problems"]
    assert problem == "blocks.1.norm2 reads blocks.0, in the tree blocks.0, blocks.1.attn"
    assert check(found, "shapes")["ok"]


# Runs and checkpoints.


def told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, dict[str, Any], str]:
    """Run the command, and return its exit code, its JSON, which is strict, and its text."""
    code = main([*argv, "--json", str(tmp_path / "dump.json")])
    told = json.loads((tmp_path / "dump.json").read_text(), parse_constant=no_json)
    return code, told, capsys.readouterr().out


def no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@pytest.mark.parametrize(
    "settings",
    [
        {"dp_mode": "zero1", "bucket_mb": 0.01},
        {"tp": 2},
        pytest.param({"dp_mode": "fsdp"}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "grad_accum_steps": 2}, marks=pytest.mark.full),
        pytest.param(
            {"experts": 4, "experts_per_token": 2, "ep": 2, "dp_mode": "zero2"},
            marks=pytest.mark.full,
        ),
        pytest.param({"dp_mode": "zero2", "replicas": 2}, marks=pytest.mark.full),
    ],
)
def test_owners_are_those_that_wrote_a_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    """Each rank's part of a real run's checkpoint has the boxes that the dump says, and no rank
    wrote another piece.
    """
    ranks = 2 * settings.get("replicas", 1)
    spec = make_spec(text, tmp_path / "runs", **settings)
    assert all("error" not in outcome for outcome in run_ranks(spec, ranks))
    code, told, out = told_of(tmp_path, capsys, str(spec.folder), "--verify")
    assert code == 0, out
    assert (told["ranks"], told["step"]) == (ranks, 8)
    content = open_checkpoint(Path(told["checkpoint"]))[1]
    wrote = {
        (n, rank): piece["boxes"]
        for rank, of in enumerate(content["pieces"])
        for n, piece in of.items()
    }
    said = {
        (row["name"], rank): piece["boxes"]
        for row in told["tensors"]
        for piece in row.get("updated", ())
        for rank in piece["ranks"]
    }
    assert {place: said[place] for place in wrote} == wrote
    if settings.get("dp_mode") in ("zero1", "fsdp"):
        assert said.keys() == wrote.keys()
    assert {name for name, _ in said} == {name for name, _ in wrote}


def test_a_run_and_two_of_its_checkpoints(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(text, tmp_path / "runs", checkpoint_every=4)
    assert "error" not in run_ranks(spec, 1)[0]
    old, new = (spec.checkpoints / f"step_{step:08d}" for step in (4, 8))
    code, told, out = told_of(tmp_path, capsys, str(new), "--against", str(old), "--verify")
    assert code == 0
    assert told["against"]["step"] == 4
    rows = {row["name"]: row for row in told["against"]["tensors"]}
    a, b = (load(path).model["blocks.0.mlp.up.weight"].double() for path in (new, old))
    expected = ((a - b).square().mean() / a.square().mean()).sqrt().item()
    assert rows["blocks.0.mlp.up.weight"]["relative"] == pytest.approx(expected)
    assert 0 < expected < 1
    assert f"{expected:.3g}" in out
    _, told, _ = told_of(tmp_path, capsys, str(spec.folder), "--against", str(new))
    assert all(row["equal"] for row in told["against"]["tensors"]), "the run's newest is this one"
    assert main([str(new), "--n_embd=64", "--verify"]) != 0
    assert "drop the flags that change the model" in capsys.readouterr().err
    assert main([str(spec.folder), f"--resume={old}"]) == ConfigError.exit_code, (
        "one checkpoint, not the last named"
    )
    assert (
        f"resume = {old} would be ignored: {spec.folder} names the configuration"
        in capsys.readouterr().err
    )
    state = load(new)
    state.model["blocks.0.mlp.up.weight"][0, 0] = torch.nan
    state.model["norm.weight"][0] = torch.inf
    poisoned = save(tmp_path / "poisoned" / "checkpoints", state, keep=1)
    (tmp_path / "poisoned" / "config.json").write_text((spec.folder / "config.json").read_text())
    code, told, out = told_of(tmp_path, capsys, str(poisoned), "--against", str(old), "--verify")
    assert code == 1
    assert "WRONG  the loss is nan" in out
    assert told["verify"]["loss"] is None
    rows = {row["name"]: row for row in told["against"]["tensors"]}
    for name in ("blocks.0.mlp.up.weight", "norm.weight"):
        assert (rows[name]["rms"], rows[name]["difference"], rows[name]["relative"]) == (
            None,
            None,
            None,
        )
    assert rows["blocks.1.mlp.up.weight"]["rms"] > 0


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import nanoray

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.extra = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = self.inner(x).relu()
        for layer in self.layers:
            x = x + layer(x)
        EXTRA
        return self.out(x)

def main(run):
    x = torch.randn(64, 2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn=nn.functional.cross_entropy)
    engine.fit(TensorDataset(x, (x[:, 0] > 0).long()), steps=4)

if __name__ == "__main__":
    raise SystemExit(nanoray.launch(main, {"micro_batch_size": 8, "device": "cpu"}, ray=False))
"""


def test_a_script_with_its_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text(SCRIPT.replace("EXTRA", "x = self.extra(x)"))
    flags = ("--micro_batch_size=8", "--dp_mode=zero1", "--world_size=2", "--verify")
    code, told, out = told_of(tmp_path, capsys, str(path), *flags)
    assert code == 0, out
    rows = modules(told)
    assert rows["layers.1"]["reads"] == ["inner", "layers.0"]
    assert rows["extra"]["reads"] == ["inner", "layers.0", "layers.1"]
    assert rows["out"]["outputs"] == [[[8, 4], "float32"]]
    assert [row["name"] for row in told["layers"]] == [
        "inner",
        "layers.0",
        "layers.1",
        "extra",
        "out",
        "model and loss",
    ]
    for row in told["verify"]["layers"]:
        assert row["kept"] == row["kept_measured"]
        assert row["optimizer"] == row["optimizer_measured"]
    assert "a script's own model has no formula" in out
    path.write_text(SCRIPT.replace("EXTRA", ""))
    code, told, out = told_of(tmp_path, capsys, str(path), "--micro_batch_size=8", "--verify")
    assert code == 1
    assert "WRONG  extra (Linear) is never called" in out
    assert "WRONG  extra.weight has no gradient; extra.bias has no gradient" in out


def test_a_script_has_its_folder_and_no_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python SCRIPT.py`: modules beside it are found, also in main, and inspect's arguments are
    not its own.
    """
    before, after = SCRIPT.replace("EXTRA", "x = self.extra(x)").split("def main(run):\n")
    path = tmp_path / "own.py"
    (tmp_path / "net_beside.py").write_text(before)
    (tmp_path / "rows_beside.py").write_text("rows = 64\n")
    head = "import argparse, nanoray, torch\nfrom net_beside import *\nargparse.ArgumentParser().parse_args()\n"
    inside = "    from rows_beside import rows\n    argparse.ArgumentParser().parse_args()\n"
    path.write_text(f"{head}def main(run):\n{inside}{after}")
    monkeypatch.setattr(sys, "argv", argv := ["nanoray inspect", "own.py", "--verify"])
    folders = [*sys.path]
    monkeypatch.chdir(tmp_path.parent)
    try:
        code, told, out = told_of(tmp_path, capsys, str(path), "--micro_batch_size=8", "--verify")
    finally:
        for name in ("net_beside", "rows_beside"):
            sys.modules.pop(name, None)
    assert code == 0, out
    assert modules(told)["out"]["outputs"] == [[[8, 4], "float32"]]
    assert (sys.argv, sys.path) == (argv, folders)


@pytest.mark.parametrize(
    ("own", "beside", "said"),
    [
        (
            "import broken_beside",
            "x = 1\n1 / 0",
            "broken_beside.py:2: ZeroDivisionError: division by zero;",
        ),
        ("x = 1\nimport broken_beside", "x = (", "broken_beside.py:1: SyntaxError: "),
        ("x = 1\nx +", "", "own.py:2: SyntaxError: "),
        (
            "import nowhere_at_all",
            "",
            "own.py:1: ModuleNotFoundError: No module named 'nowhere_at_all';",
        ),
        ("import json\njson.loads('{')", "", "own.py:2: JSONDecodeError: "),
        ("\nraise SystemExit(3)", "", "own.py:2: SystemExit: 3;"),
    ],
)
def test_a_script_that_fails_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: str, beside: str, said: str
) -> None:
    path, argv, folders = tmp_path / "own.py", [*sys.argv], [*sys.path]
    path.write_text(own)
    (tmp_path / "broken_beside.py").write_text(beside)
    try:
        assert main([str(path)]) == ConfigError.exit_code
    finally:
        sys.modules.pop("broken_beside", None)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/{said}")
    assert error.endswith(
        'without arguments: mend it, or move what fails below if __name__ == "__main__":\n'
    )
    assert (sys.argv, sys.path) == (argv, folders)


@pytest.mark.full
def test_a_run_of_a_scripts_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint has names and shapes; the rest is unknown, and said to be."""
    from tests.harness.commands import run

    path = tmp_path / "own.py"
    path.write_text(
        SCRIPT.replace("EXTRA", "x = self.extra(x)").replace(
            '"device"', f'"out_dir": "{tmp_path}/runs", "device"'
        )
    )
    done = run(str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    code, told, out = told_of(tmp_path, capsys, str(folder))
    assert code == 0
    assert "layers.1.weight" in {row["name"] for row in told["tensors"]}
    assert "the inputs of the model are not known" in out
    assert main([str(folder), "--verify"]) != 0
    assert "verify it from there: nanoray inspect SCRIPT.py --verify" in capsys.readouterr().err


# Pages and errors.


@pytest.fixture
def page(tmp_path: Path, text: Path) -> Path:
    path = tmp_path / "page.html"
    flags = [
        f"--dataset={text}",
        f"--data_dir={text.parent}/cache",
        "--tp=2",
        "--world_size=4",
        "--dp_mode=zero1",
    ]
    assert main(["tiny", *flags, "--verify", "--html", str(path)]) == 0
    return path


def test_a_batch_of_the_data_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Shakespeare the text of the standard library, of other tokens; or a plain error."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    code, told, _ = told_of(tmp_path, capsys, "tiny", "--verify")
    assert (code, told["verify"]["ok"]) == (0, True)
    subject = subject_of()
    assert subject.dataset.vocab_size == 65
    with pytest.raises(
        ConfigError,
        match=r"its data is not here, and stdlib: .* has another vocabulary; verify where",
    ):
        verify(subject, dump(subject))


def test_a_page_that_needs_nothing_else(page: Path) -> None:
    html = page.read_text()
    assert len(html) < 1 << 20
    assert "<script" not in html
    assert not re.findall(r'(?:src|href)="', html)
    assert '<span class="word good">verified</span>' in html
    assert "as blocks.0" in html
    assert "tp: 1/2 along dim 1 of 3×32×32" in html
    assert "nanoray inspect" in html
    assert "Made by nanoray" in html, "report's footer"


@in_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_overflow(page: Path, width: int) -> None:
    require_width(page, width)


def test_names_are_escaped(tmp_path: Path) -> None:
    from nanoray.tools.inspect.page import page as page_of

    told = dump(subject_of()) | {
        "verify": None,
        "against": None,
        "subject": "</title><script>x</script>",
    }
    assert "<script" not in page_of(told)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tinny"], "tinny is no folder of a run, no file and no preset; did you mean tiny?"),
        (["."], "is no run and no checkpoint of one (no config.json)"),
        (["tiny", "--world_size=0"], "world_size = 0 is not a whole number above 0"),
        (["tiny", "--tp=3"], "tp = 3 must divide"),
        (["tiny", "--n_embt=3"], "unknown flag --n_embt; did you mean --n_embd?"),
        ([OWN, "--function=mein"], "has no function mein, which nanoray.launch would call"),
        (["tiny", "--against=runs/none"], "there are no weights to compare with"),
        (["tiny", "--json=/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (
            ["tiny", "--preset", "gpt2-124m"],
            "preset = gpt2-124m would be ignored: tiny names the configuration; drop",
        ),
        (
            ["tiny", "--config=x.yaml"],
            "config = x.yaml would be ignored: tiny names the configuration; drop --config",
        ),
        (
            ["tiny", "--resume=runs/R"],
            "resume = runs/R would be ignored: tiny names the configuration; drop --resume",
        ),
        (
            ["tiny", "--quiet"],
            "quiet would be ignored: inspect starts nothing and predicts no step; drop --quiet",
        ),
        (
            ["tiny", "--dry_run"],
            "dry_run would be ignored: inspect starts nothing and predicts no step; drop --dry_run",
        ),
        (
            ["tiny", "--topology=x", "--world_size=2"],
            "topology = x would be ignored: inspect starts nothing and",
        ),
        (
            ["tiny", "--memory_gb", "8"],
            "memory_gb = 8 would be ignored: inspect starts nothing and predicts no step",
        ),
        (
            ["tiny", "--config"],
            "argument --config: expected one argument; see nanoray inspect --help",
        ),
        (
            [OWN, "--config=/nowhere.yaml"],
            "config = /nowhere.yaml would be ignored: a script's configuration is flags",
        ),
        (
            [OWN, "--preset=tiny"],
            "preset = tiny would be ignored: a script's configuration is flags; drop --preset",
        ),
        (
            [OWN, "--resume", "runs/R"],
            "resume = runs/R would be ignored: a script's configuration is flags; drop",
        ),
        (
            [OWN, "--dry_run"],
            "dry_run would be ignored: inspect starts nothing and predicts no step; drop --dry_run",
        ),
        ([OWN, "--model=gpt"], f"model = gpt would be ignored: {OWN} brings its own; drop --model"),
    ],
)
def test_errors_tell_the_remedy(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == ConfigError.exit_code or said.startswith("there are no weights")
    assert said in capsys.readouterr().err


def test_a_script_may_be_told_that_the_model_is_its_own() -> None:
    assert subject_of("--model", "own", target=OWN).script


@pytest.mark.parametrize("key", ["config", "preset"])
def test_values_in_the_place_of_a_preset_leave_no_room_for_one(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{key} = .* would be ignored: .* from flags alone; drop --{key}$"
    ):
        parse_args(
            [f"--{key}=tiny"], "nanoray inspect", "", base={"model": "own", "micro_batch_size": 4}
        )


def test_too_many_ranks_have_a_tree_without_owners() -> None:
    subject = subject_of("--global_batch_size=256", ranks=MOST_RANKS * 2)
    assert subject.layout == Layout(dp=256)
    told = dump(subject)
    assert any(
        f"at most {MOST_RANKS} ranks are laid out one by one" in note for note in told["notes"]
    )
    assert "held" not in told["tensors"][0]


def test_a_model_without_a_script_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: own\nmicro_batch_size: 4\n")
    with pytest.raises(ConfigError, match=re.escape("give the script: nanoray inspect SCRIPT.py")):
        subject_of(target=str(path))
    assert make_config({"model": "own", "micro_batch_size": 4}).model == "own"
