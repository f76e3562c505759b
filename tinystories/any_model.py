"""A causal language model of `transformers` as p: what it needs to be sampled and trained here.

    network = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32)
    model = AnyModel(network, prompt, length=20)    # p(s_{1:T} | s_0) after prompt [P], T = 20

docs/any_model.py runs Algorithm 1 with it. The network must keep keys and values in a cache that
can be reordered. Logits are its own, scaled or capped as it does; a subclass whose `head` changes
them (a temperature, a mask of tokens) changes p. N rows, D width, V vocabulary, P tokens of the
prompt, T of a continuation.
"""

import contextlib
import inspect
import sys
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache

from tinystories.decoder import NO_END, Conditional, End, check_positions
from tinystories.gpt_neo import at_least_float32


def as_tokens(prompt: Any) -> Tensor:
    """Tokens [P] of a tensor or a list, [P] or [1, P]; ValueError for anything else."""
    with contextlib.suppress(Exception):  # whatever an object raises that is asked for numbers
        tokens = torch.as_tensor(prompt)
        is_integer = tokens.dtype in (torch.int64, torch.int32) or tokens.numel() == 0
        if is_integer and tokens.shape[:-1].numel() == 1:
            return tokens.flatten().long()
    told = " ".join(str(prompt).split())[:80]
    raise ValueError(f"the prompt is {told}; give tokens [P], the input_ids of the tokenizer")


