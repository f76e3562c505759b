"""What `eval.bench` compares: networks of two sizes, the same networks in transformers, and texts.

The size "paper" is that of TinyStories-33M, RoBERTa-base and MiniLM, with random weights.
"""

from dataclasses import asdict, dataclass

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

import tinystories
from eval.run.options import POCKET, RunConfig
from eval.scorers import similarity, toxicity
from eval.scorers.encoder import EncoderConfig, Runner
from tinystories import GPTNeo, GPTNeoConfig
from tinystories.load import config_to_json, names_on_disk
from twist.mlp import TwistMLP

TEXTS, BATCH = 128, 64
WORDS = ["the", "and", "was", "she", "dog", "girl", "day", "big", "happy", "little", "saw", "ball"]
PAPER = {
    "lm": GPTNeoConfig(50257, 768, 4, 16, 2048, ("global", "local") * 2, 256, 3072),
    "toxicity": EncoderConfig(50265, 768, 12, 12, 3072, 514, 1, 1e-5, 1),
    "similarity": EncoderConfig(30522, 384, 6, 12, 1536, 512, 2),
}


@dataclass
class Networks:
    """The networks of one size, the prompt [P], and the tokenizers of the two scorers."""

    lm: GPTNeo
    twist: TwistMLP
    prompt: Tensor
    scorers: dict[str, tuple[nn.Module, Tokenizer]]


def load_networks(size: str, dtype: torch.dtype, device: torch.device) -> Networks:
    """The shipped networks, or networks of the paper's shapes; the twist has random weights."""
    torch.manual_seed(0)
    lm, tokenizer = tinystories.load(POCKET / "lm")
    classifier, its_tokenizer = toxicity.load(POCKET / "toxicity")
    encoder, encoder_tokenizer = similarity.load(POCKET / "similarity")
    if size == "paper":
        lm = GPTNeo(PAPER["lm"])
        for parameter in lm.parameters():
            parameter.data.mul_(0.02 if parameter.ndim > 1 else 1)
        classifier = toxicity.ToxicityClassifier(PAPER["toxicity"])
        encoder = similarity.SentenceEncoder(PAPER["similarity"])
    width = lm.config.hidden_size
    twist = TwistMLP(width, width, lm.config.vocab_size, torch.Generator().manual_seed(0))
    nn.init.normal_(twist.last.weight, std=0.1 * width**-0.5)
    for network in (lm, twist, classifier, encoder):
        network.to(device, dtype).eval()
    prompt = torch.tensor(tokenizer.encode(RunConfig().prompt).ids, device=device)
    scorers = {"classifier": (classifier, its_tokenizer)}
    scorers["sentence encoder"] = (encoder, encoder_tokenizer)
    return Networks(lm, twist, prompt, scorers)


def counterpart(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same network in transformers, with the same weights."""
    transformers.logging.set_verbosity_error()
    config, state = network.config, network.state_dict()
    if isinstance(network, GPTNeo):
        theirs = transformers.GPTNeoConfig(**config_to_json(config))
        twin, state = transformers.GPTNeoForCausalLM(theirs), names_on_disk(state)
    elif isinstance(network, similarity.SentenceEncoder):
        theirs = transformers.BertConfig(**asdict(config))
        twin = transformers.BertModel(theirs, add_pooling_layer=False)
    else:
        theirs = transformers.RobertaConfig(**asdict(config), num_labels=1)
        twin = transformers.RobertaForSequenceClassification(theirs)
    twin.load_state_dict(state, strict=False)  # lm_head.weight is the embedding
    return twin.to(next(network.parameters()).device, dtype).eval()


def make_texts() -> list[str]:
    """Texts of 8 to 120 words; every word is one token of both tokenizers."""
    source = torch.Generator().manual_seed(0)
    counts = torch.randint(8, 121, (TEXTS,), generator=source)
    chosen = [torch.randint(len(WORDS), (int(count) - 1,), generator=source) for count in counts]
    return [" ".join(["a", *(WORDS[i] for i in indices)]) for indices in chosen]


def score_in_order(twin: nn.Module, runner: Runner, texts: list[str]) -> None:
    """What a loop over batches does with transformers: padded to the longest, without sorting."""
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            encodings = runner.tokenizer.encode_batch_fast(texts[start : start + BATCH])
            ids, mask = runner.pad([encoding.ids for encoding in encodings])
            twin(input_ids=ids, attention_mask=mask)
