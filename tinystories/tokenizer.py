"""The tokenizer of a checkpoint directory, from whichever files it has.

    tokenizer.json              everything, as it stands
    vocab.json and merges.txt   byte-level BPE: GPT-2's, or RoBERTa's if it has <s> and </s>
    vocab.txt                   BERT's WordPiece

The older files do not say which pieces are special, what surrounds a text or how it is normalised.
Here this is as the networks were trained; `tokenizer_config.json` may change some of it.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import RobertaProcessing, TemplateProcessing

from tinystories.checkpoint import TOKENIZER_OPTIONS, read_json, reading, tokenizer_files

END_OF_TEXT = "<|endoftext|>"


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory, without padding and truncation.

    Raises InputError if a file is absent or broken, or if a token is not below vocab_size.
    """
    path, *others = tokenizer_files(directory)
    options = {}
    if others and others[-1].name == TOKENIZER_OPTIONS:
        options = read_json(others[-1])
    with reading(path, "no tokenizer for this network", "use files of one checkpoint"):
        if path.name == "vocab.txt":
            tokenizer = word_pieces(path, options)
        elif path.name == "vocab.json":
            tokenizer = byte_level(path, others[0], options)
        else:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.encode("a").ids  # includes what surrounds a text
        largest = max([*tokenizer.get_vocab().values(), *added])
        if largest >= vocab_size:
            raise ValueError(f"token {largest} where config.json has vocab_size {vocab_size}")
    return tokenizer


def add_special(tokenizer: Tokenizer, *names: str) -> dict[str, int]:
    """Make those of the names that are in the vocabulary special, and return their ids."""
    ids = {name: tokenizer.token_to_id(name) for name in names}
    ids = {name: number for name, number in ids.items() if number is not None}
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ids])
    return ids


def byte_level(vocabulary: Path, merges: Path, options: dict) -> Tokenizer:
    """GPT-2's tokenizer, which adds nothing to a text, or RoBERTa's: <s> before and </s> after."""
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    space = bool(options.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    ids = add_special(tokenizer, END_OF_TEXT, "<s>", "<pad>", "</s>", "<unk>", "<mask>")
    if "<s>" in ids and "</s>" in ids:
        end, start = ("</s>", ids["</s>"]), ("<s>", ids["<s>"])
        tokenizer.post_processor = RobertaProcessing(end, start, add_prefix_space=space)
    return tokenizer


def word_pieces(vocabulary: Path, options: dict) -> Tokenizer:
    """BERT's tokenizer: lower case unless the options differ, [CLS] before and [SEP] after."""
    tokenizer = Tokenizer(models.WordPiece.from_file(str(vocabulary), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ids = add_special(tokenizer, "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer
