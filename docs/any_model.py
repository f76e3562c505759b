"""A causal language model of `transformers` as p, and the learned twist in its `generate`.

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from docs.any_model import AnyModel, TwistProcessor
    from tsmc import Sigma, sample_proposal, tsmc
    from twist import TwistMLP, batches_from_proposal, learn_twist, positive_log_weights
    network = AutoModelForCausalLM.from_pretrained("checkpoints/pocket/lm")
    tokenizer = AutoTokenizer.from_pretrained("checkpoints/pocket/lm")
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids[0]  # [P]
    model = AnyModel(network, prompt, length=8)  # p(s_{1:T} | s_0), T = 8

    def log_phi(tokens, log_p):  # [N, T], [N] -> [N]: the text should have a dog
        return torch.tensor([0.0 if "dog" in s else -6.0 for s in tokenizer.batch_decode(tokens)])

    generator = torch.Generator().manual_seed(0)
    psi = TwistMLP(model.width, 64, model.vocab_size, generator)
    batches = batches_from_proposal(Sigma(model, log_phi), psi, 100, generator)
    learn_twist(psi, torch.optim.Adam(psi.parameters(), lr=1e-3), batches, updates=20)
    population = tsmc(model, psi, log_phi, 50, generator)  # K = 50 particles
    print(population.log_z, tokenizer.batch_decode(population.samples[0])[0])
    draws = sample_proposal(model, psi, 50, generator)  # N = 50 from q, not resampled
    log_weights = positive_log_weights(draws, log_phi)  # [N] log (p phi / q)
    plain = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}  # q itself
    plain |= {"do_sample": True, "logits_processor": [TwistProcessor(network, psi)]}
    print(tokenizer.decode(network.generate(prompt[None], max_new_tokens=8, **plain)[0]))

The network must keep keys and values in a cache. The end-of-text token ends no text, but in
`generate` it does, unless `network.generation_config.eos_token_id` is None. N rows, D width, V
vocabulary, P tokens of the prompt.
"""

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from tinystories.errors import InputError
from tsmc.interfaces import Twist


class AnyModel:
    """A `tsmc.interfaces.LanguageModel`; its states are what the network's output layer reads."""

    def __init__(self, network: PreTrainedModel, prompt: Tensor, length: int):
        """prompt [P], then T = length tokens; InputError for a network that does not fit."""
        self.network = network.eval()
        self.prompt = prompt
        self.length = length
        self.output = network.get_output_embeddings()
        self.vocab_size, self.width = self.output.weight.shape
        cache = DynamicCache(config=network.config)
        logits = self.head(self.read(prompt[None], cache))  # [1, P, V]
        if cache.get_seq_length() != len(prompt):
            raise InputError("the network keeps no keys and values in a cache; choose another")
        if not torch.allclose(logits, network(prompt[None]).logits.to(logits), atol=1e-3):
            raise InputError("the logits are not the output layer's; write `head` for them")

    def read(self, ids: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """States [N, T, D] of tokens ids [N, T] behind what the cache holds; it then holds them."""
        options = {"past_key_values": cache, "use_cache": cache is not None}
        return self.network.base_model(ids, **options).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], float32 or wider, of states [..., D]."""
        return self.output(hidden).to(torch.promote_types(hidden.dtype, torch.float32))

    def decoder(self, rows: int) -> "AnyDecoder":
        """A fresh decoder of `rows` continuations."""
        return AnyDecoder(self, rows)

    def states(self, tokens: Tensor) -> Tensor:
        """The states [N, T, D] that predict each of continuations tokens [N, T]."""
        ids = torch.cat([self.prompt.expand(len(tokens), -1), tokens[:, :-1]], 1)
        return self.read(ids)[:, len(self.prompt) - 1 :]

    def log_probs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p(s_t | s_{0:t-1}) [N, T], logits [N, T, V] and states [N, T, D] of tokens [N, T]."""
        hidden = self.states(tokens)
        logits = self.head(hidden)
        return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1), logits, hidden


class AnyDecoder:
    """N continuations, token by token, and the cache of keys and values behind them."""

    def __init__(self, model: AnyModel, rows: int):
        self.model = model
        self.cache = DynamicCache(config=model.network.config)
        self.hidden = model.read(model.prompt[None], self.cache)[:, -1].repeat(rows, 1)  # [N, D]
        self.cache.batch_repeat_interleave(rows)

    def evaluate(self, network: Twist, rows: slice = slice(None)) -> Tensor:
        """network(hidden [n, D]) of the n rows in a slice; it is a twist or the model's head."""
        return network(self.hidden[rows])

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None:
        """Row n becomes row ancestors[n] (itself where None) followed by tokens[n]; both [N]."""
        if ancestors is not None:
            self.cache.reorder_cache(ancestors)
        self.hidden = self.model.read(tokens[:, None], self.cache)[:, -1]


class TwistProcessor(LogitsProcessor):
    """q_t for `generate`: adds log psi, computed from the output layer's input, to the logits."""

    def __init__(self, network: PreTrainedModel, twist: Twist):
        self.twist = twist
        network.get_output_embeddings().register_forward_pre_hook(self.remember)

    def remember(self, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        """Keep the states [N, D] of the last position."""
        self.hidden = inputs[0][:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits of q_t [N, V] from those of p."""
        return scores + self.twist(self.hidden)
