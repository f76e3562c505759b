"""What `eval.bench` runs: networks of two sizes, the same networks in transformers, and texts for the scorers.

pocket  the shipped checkpoints;  paper  TinyStories-33M, RoBERTa-base and MiniLM in shape, with random weights.
transformers is needed here alone, and imported only when a counterpart is asked for.
"""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import tinystories
from eval.run.options import POCKET
from eval.scorers import similarity, toxicity
from eval.scorers.encoder import EncoderConfig, Runner
from tinystories import GPTNeo, GPTNeoConfig, InputError
from tinystories.fast import accelerate
from tinystories.load import config_to_json, names_on_disk
from twist import TwistMLP

PROMPT = "Once upon a time, there was a"
TEXTS, BATCH = 128, 64
PAPER = {
    "lm": GPTNeoConfig(50257, 768, 4, 16, 2048, ("global", "local") * 2, 256, 3072),
    "toxicity": EncoderConfig(50265, 768, 12, 12, 3072, 514, 1, 1e-5, 1),
    "similarity": EncoderConfig(30522, 384, 6, 12, 1536, 512, 2),
}


@dataclass
class Sampler:
    """The language model of one size, a twist with random weights, and the prompt [P]."""

    lm: GPTNeo
    twist: TwistMLP
    prompt: Tensor


@dataclass
class Scorer:
    """A classifier or a sentence encoder, and its tokenizer."""

    network: nn.Module
    tokenizer: Tokenizer


def load_sampler(size: str, dtype: torch.dtype, device: torch.device) -> Sampler:
    """The shipped model, or one of the paper's shape with random weights."""
    lm, tokenizer = tinystories.load(POCKET / "lm")
    if size == "paper":
        torch.manual_seed(0)  # weights that no one learned: only their number matters
        lm = GPTNeo(PAPER["lm"])
        for parameter in lm.parameters():
            parameter.data.mul_(0.02 if parameter.ndim > 1 else 1)
    width = lm.config.hidden_size
    twist = TwistMLP(width, width, lm.config.vocab_size, torch.Generator().manual_seed(0))
    nn.init.normal_(twist.last.weight, std=0.1 * width**-0.5, generator=torch.Generator().manual_seed(1))
    prompt = torch.tensor(tokenizer.encode(PROMPT).ids, device=device)
    lm, twist = (accelerate(network.to(device, dtype).eval()) for network in (lm, twist))
    return Sampler(lm, twist, prompt)


def load_scorers(size: str, dtype: torch.dtype, device: torch.device) -> dict[str, Scorer]:
    """The shipped scorers, or scorers of the paper's shapes with random weights and the shipped tokenizers."""
    classifier, classifier_words = toxicity.load(POCKET / "toxicity")
    encoder, encoder_words = similarity.load(POCKET / "similarity")
    if size == "paper":
        torch.manual_seed(0)
        classifier = toxicity.ToxicityClassifier(PAPER["toxicity"])
        encoder = similarity.SentenceEncoder(PAPER["similarity"])
    classifier, encoder = (accelerate(network.to(device, dtype).eval()) for network in (classifier, encoder))
    return {"classifier": Scorer(classifier, classifier_words), "sentence encoder": Scorer(encoder, encoder_words)}


def import_transformers():
    """transformers, quiet; InputError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise InputError("eval.bench compares with transformers: pip install -r requirements-dev.txt") from None
    transformers.logging.set_verbosity_error()
    return transformers


def counterpart(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same network in transformers, with the same weights."""
    transformers, config, state = import_transformers(), network.config, network.state_dict()
    if isinstance(network, GPTNeo):
        twin = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**config_to_json(config)))
        state = names_on_disk(state)
    elif isinstance(network, similarity.SentenceEncoder):
        twin = transformers.BertModel(transformers.BertConfig(**config.to_dict()), add_pooling_layer=False)
    else:
        sizes = transformers.RobertaConfig(**config.to_dict(), num_labels=1)
        twin = transformers.RobertaForSequenceClassification(sizes)
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return twin.to(next(network.parameters()).device, dtype).eval()


def counterparts(network: nn.Module) -> dict[str, nn.Module]:
    """transformers in float32, which is what `from_pretrained` users get, and in our type where that is another one."""
    types = dict.fromkeys([torch.float32, next(network.parameters()).dtype])
    return {str(dtype).removeprefix("torch."): counterpart(network, dtype) for dtype in types}


def make_texts(scorers: dict[str, Scorer], mixed: bool) -> list[str]:
    """Texts of words that are one token to both scorers: 28 words each, or from 8 to 120."""
    tokenizers = [scorer.tokenizer for scorer in scorers.values()]
    empty = [len(tokenizer.encode("a").ids) for tokenizer in tokenizers]
    words = [
        word
        for word in sorted(tokenizers[1].get_vocab())
        if word.isalpha()
        and all(len(t.encode("a " + word).ids) == e + 1 for t, e in zip(tokenizers, empty, strict=True))
    ]
    source = torch.Generator().manual_seed(0)
    counts = torch.randint(8, 121, (TEXTS,), generator=source) if mixed else torch.full((TEXTS,), 28)
    return [
        " ".join(words[i] for i in torch.randint(len(words), (count,), generator=source).tolist())
        for count in counts.tolist()
    ]


def score_in_order(twin: nn.Module, runner: Runner, texts: list[str]) -> None:
    """What a loop over batches does with transformers: pad to the longest, no sorting."""
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            ids, mask = runner.pad([e.ids for e in runner.tokenizer.encode_batch_fast(texts[start : start + BATCH])])
            twin(input_ids=ids, attention_mask=mask)
