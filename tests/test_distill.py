"""Self-distillation by full fine-tuning and by LoRA; test_pool.py has that of an adapter."""

import copy

import pytest
import torch
from worlds import Recorded, generator, tiny_conditional

from distill.finetune import LoRALinear, Student, add_lora, merge_lora
from distill.self_distill import draw_batches, self_distill


@pytest.mark.parametrize("lora", [False, True])
def test_distilled_samples_become_likelier_and_the_teacher_stays(lora):
    """Two sequences of weight 1/4 and 3/4; LoRA learns less of them."""
    teacher, reports = tiny_conditional(0), Recorded()
    before = copy.deepcopy(teacher.network.state_dict())
    tokens, weights = torch.tensor([[3, 4, 5, 6], [3, 3, 2, 1]]), torch.tensor([0.25, 0.75])
    student = Student(teacher.network, 3e-2 if lora else 1e-2, 0.01, lora, generator(0))
    model = student.after(teacher)
    batches = draw_batches(weights, 64, 60, generator(1))
    loss = lambda rows: -model.log_probs(tokens[rows])[0].mean()  # noqa: E731
    self_distill(loss, student.optimizer, batches, reports)
    trained = student.finish()
    log_p = teacher.with_network(trained).log_probs(tokens)[0].sum(-1)
    assert -(weights * log_p).sum() < (0.7 if lora else 0.3) * 4 * reports[0]["loss"]
    assert len(reports) == 60
    for name, tensor in teacher.network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert trained.state_dict().keys() == before.keys(), "LoRA is merged"


def test_rows_are_drawn_by_their_weights():
    batches = draw_batches(torch.tensor([1.0, 0.0, 3.0]), 500, 8, generator(0))
    assert batches.shape == (8, 500) and not torch.equal(batches[0], batches[1])
    counts = batches.flatten().bincount(minlength=3)
    assert counts[1] == 0 and counts[2].item() == pytest.approx(3000, abs=120)  # 4.4 errors


def test_lora_starts_at_the_base_model_to_the_bit_and_merging_keeps_the_function():
    model = tiny_conditional(0).network
    ids = torch.arange(27).view(3, 9) % 7
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


def test_adamw_has_the_papers_settings_and_spares_vectors():
    student = Student(tiny_conditional(0).network, 1e-4, 0.1, False, generator(0))
    decayed, spared = student.optimizer.param_groups
    assert decayed["betas"] == (0.9, 0.999)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): key for key, parameter in student.network.named_parameters()}
    vectors = {key for key in names.values() if "ln_" in key or key.endswith("bias")}
    assert {names[id(parameter)] for parameter in spared["params"]} == vectors
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
