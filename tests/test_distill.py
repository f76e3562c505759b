"""Self-distillation by full fine-tuning and by LoRA."""

import copy

import pytest
import torch
from test_twist import tiny
from worlds import Recorded, generator

from distill import Student, batches_of, held_out_loss, self_distill
from distill.finetune import parameter_groups
from distill.lora import LoRALinear, add_lora, merge_lora
from distill.self_distill import negative_log_likelihood
from tinystories import Conditional
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig


def distil(model, samples, lora: bool):
    """p^(1) after 30 steps and everything that was reported."""
    source, steps = generator(0), Recorded(30, "distillation")
    student = Student(model.model, 3e-2 if lora else 1e-2, 0.01, lora, source)
    self_distill(student, [model], batches_of([samples], 16, source), steps)
    return Conditional(student.finish("distillation"), model.prompt, model.length), steps.reports


@pytest.mark.parametrize("lora", [False, True])
def test_distilled_samples_become_likelier_and_the_teacher_stays(lora):
    teacher = tiny(0)
    before = copy.deepcopy(teacher.model.state_dict())
    samples = torch.tensor([[3, 4, 5, 6], [3, 3, 2, 1]]).repeat(20, 1)
    student, seen = distil(teacher, samples, lora)
    with torch.no_grad():
        after, before_training = (negative_log_likelihood(model, samples, 40) for model in (student, teacher))
        assert after < before_training - 0.3
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.model.state_dict().items())
    assert held_out_loss([student], [samples[:4]]) < held_out_loss([teacher], [samples[:4]]) - 0.3
    assert len(seen) == 30 and seen[-1]["loss"] < seen[0]["loss"] - 0.3
    assert student.model.state_dict().keys() == before.keys(), "LoRA is merged"
    assert all(parameter.requires_grad for parameter in student.model.parameters())


def test_the_loss_is_of_continuation_tokens_only():
    model = tiny(0)
    tokens = torch.tensor([[3, 4, 5, 6]])
    logits = model.model(torch.tensor([[1, 2, 3, 4, 5]])).log_softmax(-1)[0, 1:]
    expected = -torch.stack([logits[t, token] for t, token in enumerate(tokens[0])]).mean()
    torch.testing.assert_close(negative_log_likelihood(model, tokens, 1), expected)


def test_lora_starts_at_the_base_model_to_the_bit():
    model = tiny(0).model
    ids = torch.randint(7, (3, 9))
    expected = model(ids)
    trained = add_lora(model, generator(0))
    assert torch.equal(model(ids), expected)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained}


def test_merging_lora_keeps_the_function():
    model = tiny(0).model
    for parameter in add_lora(model, generator(0)):
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(7, (3, 9))
    expected = model(ids)
    merge_lora(model)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


def test_lora_adds_as_many_parameters_as_the_paper_counts():
    """98,304 for TinyStories-33M: 4 layers, query and value, 2 r D numbers each."""
    with torch.device("meta"):
        model = GPTNeo(GPTNeoConfig(50257, 768, 4, 16, 2048, ("global", "local") * 2, 256, 3072))
    assert sum(parameter.numel() for parameter in model.parameters()) == 68_514_048
    added = []
    for block in model.h:
        for linear in (block.attn.q_proj, block.attn.v_proj):
            cpu = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
            added += [p for p in LoRALinear(cpu, 8, torch.Generator()).parameters() if p.requires_grad]
    assert sum(parameter.numel() for parameter in added) == 98_304


def test_weight_decay_spares_vectors():
    decayed, spared = parameter_groups(list(tiny(0).model.parameters()), 0.1)
    assert all(p.ndim > 1 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.ndim == 1 for p in spared["params"]) and spared["weight_decay"] == 0.0


def test_a_loss_that_is_not_finite_stops_with_the_step():
    model = tiny(0)
    model.model.wte.weight.data[3] = torch.nan
    with pytest.raises(InputError, match=r"^distillation, step 1: loss is nan; lower the learning rate$"):
        distil(model, torch.tensor([[3, 3, 3, 3]] * 4), lora=False)
