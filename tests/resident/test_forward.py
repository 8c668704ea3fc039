"""Laws of the layers on draft trees in fixed launches: what `target.verify` says, round after round, and no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.target import Tap
from specla.ops import triton as kernels
from specla.resident.forward import Layers, Round, head, read_trees, supports
from specla.resident.slots import DEFERRED
from specla.tree import Tree
from tests.ops.strategies import SHAPES, close, path_to, random_parent, same_bits
from tests.ops.triton import DEVICE, full_size
from tests.resident import ints
from tests.targets import VARIANTS, VOCAB, build_target, make_config, make_target, prompt

FITTING = [v for v in VARIANTS if not v.startswith("hybrid") and v not in ("no_conv", "conv_1")]
SPOILT = VOCAB - 1  # a token that padding holds


def small(variant: str, layers: int) -> GatedDeltaNet:
    """A target on the CPU whose embedding of one token is NaN."""
    width = None if variant == "default_mlp" else 24
    config = make_config(variant, hidden_size=16, intermediate_size=width, num_hidden_layers=layers)
    made = build_target(config)
    if made.lm_head is not None:
        made.embeddings.weight[SPOILT] = torch.nan
    return made


def parts(layers: Layers) -> list[Tensor]:
    state, windows, factors, inputs, *_ = layers
    return [state, windows, *factors, inputs]


def left(layers: Layers, turn: int) -> list[Tensor]:
    """What the bank of a turn holds, of all layers."""
    banks = [layers.layer(i).bank(turn) for i in range(len(layers.state))]
    return [x.clone() for bank in banks for x in (*bank.factors, bank.conv_inputs)]


def trees(rows: list[int], size: int, rng: torch.Generator) -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """Parents of each row, and tokens, parent and num_nodes with garbage where there is padding."""

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=rng))

    parents = [random_parent(SHAPES[below(len(SHAPES))], size - below(2), rng) for _ in rows]
    tokens = torch.full((len(rows), size), SPOILT, dtype=torch.int32)
    parent = torch.randint(-(2**31), 2**31, tokens.shape, generator=rng).int()
    for b, row in enumerate(parents):
        parent[b, : len(row)] = torch.tensor(row)
        if rows[b] >= 0:
            tokens[b, : len(row)] = torch.randint(VOCAB - 1, (len(row),), generator=rng)
    return parents, tokens.to(DEVICE), parent.to(DEVICE), ints([len(row) for row in parents])


@pytest.mark.parametrize(
    ("variant", "mode", "rows"),
    [
        *((v, "auto", [-1, 1]) for v in FITTING),
        *(("plain", mode, [0, -1, 2]) for mode in ("hybrid", "parallel")),
    ],
)
def test_rounds_are_those_of_the_target(variant: str, mode: str, rows: list[int]) -> None:
    """Logits, features and states, whatever is accepted; slots of nobody and padding hold NaN and leave none."""
    rng, size = torch.Generator().manual_seed(len(variant)), 4
    target = small(variant, 2 if variant == "plain" and mode == "auto" else 1)
    moved, ids = copy.deepcopy(target).to(DEVICE), range(len(target.layers) + 1)
    live = [slot for slot in rows if slot >= 0]
    nobody = [slot for slot in range(len(rows) + 1) if slot not in live]
    pool, mine = target.new_pool(len(rows) + 1, size + 1), moved.new_pool(len(rows) + 1, 1)
    (group,), (own,) = pool.groups.values(), mine.groups.values()
    layers, room = Layers.of(own, size + 1), size + 1
    for x in parts(layers):
        x.fill_(torch.nan)
    for slot in live:
        target.prefill(torch.tensor(prompt(3 + slot, slot, VOCAB - 1)), slot, pool)
        layers.state[:, slot], layers.conv_state[:, slot] = group.state[:, slot], group.conv_state[:, slot]
    path, count = ints([[10**9] * (size + 1)] * len(rows)), ints([0] * len(rows))
    pending = path.clone()
    for turn in (0, 1, 0):
        parents, tokens, parent, num_nodes = trees(rows, size, rng)
        before, other = [x.clone() for x in parts(layers)], left(layers, 1 - turn)
        wide = torch.full((len(rows) * size, 20 * len(ids)), -77.0, device=DEVICE)
        taps = {i: wide[:, 20 * i : 20 * i + 16] for i in ids}
        now = Round(Tree.resident(parent, num_nodes), ints(rows), path, count, pending, count, turn, mode)
        hidden = read_trees(moved, layers, tokens, now, taps)
        logits = head(moved, hidden).view(len(rows), size, -1).cpu()
        assert hidden.dtype == logits.dtype == torch.float32
        assert (wide.view(-1, 20)[:, 16:] == -77).all()
        for slot in live:
            real = slice(0, len(parents[slot]))
            read: list[Tensor] = []
            own_tokens = tokens[slot : slot + 1, real].long().cpu()
            want = target.verify(
                own_tokens, Tree(parents[slot]), [slot], pool, "serial", Tap(tuple(ids), read.append)
            )
            features = torch.cat([taps[i].unflatten(0, (len(rows), size))[slot, real] for i in ids], -1)
            close(logits[slot, real], want[0], 1e-4)
            close(features.cpu(), read[0][0], 1e-4)
            close(layers.state[:, slot].cpu(), group.state[:, slot], 1e-4)
            close(layers.conv_state[:, slot].cpu(), group.conv_state[:, slot], 1e-4)
            end = int(torch.randint(len(parents[slot]), (1,), generator=rng))
            taken = path_to(parents[slot], end)
            path[slot, : len(taken)], count[slot] = ints(taken), len(taken)
            pending[slot, : len(taken)] = ints(taken) + turn * room
            pool.accept([slot], torch.tensor([taken]), [len(taken) - 1])
        for x, old in zip(parts(layers), before, strict=True):
            assert same_bits(x[:, nobody], old[:, nobody])
        assert all(same_bits(x, old) for x, old in zip(left(layers, 1 - turn), other, strict=True))


@pytest.mark.parametrize("banks", [2, 4])
def test_banks_are_empty_and_share_nothing(banks: int) -> None:
    (group,) = make_target("grouped_wide").new_pool(2, 1).groups.values()
    layers = Layers.of(group, 5, banks)
    assert layers.state is group.state and layers.conv_state is group.conv_state
    assert not any(x.any() for x in parts(layers)[2:])
    for turn in range(banks):
        bank = layers.layer(0).bank(turn)
        for x in bank.factors:
            assert x.shape[:2] == (2, 5)
            x += 1 + turn
        bank.conv_inputs.fill_(turn)
    numbers = torch.arange(1, 1 + banks).repeat_interleave(5)
    assert all((x[0].flatten(2) == numbers[:, None]).all() for x in layers.factors)
    assert (layers.conv_inputs[0, :, :, 0] == torch.arange(banks - 2, banks).repeat_interleave(5)).all()


@pytest.mark.parametrize(("size", "turns"), [(1, 9), (3, 6)])
def test_a_state_that_is_not_due_is_read_with_what_is_pending_and_written_later(
    size: int, turns: int
) -> None:
    """Chains of which some nodes are taken: logits have the bits of rounds that write all states."""
    target, rows = copy.deepcopy(small("plain", 2)).to(DEVICE), [0, -1, 2]
    first, second = (
        Layers.of(*target.new_pool(3, 1).groups.values(), max_nodes=size, banks=banks) for banks in (2, 4)
    )
    for layers in (first, second):
        layers.state.copy_(torch.randn(layers.state.shape, generator=torch.Generator().manual_seed(0)))
    tree = Tree.resident(ints([[*range(-1, size - 1)]] * 3), ints([size] * 3))
    path = ints([[*range(size)]] * 3)
    waiting: list[int] = []
    taken, lag = 0, 0
    for turn in range(turns):
        due, before = lag == 3 or len(waiting) > DEFERRED, second.state.clone()
        tokens = ints([[(turn + n) % SPOILT for n in range(size)]] * 3)
        tokens[1] = SPOILT
        plain = Round(
            tree, ints(rows), path, ints([taken] * 3), path + (turn + 1) % 2 * size, ints([taken] * 3), turn % 2
        )  # fmt: skip
        pending = ints([waiting + [10**9] * (size + DEFERRED - len(waiting))] * 3)
        lazy = plain._replace(
            pending_path=pending,
            num_pending=ints([len(waiting)] * 3),
            turn=turn % 4,
            due=ints([int(due)] * 3),
        )
        want, got = (
            head(target, read_trees(target, layers, tokens, now)).view(3, size, -1)[[0, 2]]
            for layers, now in ((first, plain), (second, lazy))
        )
        assert same_bits(got, want) and got.isfinite().all()
        assert same_bits(second.state, before) == (not due)
        assert not due or same_bits(second.state[:, [0, 2]], first.state[:, [0, 2]])
        waiting, lag, taken = [] if due else waiting, 0 if due else lag, 1 + turn % size
        waiting, lag = waiting + [turn % 4 * size + n for n in range(taken)], lag + 1
    assert same_bits(second.conv_state, first.conv_state)


def test_targets_without_kernels_for_every_layer_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not supports(make_target("plain")), "on a CPU"
    monkeypatch.setattr(kernels, "use_kernels", lambda state: state.dtype != torch.float64)
    for variant in VARIANTS:
        assert supports(make_target(variant)) == (variant in FITTING), variant
        assert not supports(make_target(variant, torch.float64))
    assert supports(make_target("plain", torch.bfloat16))
    assert not supports(GatedDeltaNet(make_config(conv_size=5)))
    for wide in ({"head_dim": 513}, {"head_dim": 257, "expand_v": 2.0}):
        with torch.device("meta"):
            assert not supports(GatedDeltaNet(make_config(**wide)))


def big(seed: int = 0) -> GatedDeltaNet:
    sizes = {
        "hidden_size": 256,
        "num_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 704,
    }
    config = make_config(**sizes, vocab_size=3000, initializer_range=0.1)
    return build_target(config, torch.bfloat16, seed).to(DEVICE)


@full_size
def test_a_nodes_logits_have_the_bits_of_plain_decoding_whatever_lies_beside_it() -> None:
    """Trees of 8 nodes in a batch of 33 rows, both exact modes; plain decoding reads one token of one row a round."""
    target, size, slots = big(), 8, 33
    rng = torch.Generator().manual_seed(0)
    pools = [target.new_pool(slots, 1) for _ in range(2)]
    first, second = (Layers.of(*pool.groups.values(), max_nodes=size) for pool in pools)
    for slot in range(slots):
        target.prefill(torch.tensor(prompt(5 + slot, slot, 3000), device=DEVICE), slot, pools[0])
    second.state.copy_(first.state)
    second.conv_state.copy_(first.conv_state)
    rows, path, count = ints(list(range(slots))), ints([[0] * size] * slots), ints([0] * slots)
    pending = path.clone()
    for turn in range(4):
        parents = [random_parent(SHAPES[slot % len(SHAPES)], size, rng) for slot in range(slots)]
        tokens = torch.randint(3000, (slots, size), generator=rng).int().to(DEVICE)
        tree = Tree.resident(ints(parents), ints([size] * slots))
        now = Round(tree, rows, path, count, pending, count, turn % 2)
        logits, other = (
            head(target, read_trees(target, layers, tokens, now._replace(mode=mode)))
            for layers, mode in ((first, "serial"), (second, "hybrid"))
        )
        assert same_bits(logits, other)
        taken = [path_to(parent, size - 1 - turn) for parent in parents]
        for slot in (0, 7, slots - 1):
            alone = Layers.of(*target.new_pool(1, 1).groups.values(), max_nodes=2)
            alone.state.copy_(first.state[:, slot : slot + 1])
            alone.conv_state.copy_(first.conv_state[:, slot : slot + 1])
            for n, node in enumerate(taken[slot]):
                root = Tree.resident(ints([[-1]]), ints([1]))
                some, last = ints([min(n, 1)]), ints([[(n + 1) % 2 * 2]])
                now = Round(root, ints([0]), ints([[0]]), some, last, some, n % 2)
                got = head(target, read_trees(target, alone, tokens[slot, node].view(1, 1), now))
                assert same_bits(got[0], logits[slot * size + node])
        path.copy_(ints([ids + [0] * (size - len(ids)) for ids in taken]))
        pending.copy_(path + turn % 2 * size)
        count.copy_(ints([len(ids) for ids in taken]))
