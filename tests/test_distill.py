"""Self-distillation by full fine-tuning and by LoRA; test_pool.py has that of an adapter."""

import copy
from functools import partial

import pytest
import torch
from worlds import Recorded, generator, tiny_conditional

from distill.finetune import LoRALinear, Student, add_lora, merge_lora
from distill.self_distill import Batch, batches_of, model_loss, self_distill
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig


@pytest.mark.parametrize("lora", [False, True])
def test_distilled_samples_become_likelier_and_the_teacher_stays(lora):
    teacher, reports = tiny_conditional(0), Recorded()
    before = copy.deepcopy(teacher.model.state_dict())
    samples = torch.tensor([[3, 4, 5, 6], [3, 3, 2, 1]]).repeat(20, 1)
    student = Student(teacher.model, 3e-2 if lora else 1e-2, 0.01, lora, generator(0))
    loss = partial(model_loss, teacher.with_model(student.network))
    draw_batch = batches_of(samples, torch.ones(40), 16, 30, generator(1))
    self_distill(loss, student.optimizer, draw_batch, 30, reports)
    trained = student.finish()
    model, every = teacher.with_model(trained), Batch(samples, None, 40)
    assert model_loss(model, every) < model_loss(teacher, every) - 0.3
    assert len(reports) == 30 and reports[-1]["loss"] < reports[0]["loss"] - 0.3
    for name, tensor in teacher.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert trained.state_dict().keys() == before.keys(), "LoRA is merged"


def test_the_loss_is_of_continuation_tokens_only_and_sums_over_parts():
    model = tiny_conditional(0)
    tokens = torch.tensor([[3, 4, 5, 6], [3, 3, 2, 1]])
    ids = torch.cat([torch.tensor([[1, 2]] * 2), tokens[:, :-1]], 1)
    log_p = model.model(ids).log_softmax(-1)[:, 1:].gather(-1, tokens[..., None])
    torch.testing.assert_close(model_loss(model, Batch(tokens, None, 2)), -log_p.mean())
    cuts = (slice(None), slice(0, 2), slice(2, 5))
    batches = [batches_of(tokens, torch.ones(2), 5, 1, generator(0), None, cut)(0) for cut in cuts]
    whole, *losses = [model_loss(model, batch) for batch in batches]
    torch.testing.assert_close(sum(losses), whole)


def test_rows_are_drawn_by_their_weights_and_states_are_those_of_their_rows():
    """Tokens are the numbers of their rows; row 1 has weight zero."""
    weights = torch.tensor([1.0, 0.0, 3.0])
    samples, model = torch.arange(3).repeat(4, 1).T, tiny_conditional(0)
    draw_batch = batches_of(samples, weights, 500, 8, generator(0), model)
    batches = [draw_batch(update) for update in range(8)]
    drawn = torch.cat([batch.tokens[:, 0] for batch in batches])
    assert drawn.bincount().tolist()[1] == 0
    assert (drawn == 2).float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert not torch.equal(batches[0].tokens, batches[1].tokens)
    for batch in batches:
        torch.testing.assert_close(batch.hidden, model.states(batch.tokens), rtol=1e-4, atol=1e-5)
    assert batches_of(samples, weights, 5, 1, generator(0))(0).hidden is None


def test_lora_starts_at_the_base_model_to_the_bit_and_merging_keeps_the_function():
    model = tiny_conditional(0).model
    ids = torch.randint(7, (3, 9))
    expected = model(ids)
    trained = add_lora(model, generator(0))
    assert torch.equal(model(ids), expected)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained}
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.3)
    expected = model(ids)
    merge_lora(model)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


def test_lora_adds_as_many_parameters_as_the_paper_counts():
    """4 layers, query and value, 2 r D numbers each."""
    with torch.device("meta"):
        kinds = ("global", "local") * 2
        model = GPTNeo(GPTNeoConfig(50257, 768, 4, 16, 2048, kinds, 256, 3072))
    assert sum(parameter.numel() for parameter in model.parameters()) == 68_514_048
    for block in model.h:
        for name in ("q_proj", "v_proj"):
            setattr(block.attn, name, torch.nn.Linear(768, 768, bias=False))
    assert sum(parameter.numel() for parameter in add_lora(model, generator(0))) == 98_304


def test_adamw_has_the_papers_settings_and_spares_vectors():
    student = Student(tiny_conditional(0).model, 1e-4, 0.1, False, generator(0))
    decayed, spared = student.optimizer.param_groups
    assert decayed["betas"] == (0.9, 0.999)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): key for key, parameter in student.network.named_parameters()}
    vectors = {key for key in names.values() if "ln_" in key or key.endswith("bias")}
    assert {names[id(parameter)] for parameter in spared["params"]} == vectors
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
