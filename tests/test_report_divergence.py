"""The paper's divergence rule in the report."""

from __future__ import annotations

from pathlib import Path

from lightning_qk.divergence_table import divergence_table
from lightning_qk.runs import Arm, Run


def arm(name: str, *steps: int | None, status: str = "completed") -> Arm:
    runs = [
        Run(Path(name) / f"seed_{seed}", name, seed, {"status": status, "divergence_step": step})
        for seed, step in enumerate(steps)
    ]
    return Arm(name, tuple(runs))


def test_rates_and_steps_by_arm() -> None:
    plain = Arm("plain", (Run(Path("plain/seed_0"), "plain", 0, {"status": "completed"}),))
    table = divergence_table(
        [arm("fp32", None, None), arm("mx", 300, None, 500), plain, arm("bad", 1, status="failed")]
    )
    assert [(row["arm"], row["diverged"], row["first step"]) for row in table.rows] == [
        ("fp32", "0/2", "-"),
        ("mx", "2/3", "400 [300..500]"),
    ]
    assert table.rows[1]["95 % interval"] == "0.21..0.94"
    assert not divergence_table([plain]).rows
