"""Self-distillation: the next generation's language model from the last one's samples (eq. 7).

    p^(m) = argmin_p  E_{s ~ TSMC(p^(m-1), psi^(m-1))} [ -log p(s_{1:T} | s_0) ],   started at p^(m-1)

The N samples of T tokens come from many runs, because the particles of one run share ancestors: its K final particles hold
far fewer distinct sequences. Few passes with a small learning rate keep the model from learning them by heart; the loss on
samples of runs that were held out, reported beside the training loss, shows it.

What the paper leaves open:
 1. How many samples, runs, updates, and at which rate: all are options, and the defaults stop long before convergence.
 2. All runs count the same, whatever their Z-hat; within a run the final resampling has been applied.
 3. AdamW; weight decay spares biases and LayerNorm.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from distill.batches import Batch
from distill.finetune import Student
from tinystories.decoder import Conditional
from tsmc.steps import Steps


def negative_log_likelihood(model: Conditional, tokens: Tensor, batch_size: int) -> Tensor:
    """-log p(s_t | s_{0:t-1}) summed over sequences [N, T] and divided by batch_size T (eq. 7), a scalar with gradient.

    For a whole batch, N = batch_size, it is the mean; the rows of several processes sum to that.
    """
    return -model.log_probs(tokens)[0].sum() / (batch_size * model.length)


def self_distill(
    student: Student, prompts: Sequence[Conditional], draw_batch: Callable[[int], Batch], steps: Steps
) -> None:
    """Turn the student, a copy of p^(m-1), into p^(m); `prompts` holds p^(m-1) after each prompt, and is left unchanged.

    Reports the loss of every step, before the step is taken.
    """
    students = [student.after(base) for base in prompts]
    for update in steps:
        batch = draw_batch(update)
        loss = negative_log_likelihood(students[batch.prompt], batch.tokens, batch.batch_size)
        steps.report(loss=loss.detach())
        student.optimizer.zero_grad()
        loss.backward()
        student.optimizer.step()
