"""The main job's claim, run as the README runs it: six arms, six verdicts, the same bits when repeated."""

from pathlib import Path

import pytest

from lightning_qk.events import read_scalars
from lightning_qk.sweep import main
from lightning_qk.verdict import read_verdict

DEMO = Path(__file__).parents[1] / "configs/experiments/demo.yaml"
EXPECTED = {
    "fp32": "completed",
    "fault": "collapsed",
    "clean_qk": "completed",
    "clean_mlp": "collapsed",
    "qk_norm": "completed",
    "guard": "completed",
}


@pytest.mark.slow
def test_the_picture(tmp_path: Path) -> None:
    assert main(["-c", str(DEMO), "--root", str(tmp_path)]) == 0
    verdicts = {arm: read_verdict(tmp_path / "demo" / arm / "seed_0") or {} for arm in EXPECTED}
    assert {arm: verdict["status"] for arm, verdict in verdicts.items()} == EXPECTED
    for arm in ("fault", "clean_mlp"):  # the channel runs away where training collapses, and only there
        assert verdicts[arm]["sigma_q"] > 5 * verdicts["fp32"]["sigma_q"]
    for arm in ("clean_qk", "qk_norm", "guard"):
        assert verdicts[arm]["sigma_q"] < 2 * verdicts["fp32"]["sigma_q"]
    assert verdicts["guard"]["guard_step"] is not None and verdicts["guard"]["guard_logit"] > 60
    assert (tmp_path / "demo" / "figure.png").stat().st_size > 10_000

    again = tmp_path / "again"
    assert main(["-c", str(DEMO), "--root", str(again), "--only", "fault", "--report", "false"]) == 0
    first, second = (read_scalars(root / "demo" / "fault" / "seed_0") for root in (tmp_path, again))
    assert first.keys() == second.keys()
    for tag, series in first.items():
        assert list(series.values) == list(second[tag].values), tag
