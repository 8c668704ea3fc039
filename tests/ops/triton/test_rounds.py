"""Many rounds of speculation, each from what the last one accepted, have the bits of plain one-token decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from specla.ops.factors import Factors, Pending
from specla.ops.triton.commit import commit
from specla.ops.triton.tuning import Config
from specla.ops.triton.verify import verify
from specla.tree import Tree
from tests.ops.strategies import make_inputs, path_to, random_parent, same_bits, tree_of
from tests.ops.triton import DEVICE, full_size
from tests.ops.triton.test_verify import EXACT_CONFIGS, SERIAL


class Story:
    """Tokens with fixed inputs: what a token is made of depends on its place and its kind alone."""

    def __init__(self, batch: int, heads: tuple[int, int], dims: tuple[int, int], seed: int):
        rng = torch.Generator().manual_seed(seed)
        dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
        made = make_inputs(rng, batch, 251, heads, dims, "mild", torch.float32)
        self.inputs = {
            name: x.to(DEVICE, x.dtype if name in ("g", "beta") else dtype) for name, x in made.items()
        }
        self.rows = torch.arange(batch, device=DEVICE)[:, None]

    def at(self, position: Tensor, kind: Tensor) -> dict[str, Tensor]:
        """Inputs of tokens, `[B, N]` of each."""
        number = ((position * 7 + kind * 3) % 251).to(DEVICE)
        return {name: x[self.rows, number] for name, x in self.inputs.items()}


def random_rounds(
    rounds: int, story: Story, state: Tensor, sizes: tuple[int, ...], configs: list[Config], seed: int
) -> tuple[list[list[int]], list[Tensor]]:
    """Verify a random tree a round and accept a random path of it: the accepted tokens and outputs of each row.

    What was accepted is pending in the next round; after the last, all is committed.
    """
    rng, batch = torch.Generator().manual_seed(seed), state.shape[0]

    def below(limit: int) -> int:
        return int(torch.randint(0, limit, (1,), generator=rng))

    tokens: list[list[int]] = [[] for _ in range(batch)]
    outs: list[list[Tensor]] = [[] for _ in range(batch)]
    pending = nothing_pending(story, state)
    for turn in range(rounds):
        size = sizes[below(len(sizes))]
        rows = [
            random_parent(("random", "comb", "bushy", "chain")[below(4)], 1 + below(size), rng)
            for _ in range(batch)
        ]
        tree, kinds = tree_of(rows, size), torch.randint(0, 5, (batch, size), generator=rng)
        position = torch.tensor([len(row) for row in tokens])[:, None] + tree.depth.clamp(min=0)
        o, factors = step(
            story.at(position, kinds), tree.to(DEVICE), configs[turn % len(configs)], state, pending
        )
        path, count = torch.zeros(batch, size, dtype=torch.int32), []
        for b, row in enumerate(rows):
            ids = path_to(row, below(len(row)))[: below(8)]
            path[b, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            count.append(len(ids))
            tokens[b] += kinds[b, ids].tolist()
            outs[b].append(o[b, ids])
        pending = Pending(factors, path.to(DEVICE), torch.tensor(count, dtype=torch.int32, device=DEVICE))
    commit(state, *pending)
    return tokens, [torch.cat(row) for row in outs]


def nothing_pending(story: Story, state: Tensor) -> Pending:
    batch, heads, dim_v, dim_k = state.shape
    shapes = ((story.inputs["k"].shape[2], dim_k), (heads, dim_v), (heads,))
    zero = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    return Pending(Factors(*(state.new_zeros(batch, 1, *shape) for shape in shapes)), zero[:, None], zero)


def step(
    inputs: dict[str, Tensor], tree: Tree, config: Config, state: Tensor, pending: Pending
) -> tuple[Tensor, Factors]:
    rest = {"scale": state.shape[3] ** -0.5, "normalise": True}
    return verify(**inputs, tree=tree, config=config, state=state, pending=pending, **rest)


def plain_decoding(tokens: list[list[int]], story: Story, state: Tensor, config: Config) -> list[Tensor]:
    """The outputs of the same tokens, read one a call; a row that has ended reads on, and commits nothing."""
    length = max(map(len, tokens))
    kinds = torch.tensor([row + [0] * (length + 1 - len(row)) for row in tokens], device=DEVICE)
    ends = torch.tensor([len(row) for row in tokens], device=DEVICE)
    tree, pending, outs = Tree.chain(1, len(tokens)).to(DEVICE), nothing_pending(story, state), []
    for t in range(length + 1):  # the last call commits the last token
        position = torch.full((len(tokens), 1), t, device=DEVICE)
        o, factors = step(story.at(position, kinds[:, t : t + 1]), tree, config, state, pending)
        pending = Pending(factors, torch.zeros_like(pending.path), (ends > t).int())
        outs.append(o[:, 0])
    whole = torch.stack(outs, 1)
    return [whole[b, : len(row)] for b, row in enumerate(tokens)]


def assert_rounds_are_plain_decoding(
    rounds: int, batch: int, heads: tuple[int, int], dims: tuple[int, int], sizes: tuple[int, ...],
    configs: list[Config], plain: Config,
) -> None:  # fmt: skip
    story = Story(batch, heads, dims, seed=1)
    start = torch.randn(batch, heads[1], *dims[::-1], generator=torch.Generator().manual_seed(2)).to(DEVICE)
    state, state_plain = start.clone(), start.clone()
    tokens, outs = random_rounds(rounds, story, state, sizes, configs, seed=3)
    assert min(map(len, tokens)) > rounds // 2
    for row, row_plain in zip(outs, plain_decoding(tokens, story, state_plain, plain), strict=True):
        assert same_bits(row.cpu(), row_plain.cpu())
    assert same_bits(state.cpu(), state_plain.cpu()) and state.isfinite().all()


def test_rounds_of_random_trees_have_the_bits_of_plain_decoding() -> None:
    assert_rounds_are_plain_decoding(15, 2, (1, 1), (8, 8), (1, 4, 8), list(EXACT_CONFIGS[::3]), SERIAL)


@full_size
def test_a_thousand_rounds_of_random_trees_have_the_bits_of_plain_decoding() -> None:
    configs = [Config("hybrid", 16, 4, workers=4), Config("serial", 32, 4, prepared=True)]
    assert_rounds_are_plain_decoding(1000, 4, (2, 4), (128, 128), (1, 16), configs, SERIAL)
