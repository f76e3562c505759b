"""A causal language model of `transformers` as p: what it needs to be sampled and trained here.

    network = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32)
    model = AnyModel(network, prompt, length=20)    # p(s_{1:T} | s_0) after prompt [P], T = 20

docs/any_model.py runs Algorithm 1 with it. The network must keep keys and values in a cache that
can be reordered. N rows, D width, V vocabulary, P tokens of the prompt, T of a continuation.
"""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tinystories.decoder import NO_END, Conditional, check_positions
from tinystories.errors import InputError, reason_of
from tinystories.gpt_neo import at_least_float32

LARGE = 100.0  # size of the largest logits of a trained network


def unwrapped(network: Any) -> Any:
    """The network of `transformers` itself, where PEFT has wrapped it."""
    return network.get_base_model() if hasattr(network, "get_base_model") else network


class AnyModel(Conditional):
    """Any network conditioned on one prompt; its states are what its output layer reads."""

    def __init__(self, network: Any, prompt: Tensor | list, length: int, end: int = NO_END):
        """prompt [P] or [1, P], then T = length tokens; InputError for a network that does not fit.

        A text is finished once it has the token `end`, such as `network.config.eos_token_id`.
        """
        self.network = network.eval()
        if self.output is None:
            raise InputError("the network has no output layer; load it as a causal language model")
        self.vocab_size = self.output.weight.shape[0]
        self.prompt = torch.as_tensor(prompt, dtype=torch.long, device=network.device)
        if self.prompt.shape[:-1].numel() != 1:
            raise InputError(f"the prompt has shape {list(self.prompt.shape)}; give tokens [P]")
        self.prompt = self.prompt.flatten()
        self.length = length
        self.end = end
        limit = getattr(network.config, "max_position_embeddings", None) or sys.maxsize
        check_positions(self.prompt, length, limit)
        if not 0 <= self.prompt.min() <= self.prompt.max() < self.vocab_size:
            raise InputError("the prompt has tokens that the network lacks; use its own tokenizer")
        if type(end) is not int or not NO_END <= end < self.vocab_size:
            raise InputError(f"end is {end!r}; give one token of the network, or leave it out")
        # What transformers calls `past_key_values` is `cache` from 5.24 on.
        names = inspect.signature(unwrapped(network).base_model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        if length > 1:  # otherwise nothing is read behind the prompt
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        """Continue the prompt in two ways, exchange the rows, and compare with a plain forward.

        InputError where the logits are others: the cache is not used, or logits are not simply what
        the output layer makes of the states (some networks scale or cap them). States are enlarged,
        so that logits become as large as a trained network's: capping hardly changes small ones.
        """
        tokens = torch.tensor([[0], [1]], device=self.prompt.device)  # [2, 1]
        try:
            decoder = self.decoder(2)
            decoder.extend(tokens[:, 0])
            decoder.extend(tokens[:, 0], torch.tensor([1, 0], device=tokens.device))
            factor = max(1.0, LARGE / self.head(decoder.hidden).abs().max().clamp(min=0.05).item())
            logits = self.head(factor * decoder.hidden)  # [2, V]
            ids = torch.cat([self.prompt.expand(2, -1), tokens.flip(0), tokens], 1)  # [2, P + 2]
            with self.output.register_forward_pre_hook(lambda _, inputs: (factor * inputs[0],)):
                wanted = self.network(ids).logits[:, -1].to(logits)  # [2, V]
        except Exception as error:
            fault = f"the network cannot continue the prompt ({reason_of(error)})"
            raise InputError(f"{fault}; choose one that caches keys and values") from error
        # Half of the digits agree, of float32 at most, in which some networks attend.
        tolerance = max(torch.finfo(decoder.hidden.dtype).eps, 2**-23) ** 0.5 * logits.abs().max()
        if not ((logits - wanted).abs() <= tolerance).all():
            fault = "the output layer, behind a cache, has other logits than the network"
            raise InputError(f"{fault}; write `head` for them, or choose another network")

    @property
    def output(self) -> Any:
        """The output layer, which makes logits of states."""
        return self.network.get_output_embeddings()

    @property
    def output_embeddings(self) -> Tensor:
        """What makes logits of hidden states [V, D]; InputError where a bias is added."""
        if getattr(self.output, "bias", None) is not None:
            raise InputError("the output layer has a bias, which adapters do not know")
        return self.output.weight

    def cache(self) -> Any:
        """An empty cache of keys and values."""
        return DynamicCache(config=self.network.config)

    def read(self, ids: Tensor, cache: Any = None) -> Tensor:
        """States [N, T, D] of tokens ids [N, T] behind what the cache holds; it then holds them."""
        options = {self.cache_name: cache, "use_cache": cache is not None}
        return unwrapped(self.network).base_model(ids, **options).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], float32 or wider, of states [..., D]."""
        return at_least_float32(self.output(hidden))

    def states(self, tokens: Tensor) -> Tensor:
        """The states [N, T, D] that predict each of continuations tokens [N, T]."""
        ids = torch.cat([self.prompt.expand(len(tokens), -1), tokens[:, :-1]], 1)
        return self.read(ids)[:, len(self.prompt) - 1 :]
