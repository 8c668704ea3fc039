"""The loop that trainers share: what it logs, that it resumes, what a full disk leaves, and several processes."""

from __future__ import annotations

import faulthandler
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specla.train.run import Training, make_optimizers, process_group, ranks, run_training

TRAINING = Training(steps=12, eval_every=6, checkpoint_every=4, log_every=3, learning_rate=0.02)


class Toy(nn.Module):
    """A next-token model with one matrix, a vector, an embedding, a head, and a frozen one that is not its own."""

    def __init__(self, seed: int = 0):
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        self.embeddings = nn.Parameter(torch.randn(11, 8, generator=chance))
        self.matrix = nn.Parameter(torch.randn(8, 8, generator=chance))
        self.vector = nn.Parameter(torch.zeros(8))
        self.lm_head = nn.Parameter(torch.randn(11, 8, generator=chance))
        self.shared = nn.Parameter(torch.randn(8, 8, generator=chance), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.embeddings[tokens] @ self.matrix + self.vector)
        return hidden @ self.shared @ self.lm_head.T


def train(model: Toy, out: Path, training: Training = TRAINING, **options: Any) -> bool:
    """A run on made-up bigrams, of which each rank takes its share."""
    rank, world = ranks()

    def gradients(step: int) -> dict[str, Tensor]:
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))[rank::world]
        model.zero_grad()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits, (tokens * 3 + 1) % 11)
        loss.backward()
        return {"loss": loss.detach(), "right": (logits.argmax(-1) == (tokens * 3 + 1) % 11).float().mean()}

    given: dict[str, Any] = {"identity": {"training": training.__dict__}, "gradients": gradients, "tokens_per_step": 8,
             "save": lambda: torch.save(model.state_dict(), out / "weights.pt")} | options  # fmt: skip
    return run_training(model, make_optimizers(model, training), training, out, **given)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


def test_the_rate_rises_holds_and_falls() -> None:
    training = Training(steps=100, warmup=0.1, decay=0.2)
    assert [training.rate(step) for step in (0, 4, 9, 79, 80, 90, 99)] == [0.1, 0.5, 1, 1, 1, 0.5, 0.05]
    assert Training(steps=3, warmup=0.0, decay=0.0).rate(2) == 1


def test_the_rate_follows_the_clock() -> None:
    training = Training(warmup=0.1, decay=0.2, clock_seconds=100)
    shares = (0.0, 0.05, 0.1, 0.8, 0.9, 1.0, 1.3)
    assert [training.rate_by_clock(share) for share in shares] == pytest.approx([0, 0.5, 1, 1, 0.5, 0, 0])
    assert Training(warmup=0.0, decay=0.0).rate_by_clock(0.5) == 1


class Ticks:
    """A clock on which every step takes as long as it is told, and pauses between runs take no time."""

    def __init__(self, *seconds: float):
        self.seconds, self.at, self.model = seconds, 0.0, Toy()

    def train(self, out: Path, training: Training, **options: Any) -> bool:
        def gradients(step: int) -> dict[str, Tensor]:
            self.at += self.seconds[step % len(self.seconds)]
            tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
            self.model.zero_grad()
            loss = nn.functional.cross_entropy(self.model(tokens), (tokens * 3 + 1) % 11)
            loss.backward()
            return {"loss": loss.detach()}

        return train(self.model, out, training, gradients=gradients, now=lambda: self.at, **options)


def test_a_run_by_the_clock_ends_on_time_with_its_rate_at_the_end(tmp_path: Path) -> None:
    training = Training(steps=10**6, clock_seconds=60, warmup=0.1, decay=0.4, log_every=1, eval_every=10**6)
    clock = Ticks(1.5, 2.5)
    assert clock.train(tmp_path, training)
    log = rows(tmp_path)
    assert 56 <= clock.at <= 60
    rates = [row["lr"] for row in log]
    assert max(rates) == 1 and rates[-1] < 0.15 and rates[0] < 0.1
    assert (tmp_path / "weights.pt").exists() and not (tmp_path / "training.pt").exists()


