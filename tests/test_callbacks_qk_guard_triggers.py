"""What makes the guard fire: each trigger, patience and window, and the scope of one head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from test_callbacks_qk_guard import checkpointed
from test_ddp import two_ranks
from tiny import assert_same, batch, fault, fit, module, weights

from callbacks import QKGuard, RandomState
from callbacks.guard_triggers import TRIGGERS, Trigger
from lightning_qk.attention import SDPACore
from lightning_qk.module import GPTModule
from lightning_qk.routes import attention_sites

SDPA: dict[str, Any] = dict(sites="fp32", carry=None, core="sdpa")


class Oracle(Callback):
    """Every quantity by another way, per step, layer and head."""

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.Tensor]] = {"logit": [], "sigma_q": [], "tied_rows": [], "entropy": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for site in attention_sites(pl_module):
            site.core.observed = site.core.keep_qk = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sites = attention_sites(pl_module)
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in self.seen}
        for site in sites:
            q, k = (x.double() for x in site.core._kept()[:2])
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
            rows["logit"].append(site.core.max_logit_H)
            rows["sigma_q"].append(torch.linalg.svdvals(site.q_proj.weight.detach())[:1].expand(2))
            rows["entropy"].append(torch.special.entr(scores.softmax(-1)).sum(-1).mean((0, 2)))
            if hasattr(site.core, "tied_rows_H"):
                rows["tied_rows"].append(site.core.tied_rows_H)
        for name, values in rows.items():
            if values:
                self.seen[name].append(torch.stack(values).float())


def uneven(**fields: Any) -> GPTModule:
    """Logits are largest in layer 1, head 1, and large everywhere."""
    model = module(fields, lr=3e-2)
    for layer, site in enumerate(attention_sites(model)):
        for head in range(2):
            rows = slice(8 * head, 8 * head + 8)
            torch.nn.init.normal_(site.q_proj.weight[rows], std=0.4 + 0.3 * layer + 0.3 * head)
            torch.nn.init.normal_(site.k_proj.weight[rows], std=0.4 + 0.3 * layer + 0.3 * head)
    return model


def series(tmp_path: Path, quantity: str, **plugin: Any) -> list[torch.Tensor]:
    oracle = Oracle()
    fit(tmp_path, [oracle], fault(**plugin), uneven(), max_steps=6)
    return oracle.seen[quantity]


def first_extreme(values: list[float], sign: int) -> tuple[int, float]:
    """A step that is worse than all before it, and a threshold between."""
    for i in range(1, len(values)):
        before = max(sign * value for value in values[:i])
        if sign * values[i] > before * (1 + 1e-4 * sign):
            return i + 1, sign * (before + sign * values[i]) / 2
    raise AssertionError(f"nothing gets worse here: {values}")


@pytest.mark.parametrize(
    ("trigger", "quantity", "plugin"),
    [
        ("logit_bound", "logit", {}),
        ("logit_bound", "logit", SDPA),
        ("max_logit", "logit", SDPA),
        ("sigma_q", "sigma_q", SDPA),
        ("tied_rows", "tied_rows", {}),
        ("entropy", "entropy", {}),
        ("entropy", "entropy", SDPA),
    ],
)
def test_a_trigger_fires_at_the_first_step_beyond_its_threshold(
    tmp_path: Path, trigger: str, quantity: str, plugin: dict[str, Any]
) -> None:
    sign = -1 if quantity == "entropy" else 1
    plain = series(tmp_path, quantity, **plugin)
    worst = [float(sign * (sign * values).max()) for values in plain]
    step, threshold = first_extreme(worst, sign)
    guard = QKGuard(threshold, trigger=trigger)
    fit(tmp_path, [guard], fault(**plugin), uneven(), max_steps=6)
    assert guard.history == [{"step": step, "layers": [0, 1], quantity: pytest.approx(worst[step - 1], rel=1e-4)}]
    assert guard.verdict_fields()["guard_logit"] == guard.history[0].get("logit")


def test_the_maximum_is_read_at_every_look_unless_a_bound_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    exact = vars(SDPACore)["max_logit_H"].fget
    monkeypatch.setattr(SDPACore, "max_logit_H", property(lambda core: asked.append(1) or exact(core)))
    for trigger, reads in (("max_logit", 3 * 2), ("logit_bound", 0)):
        asked.clear()
        fit(tmp_path, [QKGuard(1e9, trigger=trigger)], fault(**SDPA), max_steps=3)
        assert len(asked) == reads


@pytest.mark.parametrize("trigger", ["logit_bound", "tied_rows", "entropy"])
def test_scope_head_acts_on_the_heads_that_fire(tmp_path: Path, trigger: str) -> None:
    quantity, sign = TRIGGERS[trigger].quantity, TRIGGERS[trigger].sign
    first = sign * series(tmp_path, quantity, carry=4)[0]
    order = first.flatten().sort().values
    threshold = float(sign * (order[-1] + order[-2]) / 2)
    layer, head = divmod(int(first.argmax()), 2)
    guard = QKGuard(threshold, trigger=trigger, scope="head")
    model, _ = fit(tmp_path, [guard], fault(carry=4), uneven(), max_steps=1)
    assert guard.history == [
        {"step": 1, "layers": [layer], "heads": [[head]], quantity: pytest.approx(float(sign * order[-1]), rel=1e-4)}
    ]
    on = {i: site.heads_on("qk_norm") for i, site in enumerate(attention_sites(model)) if site.qk_norm_on}
    assert on == {layer: (head,)}


def test_the_heads_of_a_layer_fire_one_after_the_other_and_a_resumed_run_agrees(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [QKGuard(28.0, scope="head"), RandomState()]

    whole, again = callbacks(), callbacks()
    expected, recording = fit(tmp_path, whole, fault(), uneven(), max_steps=6)
    history = whole[0].history  # type: ignore[attr-defined]
    assert [(event["step"], event["layers"], event["heads"]) for event in history] == [
        (1, [1], [[1]]),
        (3, [0], [[1]]),
        (5, [1], [[0]]),
    ]
    checkpointed(tmp_path, callbacks(), model=uneven(), steps=3)
    resumed, rest = fit(tmp_path, again, fault(), uneven(), max_steps=6, ckpt_path=tmp_path / "at_2.ckpt")
    assert rest.losses == recording.losses[2:]
    assert_same(weights(resumed), weights(expected))
    assert again[0].state_dict() == whole[0].state_dict()


def test_after_a_release_no_other_head_fires(tmp_path: Path) -> None:
    """Of the heads above, two would still have fired."""
    guard = QKGuard(28.0, scope="head", disarm_after=1)
    model, _ = fit(tmp_path, [guard], fault(), uneven(), max_steps=6)
    assert [event["step"] for event in guard.history] == [1, 2] and guard.released_step == 2
    assert not any(site.switches_on() for site in attention_sites(model))


class Scripted(Trigger):
    """Reads what it is told to, in every head."""

    quantity = "number"
    script: tuple[float, ...] = ()

    def __init__(self) -> None:
        self._reads = iter(self.script)

    def read(self, sites: Any, limit: float) -> torch.Tensor:
        return torch.full((4,), next(self._reads))


def fired_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: tuple[float, ...], **settings: Any
) -> tuple[int | None, Any]:
    monkeypatch.setitem(TRIGGERS, "scripted", Scripted)
    monkeypatch.setattr(Scripted, "script", script)
    guard = QKGuard(**{"threshold": 1.0, "trigger": "scripted", **settings})
    fit(tmp_path, [guard], fault(**SDPA), max_steps=len(script))
    return guard.fired_step, guard.history[0]["number"] if guard.fired else None


@pytest.mark.parametrize(
    ("script", "settings", "fires"),
    [
        ((0, 2, 0, 2, 2), {}, (2, 2)),
        ((0, 2, 0, 2, 3), {"patience": 2}, (5, 3)),
        ((2, 2, 0, 2, 2, 1), {"patience": 3}, (None, None)),
        ((2, 0, 0, 0), {"patience": 3, "window": 3}, (3, 2)),
        ((2, 0, 0, 0), {"patience": 3, "window": 2}, (None, None)),
        ((0, 3, 0, 2, 0), {"patience": 4, "window": 2}, (5, 2)),
        ((1, 1, 1), {}, (None, None)),
        ((0, math.nan, 0), {}, (2, math.inf)),
        ((0, math.nan, 0), {"window": 2, "patience": 2}, (3, math.inf)),
        ((0, -math.inf, 0), {}, (None, None)),
        ((2, 2), {"every_n_steps": 2}, (2, 2)),
    ],
)
def test_patience_counts_looks_in_a_row_and_the_window_remembers_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: tuple[float, ...], settings: Any, fires: Any
) -> None:
    assert fired_at(tmp_path, monkeypatch, script, **settings) == fires


def test_patience_and_window_survive_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRIGGERS, "scripted", Scripted)
    guard = QKGuard(1.0, trigger="scripted", patience=4, window=2)
    monkeypatch.setattr(Scripted, "script", (2.0, 0.0))
    checkpointed(tmp_path, [QKGuard(1.0, trigger="scripted", patience=4, window=2)], steps=2)
    state = torch.load(tmp_path / "at_2.ckpt", weights_only=True)["callbacks"]["QKGuard"]
    assert state == {"fired_step": None, "history": [], "looks": [[0.0] * 4], "streak": [2] * 4}
    monkeypatch.setattr(Scripted, "script", (2.0, 0.0))
    guard = QKGuard(1.0, trigger="scripted", patience=4, window=2)
    fit(tmp_path, [guard], fault(), max_steps=4, ckpt_path=tmp_path / "at_2.ckpt")
    assert guard.fired_step == 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"trigger": "logits"}, r"trigger='logits' is not one of logit_bound, max_logit, sigma_q, tied_rows, entropy"),
        ({"trigger": "sigma_q"}, "trigger='sigma_q' has no threshold of its own"),
        ({"trigger": "entropy"}, "trigger='entropy' has no threshold of its own"),
        ({"trigger": "sigma_q", "threshold": 20.0, "scope": "head"}, "no firing head; use scope='layer'"),
        ({"patience": 0}, "patience=0"),
        ({"window": 0}, "window=0"),
        ({"disarm_after": 0}, "disarm_after=0"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"mode": "always_on", "scope": "layer"}, "mode='always_on' has no firing layer"),
    ],
)
def test_argument_errors_name_the_argument(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        QKGuard(**settings)


def test_defaults_are_the_papers() -> None:
    guard = QKGuard()
    assert (guard.threshold, guard.trigger, guard.action, guard.scope) == (30.0, "logit_bound", "qk_norm", "all")
    assert (guard.patience, guard.window, guard.disarm_after) == (1, 1, None)


def test_tied_rows_need_a_core_that_counts_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trigger='tied_rows' needs a streaming core, got SDPACore"):
        fit(tmp_path, [QKGuard(3.0, trigger="tied_rows")], fault(**SDPA))


@pytest.mark.parametrize(
    "settings",
    [
        {"trigger": "entropy", "threshold": 1.9, "scope": "head"},
        {"trigger": "sigma_q", "threshold": 2.0, "scope": "layer"},
        {"trigger": "max_logit", "threshold": 1.0, "scope": "head", "patience": 2},
        {"threshold": 0.5, "scope": "layer", "action": "qk_clip", "action_args": {"tau": 0.4}},
    ],
    ids=lambda settings: settings.get("trigger", "qk_clip"),
)
def test_two_ranks_decide_and_act_alike(tmp_path: Path, settings: dict[str, Any]) -> None:
    guard = QKGuard(**settings)
    first, second = two_ranks(tmp_path, [guard], guard, model=uneven(), max_steps=4)
    assert first["logits"] != second["logits"]  # each sees its own half of the batch
    assert first["guard"]["history"] and first["guard"] == second["guard"]
    assert_same(first["weights"], second["weights"])


def test_the_exact_maximum_is_taken_only_in_layers_whose_bound_is_over() -> None:
    class Counted(SDPACore):
        asked = 0

        @property
        def max_logit_H(self) -> torch.Tensor:
            self.asked += 1
            return super().max_logit_H

    model = uneven()
    sites = attention_sites(model)
    for site in sites:
        site.core = Counted()
        site.core.observed = True
    model(*batch())
    bounds = [float(site.core.logit_bound_H.max()) for site in sites]
    assert bounds[0] < bounds[1]
    seen = TRIGGERS["logit_bound"]().read(sites, (bounds[0] + bounds[1]) / 2)
    assert [site.core.asked for site in sites] == [0, 1]  # type: ignore[attr-defined]
    assert torch.equal(seen[:2], sites[0].core.logit_bound_H) and torch.equal(seen[2:], sites[1].core.max_logit_H)
