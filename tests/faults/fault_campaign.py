"""Kills training runs again and again, and shows that each ends as its undisturbed twin does, bit for bit.

    python tests/faults/fault_campaign.py --kills 200 --runs 20

Every attempt is a process (see attempts.py). SIGKILL and SIGTERM come at moments drawn at random: at any file operation
of the run, at those of checkpoints, at those of the verdict, or a while after them. Some attempts find the newest
checkpoint cut short or with a bit flipped, some run under a clock that jumps, and some, between the kills, on a full
disk (no file may grow beyond a size, RLIMIT_FSIZE) or without memory (RLIMIT_AS). After each, every file of the run
must be whole and every checksum right. Some, between the kills, are mistakes, with another learning rate than the
checkpoint's: they must be refused (exit status 2), and every file must stay as it was, byte for byte. In the end
verdict, scalars, configuration and weights must be the twin's. Otherwise it says what was wrong and its exit status
is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds its own directory only

from attempts import CHECKPOINT, OTHER, VERDICT, Ending, Fault, attempt, prepare
from runs import CHECKPOINT as MODEL_CHECKPOINT
from runs import callback, outcome, run_args, write_tokens

from lightning_qk.checkpoints import is_whole
from lightning_qk.executors.attempt import is_done
from lightning_qk.verdict import read_verdict

STEPS = 42  # neither saved nor validated: what a kill after the last checkpoint takes must come again
MISTAKE = "--model.lr=0.02"
TERMINATED = 128 + signal.SIGTERM
DAY = 86400.0
WATCH = callback("SpectralMonitor", every_n_steps=2)
ARMS: dict[str, list[str]] = {
    "healthy": ["--trainer.plugins=null"],
    "fault": [],
    "guard": [f"--trainer.callbacks+={callback('QKGuard', mode='fire_at_step', fire_step=STEPS // 2)}"],
    "rich": [
        f"--trainer.callbacks+={callback('QKGuard', threshold=0.05, every_n_steps=2)}",
        f"--trainer.callbacks+={callback('RouteSplice', route='qk')}",
        "--model.overrides.dropout=0.2",
        "--model.schedule=cosine",
        "--trainer.accumulate_grad_batches=2",
        "--trainer.plugins.init_args.overrides={l_carry: '2:sr', o_carry: '2:sr'}",
    ],
    "collapse": [
        "--model.lr=0.5",
        f"--trainer.callbacks+={callback('CollapseStop', excess=0.02, margin=0.01, window=3, patience=15)}",
    ],
}


def fit_args(root: Path, tokens: dict[str, Any], arm: str, seed: int) -> list[str]:
    """A checkpoint every four steps, the two newest and the last kept; a validation every ten."""
    ours = json.loads(MODEL_CHECKPOINT)
    ours["init_args"] |= {"every_n_train_steps": 4, "save_top_k": 2, "monitor": "step", "mode": "max"}
    args = run_args(root, tokens, WATCH, steps=STEPS)
    args = [f"--trainer.callbacks+={json.dumps(ours)}" if MODEL_CHECKPOINT in one else one for one in args]
    args += ["--seed_everything", str(seed), "--run.arm", arm, "--trainer.val_check_interval=10"]
    return [*args, *ARMS[arm], "--ckpt_path", "last"]


@dataclasses.dataclass(frozen=True)
class Twin:
    """What an undisturbed run leaves, and how it came to it.

    Attributes:
        result: verdict, curves and weights.
        texts: its configuration files, less what names its directory.
        ending: of its only attempt.
    """

    result: dict[str, Any]
    texts: dict[str, Any]
    ending: Ending


class Campaign:
    """Kills runs and keeps count.

    Args:
        root: where the runs go.
        seed: of all draws.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self.draw = root, random.Random(seed)
        self.tokens = write_tokens(root / "tokens")
        self.kills: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.problems: dict[str, list[str]] = {"lost": [], "changed": [], "half": [], "other": []}
        self.attempts = 0
        self._damaged: dict[Path, str] = {}
        self._verdict: bytes | None = None
        prepare(fit_args(root, self.tokens, "fault", 0))

    def run(self, arm: str, seed: int, kills: int) -> None:
        """One run and its twin."""
        name = f"{arm}/seed_{seed}"
        twin = self._twin(arm, seed)
        directory = self.root / "killed" / "exp" / name
        args = fit_args(self.root / "killed", self.tokens, arm, seed)
        self._damaged, self._verdict = {}, None
        left, tries = kills, 0
        while left and tries < 10 * kills:
            tries += 1
            done = directory.exists() and is_done(directory)
            if not done and self.draw.random() < 0.2:
                self._damage(directory)
            if not done and self.draw.random() < 0.15:
                self._attempt(args, directory, self._short_of_something(directory), twin)
            if any(map(is_whole, directory.glob("checkpoints/*.ckpt"))) and self.draw.random() < 0.2:
                self._mistake(args, directory)
            fault = self._of_the_finished() if done else self._kill(left, kills, twin.ending)
            left -= self._attempt(args, directory, fault, twin)
        if not is_done(directory):
            self._attempt(args, directory, Fault(), twin)
        self._compare(name, directory, twin)

    def _twin(self, arm: str, seed: int) -> Twin:
        root = self.root / "calm"
        directory = root / "exp" / arm / f"seed_{seed}"
        ending = attempt(fit_args(root, self.tokens, arm, seed), directory, self.root / "calm.txt")
        if ending.code:
            raise RuntimeError(f"{directory}: the undisturbed run ended with {ending.code}; see {self.root}/calm.txt")
        return Twin(result(directory), texts(directory), ending)

    def _kill(self, left: int, kills: int, whole: Ending) -> Fault:
        """A kill that leaves, on average, the run's second half to the kills that follow."""
        kinds = [(CHECKPOINT + VERDICT + OTHER, 6), (CHECKPOINT, 3), (VERDICT, 3 if left <= 2 else 0)]
        (among,) = self.draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        there = sum(one in among for one in whole.operations)
        return Fault(
            kill=self.draw.choices([signal.SIGKILL, signal.SIGTERM], [7, 3])[0],
            among=among,
            at=self.draw.randint(1, max(2, 2 * there // kills)),
            delay_s=self.draw.choice([0.0, self.draw.uniform(0, 2 * whole.seconds / len(whole.operations))]),
            clock_s=self.draw.choices([0.0, self.draw.uniform(-DAY, DAY)], [4, 1])[0],
            clock_at=self.draw.randint(0, len(whole.operations) // kills),
        )

    def _of_the_finished(self) -> Fault:
        """A kill of an attempt that has nothing to do but to look."""
        return Fault(kill=signal.SIGKILL, at=self.draw.randint(0, 1), delay_s=self.draw.uniform(0, 0.05))

    def _short_of_something(self, directory: Path) -> Fault:
        if self.draw.random() < 0.7:
            most = max((path.stat().st_size for path in directory.rglob("*") if path.is_file()), default=1000)
            return Fault(file_bytes=self.draw.randint(0, most - 1))
        return Fault(memory_bytes=self.draw.randint(0, 12 << 20))  # with 16 MiB a run here can end well

    def _damage(self, directory: Path) -> None:
        """Cuts the newest checkpoint short or flips one of its bits."""
        there = sorted((directory / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        if not there:
            return
        path, data = there[-1], bytearray(there[-1].read_bytes())
        if self.draw.random() < 0.5:
            self.faults["cut checkpoints"] += 1
            del data[self.draw.randrange(len(data)) :]
        else:
            self.faults["flipped bits"] += 1
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(data)
        self._damaged[path] = digest(path)

    def _mistake(self, args: list[str], directory: Path) -> None:
        """Resumes with another learning rate, which must be refused and change nothing."""
        before, log = digests(directory), self.root / "log.txt"
        log.unlink(missing_ok=True)
        ending = attempt([*args, MISTAKE], directory, log)
        self.attempts += 1
        self.faults["mistaken resumes"] += 1
        where = f"{directory.parent.name}/{directory.name}, attempt {self.attempts} ({MISTAKE}, {ending})"
        if ending.code != 2:
            self._problem("other", f"{where}: not refused", log)
        after = digests(directory)
        if touched := [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]:
            self._problem("changed", f"{where}: {', '.join(touched)}", log)

    def _attempt(self, args: list[str], directory: Path, fault: Fault, twin: Twin) -> bool:
        """Makes an attempt and looks at what it leaves; whether it was killed."""
        log = self.root / "log.txt"
        log.unlink(missing_ok=True)
        ending = attempt(args, directory, log, fault)
        self.attempts += 1
        short = fault.file_bytes is not None or fault.memory_bytes is not None
        self.faults["full disks"] += fault.file_bytes is not None
        self.faults["memory limits"] += fault.memory_bytes is not None
        self.faults["clock jumps"] += fault.clock_s != 0
        killed = ending.sent and ending.code in (-signal.SIGKILL, -signal.SIGTERM, TERMINATED)
        if killed and fault.kill is not None:
            self.kills[fault.kill.name] += 1
            self.kills["while a checkpoint was written"] += any(directory.glob("checkpoints/.*.tmp"))
            self.kills["of a finished run"] += self._verdict is not None
        where = f"{directory.parent.name}/{directory.name}, attempt {self.attempts} ({fault}, {ending})"
        if ending.hung:
            self._problem("other", f"{where}: hung", log)
        elif ending.code and not killed and not short:
            self._problem("other", f"{where}: ended with an error", log)
        elif not ending.code and not is_done(directory):
            self._problem("other", f"{where}: ended as if done, without a verdict", log)
        self._look(where, directory, twin, log)
        with (self.root / "journal.txt").open("a") as file:
            file.write(f"{where}\n")
        return killed

    def _look(self, where: str, directory: Path, twin: Twin, log: Path) -> None:
        """Every file is whole, and a verdict once given stays."""
        for path in directory.glob("**/*.json"):
            try:
                json.loads(path.read_text())
            except ValueError as error:
                self._problem("half", f"{where}: {path}: {error}", log)
        for path in directory.glob("checkpoints/*.ckpt"):
            if not is_whole(path) and self._damaged.get(path) != digest(path):
                self._problem("half", f"{where}: {path}", log)
        for name, text in texts(directory).items():
            if text != twin.texts[name]:
                self._problem("half", f"{where}: {name}: {text}", log)
        file = directory / "verdict.json"
        found = file.read_bytes() if directory.exists() and is_done(directory) else None  # is_done checks its checksum
        if self._verdict is not None and found != self._verdict:
            self._problem("lost" if found is None else "changed", f"{where}: the verdict given before", log)
        self._verdict = found

    def _compare(self, name: str, directory: Path, twin: Twin) -> None:
        if read_verdict(directory) is None:
            self._problem("lost", f"{name}: no verdict")
            return
        rest = [str(path) for path in directory.rglob(".*")]
        if rest:
            self._problem("half", f"{name}: left over: {rest}")
        if problems := differences(result(directory), twin.result):
            self._problem("changed", f"{name}: {problems}")

    def _problem(self, kind: str, what: str, log: Path | None = None) -> None:
        self.problems[kind].append(what)
        tail = "" if log is None or not log.exists() else log.read_text(errors="replace")[-1500:]
        print(f"{kind.upper()}: {what}\n{tail}", flush=True)

    def summary(self, runs: int) -> str:
        """The count."""
        kills = self.kills["SIGKILL"] + self.kills["SIGTERM"]
        lost, changed, half, other = (len(self.problems[kind]) for kind in ("lost", "changed", "half", "other"))
        of = ", ".join(f"{count} {name}" for name, count in sorted(self.kills.items()))
        besides = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        ending = f", {other} attempts that hung or ended wrongly" if other else ""
        return (
            f"{kills} kills over {runs} runs: {lost} verdicts lost, {changed} changed, {half} half files{ending}\n"
            f"({of}; besides {besides}; {self.attempts} attempts)"
        )


def result(directory: Path) -> dict[str, Any]:
    """All a finished run says of itself, less what depends on the clock, and its weights."""
    content = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)
    weights = {name: value.numpy().tobytes() for name, value in content["state_dict"].items()}
    found = outcome(directory)
    return {"verdict": found["verdict"], **found["curves"], "weights": weights, "step": content["global_step"]}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs, in words."""
    said = []
    for key in sorted(found.keys() | expected.keys()):
        left, right = found.get(key), expected.get(key)
        if left == right:
            continue
        if isinstance(left, tuple) and isinstance(right, tuple):  # a curve
            ours, theirs = dict(zip(*left, strict=True)), dict(zip(*right, strict=True))
            steps = [step for step in sorted(ours.keys() | theirs.keys()) if ours.get(step) != theirs.get(step)]
            said.append(f"{key} at steps {steps}, {len(ours)} points of {len(theirs)}")
        else:
            said.append(key if key == "weights" else f"{key}: {left} instead of {right}")
    return said


def texts(directory: Path) -> dict[str, Any]:
    """A run's configuration files as far as they must be the twin's."""
    found = {}
    for path in directory.glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if isinstance(content, dict) and path.name == "config.yaml":
            content.pop("ckpt_path", None)
            content.get("run", {}).pop("root", None)
        found[path.name] = content
    return found


def digests(directory: Path) -> dict[str, str]:
    """Of all files, less what a killed process left half written, which any attempt may clear away."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(directory)): digest(path) for path in files}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def campaign(root: Path, kills: int, runs: int, seed: int = 0) -> tuple[Campaign, str]:
    """The whole of it; kills that are left over by a run go to the next."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found = Campaign(root, seed)
    names = list(ARMS)
    for index in range(runs):
        done = found.kills["SIGKILL"] + found.kills["SIGTERM"]
        found.run(names[index % len(names)], index // len(names), round((kills - done) / (runs - index)))
    return found, found.summary(runs)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--keep", action="store_true", help="keep the runs, as is done anyway if one is wrong")
    options = parser.parse_args()
    started, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="faults-"))
    found, summary = campaign(root, options.kills, options.runs, options.seed)
    print(f"{summary}\n{time.monotonic() - started:.0f} s")
    wrong = any(found.problems.values())
    if wrong or options.keep:
        print(f"the runs are in {root}")
    else:
        shutil.rmtree(root)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
