"""The tokenizer of a checkpoint directory, and what its tokens add to a text."""

import itertools
from pathlib import Path

from tokenizers import Tokenizer

from tinystories.checkpoint import TOKENIZER, reading

END_OF_TEXT = "<|endoftext|>"
UNFINISHED = "\ufffd"  # what decoding gives for some of the tokens of a character


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens stands at the last of its."""
    ends = range(len(ids) + 1)
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in ends]
    texts = [text.rstrip(UNFINISHED) for text in texts]
    return [text[len(before) :] for before, text in itertools.pairwise(texts)]


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory; InputError if broken or if a token is not below vocab_size."""
    path = directory / TOKENIZER
    remedy = "let `AutoTokenizer` of transformers write the one of this network"
    with reading(path, "no tokenizer for this network", remedy):
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        largest = max(tokenizer.get_vocab().values())
        if largest >= vocab_size:
            raise ValueError(f"token {largest} where config.json has vocab_size {vocab_size}")
    return tokenizer
