"""Algorithm 1 for a causal language model of `transformers` and a function of texts.

After `pip install .` and `pip install transformers`, `python docs/any_model.py` runs in the
repository. Elsewhere, give `main` the name of your model and a `prompt` in its language; another
constraint is another `log_phi`. For the paper's learner write
`Paper(model, phi, PaperOptions(), Streams(seed=0))`.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill import Pooled, PooledOptions, Streams
from tinystories.any_model import AnyModel
from twist import Factor, TextPotential, load_pair, sample, save_pair


def log_phi(texts: list[str]) -> list[float]:
    """The text should have a dog: a missing one costs six nats."""
    return [0.0 if "dog" in text else -6.0 for text in texts]


def main(name: str = "checkpoints/pocket/lm", directory: str = "dog-pair") -> None:
    """Learn, save, load and sample."""
    network = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompt = tokenizer("Once upon a time, there was a", return_tensors="pt").input_ids[0]  # [P]
    model = AnyModel(network, prompt, length=12)  # p^(0)(s_{1:T} | s_0), T = 12
    phi = TextPotential([Factor(log_phi)], tokenizer.batch_decode, prompt)

    options = PooledOptions(pool_first_draws=2000, pool_draws=1000)
    learner = Pooled(model, phi, options, Streams(seed=0))
    pair = learner.first_twist()
    for m in (1, 2):
        pair = learner.learn_twist(learner.distil(pair, m), m)
    save_pair(directory, pair, model)

    pair = load_pair(directory, model)  # here or elsewhere, over the same p^(0)
    drawn = sample(model, phi, pair, particles=50, runs=4, seed=1)
    print("log Z-hat", drawn.evidence().value)
    for row in drawn.samples(3):
        print(row["log_phi"], row["text"])


if __name__ == "__main__":
    main()