def test_a_stopped_run_by_the_clock_goes_on_bit_for_bit(tmp_path: Path) -> None:
    training = Training(steps=10**6, clock_seconds=20, log_every=3)
    whole, cut = Ticks(1.0), Ticks(1.0)
    assert whole.train(tmp_path / "whole", training)
    assert not cut.train(tmp_path / "cut", training, stop=lambda done: done == 7)
    cut.at, cut.model = 1000.0, Toy(seed=1)  # what lies between does not count
    cut.model.shared.data.copy_(whole.model.shared)
    assert cut.train(tmp_path / "cut", training, resume=True)
    assert same(whole.model, cut.model)
    assert rows(tmp_path / "whole")[-1]["step"] == rows(tmp_path / "cut")[-1]["step"] == 20


def test_checkpoints_may_follow_the_clock(tmp_path: Path) -> None:
    training = Training(steps=9, checkpoint_every=10**6, checkpoint_seconds=2.5)
    kept = []

    def look(done: int) -> bool:
        kept.append(
            torch.load(tmp_path / "training.pt")["step"] if (tmp_path / "training.pt").exists() else 0
        )
        return False

    Ticks(1.0).train(tmp_path, training, stop=look)
    assert kept == [0, 0, 0, 3, 3, 3, 6, 6]


def test_each_parameter_is_stepped_once_and_frozen_ones_never() -> None:
    model = Toy()
    muon, adam = make_optimizers(model, TRAINING)
    assert muon.param_groups[0]["params"] == [model.matrix]
    embeddings, vectors = adam.param_groups
    assert [id(weight) for weight in embeddings["params"]] == [id(model.embeddings), id(model.lm_head)]
    assert vectors["params"] == [model.vector] and vectors["weight_decay"] == 0


