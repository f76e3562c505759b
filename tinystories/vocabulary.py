"""The tokenizer of a checkpoint directory, from whichever files it has.

    tokenizer.json              everything, as it stands
    vocab.json and merges.txt   byte-level BPE: GPT-2's, or RoBERTa's where there are <s> and </s>
    vocab.txt                   BERT's WordPiece

The older files leave rules unsaid that their networks were trained with: which pieces are special, what surrounds a
text, how it is normalised. `tokenizer_config.json` may change some of them.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tinystories.checkpoint import TOKENIZER_OPTIONS, read_json, read_tokenizer, reading, tokenizer_files
from tinystories.errors import InputError

END_OF_TEXT = "<|endoftext|>"


def read_vocabulary(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory; InputError where a file is absent or broken, or its tokens are not of vocab_size."""
    path, *others = tokenizer_files(directory)
    unsaid = path.with_name(TOKENIZER_OPTIONS)
    if path.name == "tokenizer.json":
        tokenizer = read_tokenizer(path)
    else:
        options = read_json(unsaid) if unsaid in others else {}
        with reading(path, "no tokenizer can be made of it"):
            tokenizer = word_pieces(path, options) if path.name == "vocab.txt" else byte_level(path, others[0], options)
    if not 1 <= tokenizer.get_vocab_size() <= vocab_size:
        fault = f"{tokenizer.get_vocab_size()} tokens where config.json has {vocab_size}"
        raise InputError(f"{path}: {fault}; use files of one checkpoint")
    with reading(path, "no text can be encoded with it"):
        largest = max(
            *tokenizer.get_vocab().values(), *tokenizer.encode("a").ids, 0
        )  # what it adds to a text is among them
    if largest >= vocab_size:
        fault = f"token {largest} where config.json has {vocab_size}"
        raise InputError(f"{path}: {fault}; use files of one checkpoint")
    return tokenizer


def add_special(tokenizer: Tokenizer, *names: str) -> dict[str, int]:
    """Make those of the names that are in the vocabulary special; their numbers."""
    numbers = {name: tokenizer.token_to_id(name) for name in names}
    numbers = {name: number for name, number in numbers.items() if number is not None}
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in numbers])
    return numbers


def byte_level(vocabulary: Path, merges: Path, options: dict) -> Tokenizer:
    """GPT-2's tokenizer, which adds nothing to a text, or RoBERTa's, which puts it between <s> and </s>."""
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    space = bool(options.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    numbers = add_special(tokenizer, END_OF_TEXT, "<s>", "<pad>", "</s>", "<unk>", "<mask>")
    if "<s>" in numbers and "</s>" in numbers:
        start, end = ((name, numbers[name]) for name in ("<s>", "</s>"))
        tokenizer.post_processor = processors.RobertaProcessing(end, start, add_prefix_space=space)
    return tokenizer


def word_pieces(vocabulary: Path, options: dict) -> Tokenizer:
    """BERT's tokenizer: lower case unless the options say otherwise, [CLS] before and [SEP] behind a text."""
    tokenizer = Tokenizer(models.WordPiece.from_file(str(vocabulary), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    numbers = add_special(tokenizer, "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    ends = [(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair=pair, special_tokens=ends)
    return tokenizer
