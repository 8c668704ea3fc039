"""Between rounds, too, the host asks the device for nothing: whoever joins or leaves keeps nobody waiting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specla.drafters import EagleDrafter
from specla.engine import resident
from specla.engine.params import SamplingParams
from specla.engine.resident import ResidentEngine
from specla.resident import eagle
from tests.resident import DEVICE
from tests.resident.test_eagle import PROMPTS, SPECULATION, make_network
from tests.targets import make_target

PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=1.0, top_k=5, min_p=0.1, seed=1, stop_token_ids=(3,)),
    SamplingParams(max_tokens=9, repetition_penalty=1.2, num_speculative_tokens=2),
]


class Waits(TorchFunctionMode):
    """Fails where torch on a GPU would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self._of_host: list[Tensor] = []  # made from numbers, and not on their way yet

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        assert name not in {"item", "tolist", "numpy", "cpu", "nonzero", "equal", "__bool__"}, name
        if name == "tensor":
            assert "device" not in options, "torch.tensor(.., device=..) waits"
        if name == "__setitem__" and isinstance(args[2], (int, float, bool)):
            assert args[0][args[1]].dim() > 0, "an assignment of a number to an element waits"
        of_host = any(x is y for x in args for y in self._of_host)
        if name not in {"__len__", "__get__", "element_size", "empty_like", "split"} and not options.get(
            "non_blocking"
        ):
            assert not of_host, f"{name} of the host's numbers waits"
        made = func(*args, **options)
        if name == "tensor":
            self._of_host.append(made)
        if name == "split" and of_host:
            self._of_host += made
        if name == "to":
            self._of_host = [x for x in self._of_host if x is not args[0]]
        return made


def make(monkeypatch: pytest.MonkeyPatch) -> ResidentEngine:
    if DEVICE.type == "cpu":
        for module in (resident, eagle):
            monkeypatch.setattr(module, "takes_prompt", lambda state: True)
    drafter = EagleDrafter(make_network().to(DEVICE), 6, 4, 2, max_num_seqs=3)
    return ResidentEngine(copy.deepcopy(make_target("plain")).to(DEVICE), drafter, SPECULATION, 3)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU tells by itself")
def test_joining_and_leaving_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(monkeypatch)
    monkeypatch.setattr(engine.captures, "capture", lambda work, warm_up: lambda: None)
    engine.prepare(PARAMS[0])
    sequences = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    with Waits():
        engine.admit()
        assert [sequence.failure for sequence in sequences] == [None] * 3 and engine.running == sequences
        for sequence in sequences:
            engine.release(sequence)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x[1].item(), lambda x: x.tolist(), lambda x: bool(x[0] == 1), lambda x: x.__setitem__(0, 2.0),
        lambda x: torch.tensor([1], device=x.device), lambda x: x.copy_(torch.tensor([1.0, 2.0])),
        lambda x: torch.tensor([1.0]).to(x.device),
        lambda x: x.copy_(torch.tensor([1.0, 2.0, 3.0]).split(2)[0]),
        lambda x: x.index_fill_(0, torch.tensor([1]), 2.0),
    ],
)  # fmt: skip
def test_waiting_would_be_noticed(waiting: Any) -> None:
    with pytest.raises(AssertionError), Waits():
        waiting(torch.zeros(2))
    with Waits():
        x = torch.zeros(2)
        x[:1] = 2.0
        x.copy_(torch.tensor([1.0, 2.0]), non_blocking=True)
        x.index_fill_(0, torch.tensor([1]).to(x.device, non_blocking=True), 2.0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_whole_lives_wait_for_rounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(monkeypatch)

    def run() -> list[list[int]]:
        sequences = [
            engine.add(prompt, params) for prompt, params in zip(PROMPTS * 2, PARAMS * 2, strict=True)
        ]
        while engine.has_work:
            engine.step()
        return [sequence.output for sequence in sequences]

    expected = run()  # and captures
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run() == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
