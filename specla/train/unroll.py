"""Drafting as training sees it: every token of a text is the start of a chain, and all chains grow together.

Step 0 reads the text with the target's features. In step r the chain that starts at token p reads the token after
p + r with the layer's own output of the step before, and remembers the text up to p and its own r tokens: what
drafting does when every draft is right. Source: EAGLE-3's training-time test (arXiv 2503.01840), here for a delta
layer too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.drafters.memory import own_scores, scores, weigh
from specla.ops.chunk import ChunkedText, chunk_text
from specla.ops.elementwise import l2norm, silu


class Unrolled:
    """The past of all chains of a text of `length` tokens; `advance` begins the next step. Differentiable."""

    def __init__(self, length: int, device: torch.device, chunk_size: int = 64):
        self.step = 0
        self.chunk_size = chunk_size
        self._starts = torch.arange(length, device=device)
        self._inputs: list[Tensor] = []  # of the convolution: the text's, then each step's
        self._text: ChunkedText | None = None
        self._nodes: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # keys, corrected values, log-decay since the start
        self._keys_values: list[tuple[Tensor, Tensor]] = []  # of the text, then of each step

    def advance(self) -> None:
        self.step += 1

    @property
    def positions(self) -> Tensor:
        return (self._starts + self.step)[None]

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._inputs.append(x)
        text, *own = self._inputs
        y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
        for back, factor in enumerate(weight.flip(1).unbind(1)):
            if back < len(own):
                y = y + own[-1 - back] * factor
            else:
                shifted = torch.nn.functional.pad(text, (0, 0, back - len(own), 0))
                y = y + shifted[:, : text.shape[1]] * factor
        return silu(y)

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
        if self.step == 0:
            self._text = chunk_text(k, v, g, beta, chunk_size=self.chunk_size)
            return self._text.read(q[:, :, :, None])[:, :, :, 0]
        assert self._text is not None
        total = g if self.step == 1 else g + self._nodes[-1][2]
        from_key, from_query = (
            self._text.read(torch.stack([k, q], 3)) * total.exp()[..., None, None]
        ).unbind(3)
        for key, value, before in self._nodes:
            fade = (total - before).exp()
            from_key = from_key + ((key * k).sum(-1) * fade)[..., None] * value
            from_query = from_query + ((key * q).sum(-1) * fade)[..., None] * value
        value = beta[..., None] * (v - from_key)
        self._nodes.append((k, value, total))
        return from_query + (k * q).sum(-1, keepdim=True) * value

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        self._keys_values.append((k, v))
        (keys, values), *own = self._keys_values
        starts = self._starts[:, None]
        visible = self._starts <= starts
        if window is not None:
            visible = visible & (self._starts > starts + self.step - window)
            own = own[-window:]
        seen = scores(q, keys).masked_fill(~visible[:, None], -torch.inf)
        if not own:
            return weigh([seen], [values], q)
        own_keys, own_values = (torch.stack(parts, 2) for parts in zip(*own, strict=True))
        return weigh([seen, own_scores(q, own_keys)], [values, own_values], q)
