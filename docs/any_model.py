"""Algorithm 1 from Python, for a causal language model of `transformers` and a function of texts.

`python main.py --lm DIR --potential FILE.py:NAME` does the same without a program. This is for what
a command cannot say: here p writes at a lower temperature and never writes a given token. After
`pip install .` and `pip install transformers`, `python docs/any_model.py` runs in the repository.
Elsewhere, give `main` the name of your model and a `prompt` in its language; another constraint is
another `log_phi`. The paper's learner is `Paper(model, phi, PaperOptions(), Streams(seed=0))`.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill import Pooled, PooledOptions, Streams, load_pair, sample, save_pair
from tinystories.any_model import AnyModel
from twist import TextPotential


class CoolModel(AnyModel):
    """p at temperature 0.9, without the token that would end a text."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits [..., V] of states [..., D]; -inf rules a token out."""
        logits = super().head(hidden) / 0.9
        logits[..., self.network.config.eos_token_id] = -torch.inf
        return logits


def log_phi(texts: list[str]) -> list[float]:
    """The text should have a dog: a missing one costs six nats."""
    return [0.0 if "dog" in text else -6.0 for text in texts]


def main(name: str = "checkpoints/pocket/lm", path: str = "dog-pair.safetensors") -> None:
    """Learn, save, load and sample."""
    network = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompt = tokenizer("Once upon a time, there was a").input_ids  # [P]
    model = CoolModel(network, prompt, length=12, vocab_size=len(tokenizer))  # T = 12
    phi = TextPotential([log_phi], tokenizer.batch_decode, prompt)

    options = PooledOptions(pool_first_draws=2000, pool_draws=1000)
    learner = Pooled(model, phi, options, Streams(seed=0))
    pair = learner.first_twist()  # line 1
    for m in (1, 2):  # line 2
        pair = learner.learn_twist(learner.distil(pair, m), m)  # lines 3 and 4
    save_pair(path, pair, model)

    pair = load_pair(path, model)  # here or elsewhere, over the same p^(0)
    drawn = sample(model, phi, pair, particles=50, runs=4, seed=1)
    print("log Z-hat", drawn.evidence().value)
    for row in drawn.samples(3):
        print(row["log_phi"], row["text"])


if __name__ == "__main__":
    main()
