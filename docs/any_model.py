"""Algorithm 1 from Python, for a causal language model of `transformers` and a function of texts.

`python main.py --lm DIR --potential FILE.py:NAME` does the same without a program. This is for what
a command cannot say: here p writes at a lower temperature and never writes a given token. After
`pip install .` and `pip install transformers`, `python docs/any_model.py` runs in the repository.
Elsewhere, give `main` the name of your model and a `prompt` in its language; another constraint is
another `log_phi`. The defaults of `Options` are those of the command.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.pair import load_pair, save_pair
from distill.paper import Paper
from eval.options import Options
from eval.sample import sample
from eval.world import World
from tinystories.any_model import AnyModel
from tsmc.streams import Streams
from twist.potential import TextPotential

SMALL = {"ctl_updates": 30, "ctl_batch_size": 50, "distill_runs": 20, "particles": 50}


class CoolModel(AnyModel):
    """p at temperature 0.9, without the token that would end a text."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits [..., V] of states [..., D]; -inf rules a token out."""
        logits = super().logits(hidden) / 0.9
        logits[..., self.network.config.eos_token_id] = -torch.inf
        return logits


def log_phi(texts: list[str]) -> list[float]:
    """The text should have a dog: a missing one costs six nats."""
    return [0.0 if "dog" in text else -6.0 for text in texts]


def main(name: str = "checkpoints/pocket/lm", path: str = "dog-pair.safetensors") -> None:
    """Learn, save, load and sample."""
    network = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompt = torch.tensor(tokenizer("Once upon a time, there was a").input_ids)  # [P]
    model = CoolModel(network, prompt, length=12, vocab_size=len(tokenizer))  # T = 12
    phi = TextPotential([log_phi], tokenizer.batch_decode, prompt)

    options = Options(**SMALL)
    learner = Paper(model, phi, options, Streams(seed=0))
    pair = learner.learn_twist(model, 0)  # line 1
    for m in (1, 2):  # line 2
        pair = learner.learn_twist(learner.distil(pair, m), m)  # lines 3 and 4
    save_pair(Path(path), pair, model, learner.state())

    pair, _ = load_pair(Path(path), model)  # here or elsewhere, over the same p^(0)
    world = World(model, phi, {}, tokenizer)
    drawn = sample(world, pair, options, particles=50, runs=4)
    print("log Z-hat", drawn.evidence().value)
    for row in drawn.samples(3):
        print(row["log_phi"], row["text"])


if __name__ == "__main__":
    main()
