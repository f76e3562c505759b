"""A causal language model of `transformers` as p: what it needs to be sampled and trained here.

Its states must be kept in a cache that can be reordered. A subclass whose `logits` changes them
changes p. N rows, D width, V vocabulary, P tokens of the prompt, T of a continuation.
"""

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tinystories.decoder import Conditional, Decoder, End, check_positions
from tinystories.gpt_neo import at_least_float32


def load_any(directory: Path, device: str | torch.device) -> Any:
    """A causal model of transformers (float32); ValueError for missing or other weights."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it warns of is refused below
    settings: dict[str, Any] = {"dtype": torch.float32, "ignore_mismatched_sizes": True}
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    network, found = load(directory, output_loading_info=True, **settings)
    for trouble, names in found.items():  # missing, unexpected and mismatched keys, other errors
        if names:
            faults = ", ".join(sorted(map(str, names)))[:300]
            raise ValueError(f"{directory}: {trouble.replace('_', ' ')}: {faults}")
    return network.to(device)


class AnyModel(Conditional):
    """Any network conditioned on one prompt; its states are what its output layer reads."""

    def __init__(
        self, network: Any, prompt: Tensor, length: int, end: End = (), vocab_size: int = 0
    ):
        """prompt [P], then T = length tokens below vocab_size; ValueError where it does not fit."""
        self.network = network.eval()
        self.learns_by_cache = True  # else gradients need states that are read without a cache
        config = network.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or -1  # -1 is XLNet's: none
        check_positions(prompt, length, limit if limit > 0 else 2**63)
        width = network.get_output_embeddings().in_features
        size = min(vocab_size or config.vocab_size, config.vocab_size)
        super().__init__(prompt.to(network.device), length, width, size, end)
        is_new = "cache" in inspect.signature(self.body.forward).parameters  # from 5.24 on
        self.cache_name = "cache" if is_new else "past_key_values"
        self.path_to_body = next(n for n, part in network.named_modules() if part is self.body)
        try:
            self.check()
        except Exception as error:  # of a network that nobody here has seen
            raise ValueError(f"the network cannot continue the prompt: {error}") from error

    @property
    def body(self) -> Any:
        """All of the network but its output layer."""
        base = self.network.base_model
        return (self.network.model if base is self.network else base).get_decoder()  # Llama 4

    def cache(self) -> Any:
        return transformers.DynamicCache(config=self.network.config)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        output = self.body(input_ids=ids, use_cache=True, **{self.cache_name: cache})
        self.output_class = type(output)  # what `logits` gives back in place of the body
        return output.last_hidden_state

    def states(self, tokens: Tensor) -> Tensor:
        if self.learns_by_cache or not torch.is_grad_enabled():
            return super().states(tokens)
        ids = torch.cat([self.prompt.expand(len(tokens), -1), tokens[:, :-1]], 1)  # [N, P + T - 1]
        return self.body(input_ids=ids, use_cache=False).last_hidden_state[:, -self.length :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits by a copy of the network, whose body returns the given states: what its forward
        does beside the output layer, such as scaling or capping, is done here too."""
        states = hidden.reshape(-1, 1, hidden.shape[-1])  # [N, 1, D]
        output = self.output_class(last_hidden_state=states)
        network = part = copy.copy(self.network)  # of the modules on the path to the body alone
        for name in self.path_to_body.split("."):
            part._modules = part._modules | {name: copy.copy(part._modules[name])}
            part = part._modules[name]
        part.forward = lambda *_, **__: output
        logits = network(inputs_embeds=states).logits[..., : self.vocab_size]
        return at_least_float32(logits).view(*hidden.shape[:-1], self.vocab_size)

    @torch.no_grad()
    def check(self) -> None:
        """ValueError where a cache leads to other logits than the network's own forward, by two
        texts that are written token by token, exchanged at every token."""
        model = copy.copy(self)
        model.end = ()  # no text is finished here
        tokens = self.prompt.expand(2, -1)  # [2, P + t]
        steps = []  # t states [2, D]
        decoder = Decoder(model, 2)
        likely = model.logits(decoder.hidden)[0].argsort(descending=True)  # [V]
        for nexts in likely[torch.arange(2 * self.length) % self.vocab_size].view(-1, 2):  # [2]
            steps = [hidden.flip(0) for hidden in [*steps, decoder.hidden]]
            tokens = torch.cat([tokens.flip(0), nexts[:, None]], 1)
            if len(steps) < self.length:
                decoder.append(nexts, nexts.new_tensor([1, 0]))
        wanted = self.network(tokens[:, :-1]).logits[:, -self.length :, : self.vocab_size]
        # Half of a type's digits agree; single logits of bfloat16 differ by more.
        eps = max(torch.finfo(wanted.dtype).eps, 2**-23)
        tolerance = eps**0.5 * wanted.masked_fill(wanted == -torch.inf, 0.0).abs().max().item()
        texts = tokens[:, -self.length :]
        for hidden in (torch.stack(steps, 1), model.hidden(texts)):  # [2, T, D]
            logits = AnyModel.logits(model, hidden)  # without what a subclass makes of them
            gaps = (logits - wanted).masked_fill(logits == wanted, 0.0)  # where both are -inf
            if not gaps.square().mean().sqrt().item() <= tolerance < torch.inf:
                raise ValueError("with a cache the network has other logits than its own forward")
        self.output_class = model.output_class
        weight = next(self.network.parameters())
        needs = weight.requires_grad
        try:
            with torch.enable_grad():
                weight.requires_grad_(True)
                torch.autograd.grad(model.hidden(texts).sum(), weight)
        except RuntimeError:  # a recurrent state, say, was written in place
            self.learns_by_cache = False
        weight.requires_grad_(needs)
