"""The inputs of projections that monitors read: of any model, of the training pass, and of no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from test_adapters_training import Mine, batches, model
from tiny import data, fault, fit, gpt, module, trainer
from torch import Tensor, nn
from typing_extensions import override

from callbacks import Limit, RouteSplice
from callbacks.input_monitor import InputMonitor
from lightning_qk.routes import attention_sites
from lightning_qk.sites.inputs import ProjectionInputs


class Echo(InputMonitor):
    """Keeps what it could read, by step."""

    limits: ClassVar[Mapping[str, Limit]] = {"nothing": Limit()}

    def __init__(self, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps)
        self.seen: dict[int, list[dict[str, Tensor]]] = {}

    @override
    def read(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        self.seen[trainer.global_step] = [{name: x.clone() for name, x in layer.items()} for layer in self.tokens]
        return {}


class Norms(Callback):
    """What the norms before attention made in each micro-batch's first pass: the oracle."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now: list[Tensor] = []
        self.seen: list[list[Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, norm in pl_module.named_modules():
            if name.endswith(self.name):
                norm.register_forward_hook(lambda _, __, x: self.now.append(x.detach().flatten(0, 1).clone()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.now = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.seen.append(list(self.now))


def assert_seen(echo: Echo, norms: Norms, accumulate: int = 1) -> None:
    assert echo.seen
    for step, layers in echo.seen.items():
        expected = norms.seen[step * accumulate - 1]
        assert len(layers) == len(expected) == 2
        for tokens, x in zip(layers, expected, strict=True):
            assert tokens.keys() == {"q", "k"}
            assert all(torch.equal(one, x) for one in tokens.values())


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("gpt2-sdpa", "ln_1"),
        ("llama-sdpa", "input_layernorm"),
        ("qwen3-eager", "input_layernorm"),
        ("encoder", "norm1"),
    ],
)
def test_of_models_of_other_libraries(tmp_path: Path, name: str, norm: str) -> None:
    echo, norms, mine = Echo(), Norms(norm), Mine(model(name))
    attention_sites(mine)  # which has a hook of its own in nn.MultiheadAttention
    before = hooks(mine)
    trainer(tmp_path, [echo, norms], max_steps=2).fit(mine, batches())
    assert_seen(echo, norms)
    assert hooks(mine) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_gradient_checkpointing_of_hugging_face(tmp_path: Path, reentrant: bool) -> None:
    mine: Any = Mine(model("llama-sdpa"))
    mine.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    mine.model.train()
    echo, norms = Echo(), Norms("input_layernorm")
    trainer(tmp_path, [echo, norms], max_steps=2).fit(mine, batches())
    assert_seen(echo, norms)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_of_the_faulty_pass_and_the_last_micro_batch(
    tmp_path: Path, base: str, checkpointing: bool, accumulate: int
) -> None:
    """The clean pass that RouteSplice wants and the recomputation come later and differ."""
    echo, norms = Echo(), Norms("attention_norm")
    mine = module(activation_checkpointing=checkpointing)
    settings: dict[str, Any] = dict(accumulate_grad_batches=accumulate, limit_val_batches=1, val_check_interval=2)
    fit(tmp_path, [RouteSplice("qk"), echo, norms], fault(base=base), mine, **settings)
    assert sorted(echo.seen) == [1, 2, 3]
    assert_seen(echo, norms, accumulate)
    assert hooks(mine) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_of_compiled_blocks(tmp_path: Path, checkpointing: bool) -> None:
    """Compiled for validation first, without hooks; steps with a reading and without have a graph each."""
    seen = []
    for compiled in (False, True):
        echo, mine = Echo(every_n_steps=2), module(activation_checkpointing=checkpointing)
        if compiled:
            for block in mine.model.blocks:
                block.compile(backend="aot_eager")
        settings: dict[str, Any] = dict(num_sanity_val_steps=1, limit_val_batches=1, val_check_interval=1, max_steps=4)
        fit(tmp_path, [echo], fault(), mine, **settings)
        seen.append(echo.seen)
    eager, graphs = seen
    assert sorted(eager) == sorted(graphs) == [2, 4]
    for step, layers in eager.items():
        for left, right in zip(layers, graphs[step], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_of_blocks_that_inductor_has_compiled(tmp_path: Path) -> None:
    echo, plain = Echo(), Echo()
    fit(tmp_path, [plain], fault(), module(activation_checkpointing=True))
    fit(tmp_path, [echo], fault(), module(activation_checkpointing=True, compile=True))
    for step, layers in plain.seen.items():
        for left, right in zip(layers, echo.seen[step], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_nothing_is_kept_between_readings(tmp_path: Path) -> None:
    held: list[bool] = []

    class Held(Callback):
        def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
            catches = [hook for m in pl_module.modules() for hook in m._forward_pre_hooks.values()]
            held.append(any(catch.x is not None for catch in catches))  # type: ignore[attr-defined]

    fit(tmp_path, [Echo(every_n_steps=2), Held()], fault(), max_steps=4)
    assert held == [False, True, False, True]


def test_the_hooks_go_when_a_run_breaks(tmp_path: Path) -> None:
    class Break(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("broken")

    mine, echo = module(), Echo()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, [echo, Break()], fault()).fit(mine, data())
    assert hooks(mine) == 0
    fit(tmp_path, [echo], fault(), mine, max_steps=2)
    assert sorted(echo.seen) == [1, 2]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("width", [None, 12])
def test_queries_and_keys_of_their_own(batch_first: bool, width: int | None) -> None:
    stock = nn.MultiheadAttention(16, 4, kdim=width, vdim=width, batch_first=batch_first)
    sites = attention_sites(stock)
    inputs = ProjectionInputs(stock, sites, "qkvo")
    inputs.keep(True)
    q, k, v = torch.randn(2, 5, 16), torch.randn(2, 5, width or 16), torch.randn(2, 5, width or 16)
    stock(q, value=v, key=k)
    (found,) = inputs.tokens()
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(found[name], x.flatten(0, 1))
    assert found["o"].shape == (10, 16)


def test_other_projections() -> None:
    mine = gpt()
    inputs = ProjectionInputs(mine, attention_sites(mine), ["v", "o"])
    inputs.keep(True)
    mine(torch.zeros(1, 4, dtype=torch.long))
    assert [{name: tuple(x.shape) for name, x in one.items()} for one in inputs.tokens()] == [
        {"v": (4, 16), "o": (4, 16)}
    ] * 2
    inputs.keep(False)
    with pytest.raises(RuntimeError, match=r"weight of 'v' in layer 0 was not called"):
        inputs.tokens()
    inputs.remove()
    assert hooks(mine) == 0


def test_a_weight_that_no_module_owns() -> None:
    mine = gpt()
    sites = attention_sites(mine)
    with pytest.raises(ValueError, match=r"'q' in layer 0 \(Attention\) is no parameter of a module"):
        ProjectionInputs(nn.Linear(2, 2), sites)
