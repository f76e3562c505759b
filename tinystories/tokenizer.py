"""The tokenizer of a checkpoint directory, from whichever files it has.

    tokenizer.json              everything, as it stands
    vocab.json and merges.txt   byte-level BPE: GPT-2's, or RoBERTa's if it has <s> and </s>

TinyStories-33M has the older two. What they leave open is as the networks were trained, or as
`tokenizer_config.json` says.
"""

import itertools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tinystories.checkpoint import TOKENIZER_OPTIONS, read_json, reading, tokenizer_files

END_OF_TEXT = "<|endoftext|>"
UNFINISHED = "\ufffd"  # what decoding gives for some of the tokens of a character
START, END = "<s>", "</s>"
SPECIAL = (END_OF_TEXT, START, "<pad>", END, "<unk>", "<mask>")


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a prompt, without those that a tokenizer adds behind a text, where it would end."""
    encoding = tokenizer.encode(text)
    added = encoding.special_tokens_mask  # 1 where a token is not of the text
    while added and added[-1]:
        added.pop()
    return encoding.ids[: len(added)]


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens stands at the last of its."""
    ends = range(len(ids) + 1)
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in ends]
    texts = [text.rstrip(UNFINISHED) for text in texts]
    return [text[len(before) :] for before, text in itertools.pairwise(texts)]


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory; InputError if broken or if a token is not below vocab_size."""
    files = tokenizer_files(directory)
    missing = [path for path in files if not path.exists()]
    path = (missing or files)[0]
    remedy = "let `AutoTokenizer` of transformers write the one of this network"
    with reading(path, "no tokenizer for this network", remedy):
        if path.name == "tokenizer.json":
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        else:
            tokenizer = older_tokenizer(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        largest = max(tokenizer.get_vocab().values())
        if largest >= vocab_size:
            raise ValueError(f"token {largest} where config.json has vocab_size {vocab_size}")
    return tokenizer


def older_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of GPT-2 or RoBERTa from vocab.json, with merges.txt beside it."""
    file = path.with_name(TOKENIZER_OPTIONS)
    options = read_json(file) if file.exists() else {}
    tokenizer = Tokenizer(models.BPE.from_file(str(path), str(path.with_name("merges.txt"))))
    space = bool(options.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    special = [name for name in SPECIAL if tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    if START in special:
        ends = [(name, tokenizer.token_to_id(name)) for name in (START, END)]
        tokenizer.post_processor = TemplateProcessing(f"{START} $A {END}", special_tokens=ends)
    return tokenizer