def test_rows_hold_scalars_and_measurements(tmp_path: Path) -> None:
    progress = io.StringIO()
    assert train(
        Toy(), tmp_path, measure=lambda: {"accepted": 2.5}, describe=lambda row: f"accepted {row['accepted']}",
        progress=progress,
    )  # fmt: skip
    log = rows(tmp_path)
    assert [row["step"] for row in log] == [3, 6, 9, 12]
    assert list(log[1]) == ["step", "loss", "right", "grad_norm", "lr", "tokens_per_s", "accepted"]
    assert "accepted" not in log[0] and log[-1]["loss"] < log[0]["loss"]
    lines = progress.getvalue().splitlines()
    assert len(lines) == 4 and "accepted" not in lines[0] and lines[1].endswith("min left  accepted 2.5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "weights.pt"]


def test_a_stopped_run_goes_on_bit_for_bit_without_the_frozen_weights(tmp_path: Path) -> None:
    whole, cut, resumed = Toy(), Toy(), Toy(seed=1)
    train(whole, tmp_path / "whole")
    assert not train(cut, tmp_path / "cut", stop=lambda done: done == 7)
    assert not (tmp_path / "cut" / "weights.pt").exists()
    assert "shared" not in torch.load(tmp_path / "cut" / "training.pt")["model"]
    resumed.shared.data.copy_(whole.shared)
    assert train(resumed, tmp_path / "cut", resume=True)
    assert same(whole, resumed)
    kept = [{name: row[name] for name in row if name != "tokens_per_s"} for row in rows(tmp_path / "cut")]
    straight = [
        {name: row[name] for name in row if name != "tokens_per_s"} for row in rows(tmp_path / "whole")
    ]
    assert [row for row in kept if row["step"] != 7] == straight


def test_a_run_has_not_finished_until_its_weights_are_saved(tmp_path: Path) -> None:
    def full_disk() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        train(Toy(), tmp_path, save=full_disk)
    assert (tmp_path / "training.pt").exists()
    assert train(Toy(), tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "weights.pt"]


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    train(Toy(), tmp_path, stop=lambda done: done == 2)
    model = Toy()
    model.vector.requires_grad_(False)
    with pytest.raises(ValueError, match="other parameters than this run trains"):
        train(model, tmp_path, resume=True)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, resumed, torch_save = Toy(), Toy(), torch.save
    train(whole, tmp_path / "whole")

    def half(state: dict[str, Any], path: Path) -> None:
        torch_save(state, path)
        if state["step"] > 4:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    cut = tmp_path / "cut"
    with pytest.raises(OSError, match=r"^.*training\.pt could not be written .*No space left on device.*$"):
        train(Toy(), cut)
    monkeypatch.undo()
    assert sorted(path.name for path in cut.iterdir()) == ["log.jsonl", "training.pt"]
    assert torch.load(cut / "training.pt")["step"] == 4
    assert train(resumed, cut, resume=True) and same(whole, resumed)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    def fill(done: int) -> bool:
        if done == 5:
            (tmp_path / "log.jsonl").unlink()
            (tmp_path / "log.jsonl").symlink_to("/dev/full")
        return False

    with pytest.raises(OSError, match=r"^.*log\.jsonl could not be written .*No space left on device\)$"):
        train(Toy(), tmp_path, stop=fill)
    assert torch.load(tmp_path / "training.pt")["step"] == 4


def test_a_row_cut_short_is_dropped_on_resuming(tmp_path: Path) -> None:
    train(Toy(), tmp_path, stop=lambda done: done == 7)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 9, "loss": 1.0}\n{"step": 12, "lo')
    train(Toy(), tmp_path, resume=True)
    assert [row["step"] for row in rows(tmp_path)] == [3, 6, 7, 9, 12]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_kept(tmp_path: Path) -> None:
    model = Toy()

    def gradients(step: int) -> dict[str, Tensor]:
        model.zero_grad()
        loss = model.matrix.sum() * (float("nan") if step >= 6 else 1.0)
        loss.backward()
        return {"loss": loss}

    with pytest.raises(FloatingPointError, match="the loss is nan at step 8"):  # not logged, but kept
        train(model, tmp_path, gradients=gradients)
    assert torch.load(tmp_path / "training.pt")["step"] == 4


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group("cpu") as device:
        assert device == torch.device("cpu") and ranks() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="with torchrun"), process_group("cpu"):
        pass


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.train.test_run", str(tmp_path)], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two, other = Toy(), Toy(), Toy()
    train(one, tmp_path / "one", measure=lambda: {"asked": 0})
    for rank, model in enumerate((two, other)):
        model.load_state_dict(torch.load(tmp_path / f"rank{rank}.pt"))
    assert same(two, other)
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["log.jsonl", "weights.pt"]
    joint = rows(tmp_path / "two")
    assert [row["step"] for row in joint] == [3, 5, 6, 9, 12] and joint[-1]["asked"] == 0
    by_step = {row["step"]: row for row in joint}
    for row in rows(tmp_path / "one"):
        assert all(
            row[name] == pytest.approx(by_step[row["step"]][name], rel=1e-4) for name in ("loss", "right")
        )


def two_ranks(out: Path) -> None:
    """What each of the processes does: train, stop when rank 0 says so, go on to the end."""
    with process_group("cpu"):
        rank, _ = ranks()
        first = Toy(seed=rank)  # the shared one aside, rank 0's weights are everybody's
        first.shared.data.copy_(Toy().shared)
        assert not train(first, out / "two", stop=lambda done: rank == 0 and done == 5)
        model = Toy()
        measure = {"measure": lambda: {"asked": rank}}
        assert train(model, out / "two", resume=True, progress=sys.stderr, **measure)
        assert (out / "two" / "weights.pt").exists()
        torch.save(model.state_dict(), out / f"rank{rank}.pt")
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not any("gloo" in name for name in threads), threads  # one may abort the process while Python ends


if __name__ == "__main__":
    faulthandler.dump_traceback_later(50, exit=True)  # where it hangs, rather than a process without a parent
    torch.set_num_threads(1)
    two_ranks(Path(sys.argv[1]))
