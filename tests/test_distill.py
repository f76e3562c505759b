"""What fine-tuning shares, full or by LoRA, and the distillation of the paper's learner."""

import copy

import pytest
import torch
from worlds import Recorded, generator, rare_potential, tiny_conditional

from distill import Paper, PaperOptions, Streams
from distill.finetune import LoRALinear, Student, add_lora, draw_batches, merge_lora
from tinystories.errors import InputError
from twist.pair import Pair

kinds = pytest.mark.parametrize("student", ["full", "lora"])


@kinds
def test_distilled_samples_become_likelier_and_the_teacher_stays(student):
    """Texts, one of which ends, of weights 1/4, 3/4 and none. LoRA learns as much at its rate."""
    teacher = tiny_conditional(0, end=1)
    before = copy.deepcopy(teacher.network.state_dict())
    tokens = torch.tensor([[3, 4, 5, 6], [3, 1, 1, 1], [0, 0, 0, 0]])
    weights = torch.tensor([0.25, 0.75, 0.0])
    options = PaperOptions(student=student, distill_updates=60, distill_learning_rate=1e-3)
    reports = Recorded()
    learner = Paper(teacher, rare_potential, options, Streams(0), reports)
    learner.samples = lambda pair, m: (tokens, weights)
    trained = learner.distil(Pair(teacher, None), 1)
    nats = [-(weights * model.log_probs(tokens)[0].sum(1)).sum() for model in (teacher, trained)]
    assert nats[1] < 0.5 * nats[0]
    losses = [figures["loss"] for figures in reports["distillation"]]
    # The mean number of tokens of a text is 1/4 of 4 and 3/4 of 2.
    assert len(losses) == 60 and losses[0] == pytest.approx(nats[0].item() / 2.5, rel=0.1)
    for name, tensor in teacher.network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert trained.network.state_dict().keys() == before.keys(), "LoRA is merged"


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
    student = Student(tiny_conditional(0).network, 1e-4, False, generator(0))
    decayed, spared = student.optimizer.param_groups
    assert decayed["betas"] == (0.9, 0.999)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    names = {id(parameter): key for key, parameter in student.network.named_parameters()}
    vectors = {key for key in names.values() if "ln_" in key or key.endswith("bias")}
    assert {names[id(parameter)] for parameter in spared["params"]} == vectors
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


@kinds
def test_a_model_that_is_not_finite_is_not_returned(student):
    trained = Student(tiny_conditional(0).network, 1e-2, student == "lora", generator(0))
    trained.parameters[1].data[0] = torch.nan
    with pytest.raises(InputError, match=r"generation 2 is not finite; lower the learning rate$"):
        trained.finish(2)