def is_close(logits: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether half of a type's digits agree, and -inf, which masks tokens, stands at equal places.

    The gap is a mean square, as single ones of bfloat16 are large. The digits are those of float32
    at most, in which some networks of float64 attend.
    """
    gaps = (logits - wanted).masked_fill(logits == wanted, 0.0)  # -inf - (-inf) is no number
    largest = wanted.masked_fill(wanted == -torch.inf, 0.0).abs().max().item()
    tolerance = max(torch.finfo(dtype).eps, 2**-23) ** 0.5 * largest
    return gaps.square().mean().sqrt().item() <= tolerance < torch.inf


class AnyModel(Conditional):
    """Any network conditioned on one prompt; its states are what its output layer reads."""

    def __init__(
        self,
        network: Any,
        prompt: Tensor | list,
        length: int,
        end: End | list[int] = NO_END,
        vocab_size: int | None = None,
    ):
        """prompt [P] or [1, P], then T = length tokens; ValueError for a network that does not fit.

        A text is finished once it has a token of `end`, such as `network.config.eos_token_id`.
        Tokens from `vocab_size` on are never drawn: give `len(tokenizer)`, which may be smaller.
        """
        self.network = network.eval()
        if (output := network.get_output_embeddings()) is None:
            raise ValueError("the network has no output layer; load it as a causal language model")
        config = network.config.get_text_config()
        tokens = as_tokens(prompt).to(network.device)
        limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
        check_positions(tokens, length, limit)
        if not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
            raise ValueError("the prompt has tokens that the network lacks; use its own tokenizer")
        size: int = min(vocab_size or config.vocab_size, config.vocab_size)
        end = tuple(end) if isinstance(end, list) else end
        ends = end if isinstance(end, tuple) else (end,)
        if end != NO_END and not all(one in range(size) for one in ends):
            raise ValueError(f"end is {end!r}; give tokens of the network, or leave it out")
        super().__init__(tokens, length, output.in_features, size, end)
        # What transformers calls `past_key_values` is `cache` from 5.24 on.
        is_new = "cache" in inspect.signature(self.body.forward).parameters
        self.cache_name = "cache" if is_new else "past_key_values"
        self.check()

    @property
    def body(self) -> Any:
        """All of the network but its output layer."""
        base = self.network.base_model
        return (self.network.model if base is self.network else base).get_decoder()  # Llama 4

    def with_network(self, network: Any) -> Self:
        model = super().with_network(network)
        model.check()
        return model

    @torch.no_grad()
    def check(self) -> None:
        """ValueError where a cache leads to other logits than p(s_t | s_{0:t-1}): those that a
        forward of s_{0:t-1} alone has without a cache.

        Two texts of T tokens are written, exchanged at every token, and read at once. For most
        networks one forward of a whole text tells p for every t; those whose states depend on how
        much is read, such as rotary factors by length, are asked for each t where it differs.
        """
        ids, steps = self.prompt.expand(2, -1), []  # [2, P + t], t states [2, D]
        start = len(self.prompt)  # P
        try:
            decoder = self.decoder(2)
            likely = self.head(decoder.hidden)[0].argsort(descending=True)
            texts = likely[torch.arange(2 * self.length) % self.vocab_size].view(-1, 2)  # [T, 2]
            for tokens in texts:
                steps = [states.flip(0) for states in [*steps, decoder.hidden]]
                ids = torch.cat([ids.flip(0), tokens[:, None]], 1)
                if len(steps) < self.length:
                    decoder.append(tokens, tokens.new_tensor([1, 0]))
            at_once = self.states(ids[:, start:])  # [2, T, D]
            plain = self.plain(ids[:, :-1])[:, start - 1 :]  # [2, T, D]
            wanted = self.head(plain)  # [2, T, V]
        except Exception as error:  # of a network that nobody here has seen
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:250]
            fault = f"the network cannot continue the prompt ({reason})"
            raise ValueError(f"{fault}; choose another network") from error
        if not (wanted < torch.inf).all():
            raise ValueError("the network's logits are NaN or infinite; mend its weights")
        for way, states in {"token by token": torch.stack(steps, 1), "at once": at_once}.items():
            logits = self.head(states)  # [2, T, V]
            for t in range(self.length):
                if not is_close(logits[:, t], wanted[:, t], plain.dtype):
                    alone = self.head(self.plain(ids[:, : start + t])[:, -1])  # [2, V]
                    if not is_close(logits[:, t], alone, plain.dtype):
                        fault = "with its cache of keys and values the network has other logits"
                        fault = f"{fault} than without, from token {t + 1} on where it reads {way}"
                        raise ValueError(f"{fault}; choose another network, or a length of {t}")
        if type(self).head is AnyModel.head:  # what a subclass makes of logits is its business
            self.check_head(ids[:, -8:])  # all logits of a long prompt would take much memory

    def check_head(self, ids: Tensor) -> None:
        """ValueError where the network's logits of tokens ids [N, T] are others than `head`'s."""
        states = self.plain(ids)
        own = at_least_float32(self.network(ids).logits[..., : self.vocab_size])
        if not is_close(self.head(states), own, states.dtype):
            fault = "the network's logits are not what its output layer makes of its states"
            raise ValueError(f"{fault}; write `head` for them, or choose another network")

    def plain(self, ids: Tensor) -> Tensor:
        """States [N, T, D] of tokens ids [N, T] without a cache."""
        return self.body(input_ids=ids, use_cache=False).last_hidden_state

    @property
    def embeddings(self) -> Tensor:
        return self.network.get_output_embeddings().weight[: self.vocab_size].detach()

    def cache(self) -> Any:
        return DynamicCache(config=self.network.config)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        options = {"use_cache": True, self.cache_name: cache}
        output = self.body(input_ids=ids, **options)
        self.output_class = type(output)  # what `head` gives back in place of the body
        return output.last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Logits by the network's own forward, whose body returns the given states: what it does
        beside its output layer, such as scaling or capping, is done here too."""
        states = hidden.reshape(-1, 1, hidden.shape[-1])  # [N, 1, D]
        output = self.output_class(last_hidden_state=states)
        with mock.patch.object(self.body, "forward", lambda *_, **__: output):
            logits = self.network(inputs_embeds=states).logits[..., : self.vocab_size]
        return at_least_float32(logits).view(*hidden.shape[:-1], self.vocab_size)
