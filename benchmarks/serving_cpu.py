"""Eight sequences over one in plain decoding, and what a known beginning of a prompt spares: the bundled model.

python benchmarks/serving_cpu.py
"""

from __future__ import annotations

import time
from statistics import median

import torch

from specla import LLM, SamplingParams
from specla.bench.prompts import read_prompts

REPEATS, TOKENS = 5, 128


def batches() -> None:
    prompts = [prompt.prompt for prompt in read_prompts(None)][:8]
    llm = LLM(drafter="none", speculative_config={"num_speculative_tokens": 0}, max_num_seqs=8)
    llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    seconds: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(REPEATS):
        for number, times in seconds.items():
            start = time.perf_counter()
            llm.generate(prompts[:number], params)
            times.append(time.perf_counter() - start)
    one, eight = (number * TOKENS / median(times) for number, times in seconds.items())
    print(f"{eight:.0f} over {one:.0f} tokens/s = {eight / one:.1f}x, {torch.get_num_threads()} threads")


def beginnings() -> None:
    engine = LLM(max_num_seqs=2, prefix_cache_bytes=256 << 20)._engine
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(20, 4000, (length,), generator=generator).tolist()

    def read(ids: list[int]) -> tuple[float, int]:
        sequence = engine.add(ids, SamplingParams(max_tokens=1))
        start = time.perf_counter()
        engine.admit()
        made = 1000 * (time.perf_counter() - start), sequence.num_cached
        engine.release(sequence)
        return made

    times: dict[str, list[tuple[float, int]]] = {"cold": [], "again": [], "and 20 other tokens": []}
    for _ in range(REPEATS):
        ids = draw(1000)
        for name, prompt in zip(times, (ids, ids, ids + draw(20)), strict=True):
            times[name].append(read(prompt))
    for name, made in times.items():
        print(f"1,000 tokens, {name}: {median(ms for ms, _ in made):.2f} ms, {made[-1][1]} tokens known")


if __name__ == "__main__":
    batches()
    beginnings()
