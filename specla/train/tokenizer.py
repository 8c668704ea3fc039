"""Training of a byte-level BPE tokenizer on an even sample of a corpus.

Words take one leading character (space, bracket, dot) with them, digits stand alone, indentation is one
token, and
nothing reaches over the end of a line: a prompt cut after a line tokenises as it did in training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specla.tokenizer import LARGEST, Tokenizer, load_tokenizer
from specla.train.corpus import (
    CHAT_TEMPLATE,
    END,
    ROLE_MARKERS,
    CorpusFile,
    Paths,
    corpus_files,
    read_documents,
)

SPECIAL_TOKENS = (END, *ROLE_MARKERS.values(), *(f"<|reserved_{i}|>" for i in range(4)))
MAX_TOKEN_LENGTH = 20  # characters; longer ones are rules and banners
WORDS = "|".join(
    (
        r"'(?i:[sdmt]|ll|re|ve)(?!\p{L})",  # 's 'll, but not the start of a quoted word
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # indentation, less the space that goes with the word
        r"\s+",
    )
)


def train_tokenizer(
    data: Paths,
    vocab_size: int = 8192,
    out_dir: str | Path = "tokenizer",
    *,
    split: str | None = "train",
    sample_bytes: int = 64_000_000,
    seed: int = 0,
) -> Tokenizer:
    """Train on about `sample_bytes` of UTF-8 text of the corpus, save to `out_dir`, and load what was saved.

    data, split: as in `corpus_files`. The sample takes whole documents in a random order, the same share from
    each category as far as it has so much. Writes tokenizer.json and tokenizer_config.json; <|endoftext|> (id
    0) is BOS and EOS and is never added to a text. ValueError when the corpus has too little text for
    `vocab_size` tokens.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if not smallest <= vocab_size <= LARGEST:
        raise ValueError(
            f"vocab_size is {vocab_size}, expected at least {smallest} (256 bytes and the special tokens) "
            f"and at most {LARGEST}"
        )
    if sample_bytes <= 0:
        raise ValueError(f"sample_bytes is {sample_bytes}, expected a number > 0")
    try:
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer as JsonTokenizer,
            decoders,
            models,
            pre_tokenizers,
            trainers,
        )
    except ImportError as error:
        raise ValueError(
            "training a tokenizer needs the package tokenizers: pip install tokenizers"
        ) from error

    tokenizer = JsonTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_LENGTH,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(corpus_files(data, split), sample_bytes, seed), trainer)
    learned = tokenizer.get_vocab_size()
    if learned != vocab_size:
        raise ValueError(
            f"the corpus is too small: it gives {learned} tokens of the {vocab_size} wanted (vocab_size)"
        )

    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return load_tokenizer(out)


def sample_texts(files: Sequence[CorpusFile], sample_bytes: int, seed: int) -> list[str]:
    """Texts of randomly chosen documents (markers left out), about `sample_bytes` in all.

    Each category gives the same share, as far as it has so much.
    """
    categories: dict[str, list[CorpusFile]] = {}
    for file in files:
        categories.setdefault(file.category, []).append(file)
    sample: list[str] = []
    left = float(sample_bytes)
    # Smallest first, so that what a small category cannot give is shared by the others.
    by_size = sorted(
        categories, key=lambda name: (sum(file.path.stat().st_size for file in categories[name]), name)
    )
    for done, category in enumerate(by_size):
        texts = [
            "\n".join(text for _, text in document.parts) for document in read_documents(categories[category])
        ]
        budget = left / (len(categories) - done)
        for i in np.random.default_rng([seed, done]).permutation(len(texts)):
            if budget <= 0:
                break
            sample.append(texts[i])
            size = len(texts[i].encode())
            budget -= size
            left -= size
    return sample
