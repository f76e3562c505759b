"""What the pages of docs/ say and do: examples, links, and what imports what."""

import contextlib
import importlib
import io
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from worlds import ListedPotential, bias, ended_world, generator, mutant, random_model

import docs.question
import docs.tiny
from distill import PooledOptions
from tinystories.decoder import NO_END
from tsmc.exact import TableModel, TableTwist, Target
from tsmc.sigma import Sigma, effective_potential
from twist import TextPotential, draw_batch

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.ipynb"
DECIMAL = re.compile(r"-?\d+\.\d+")


@pytest.mark.learned
def test_the_examples_run_and_the_attributes_are_there(finished_job, tmp_path, monkeypatch, capsys):
    (tmp_path / "pocket").symlink_to(finished_job("paper"))
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    small = PooledOptions(pool_first_draws=60, pool_draws=30, pool_first_updates=2, pool_updates=2)
    example = importlib.import_module("docs.any_model")
    monkeypatch.setattr(example, "PooledOptions", lambda **options: small)
    example.main()
    printed = capsys.readouterr().out
    assert re.match(r"log Z-hat -\d.*\n(.*Once upon a time, there was a.*){3}", printed, re.DOTALL)
    page, names = (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(code.replace("runs/pocket", "pocket"), names)
    *lines, last = capsys.readouterr().out.splitlines()
    samples = [line for line in lines if re.match(r"-\d+\.\d+ -\d+\.\d+ Once", line)]
    log_z, exact = map(float, re.findall(r"-\d+\.\d+", last))
    assert len(samples) == 10 and log_z == pytest.approx(exact, abs=0.3)
    attributes = re.findall(r"`(drawn|population)\.(\w+)", page)
    assert len(attributes) > 10 and all(hasattr(names[name], part) for name, part in attributes)
    world, _, log_phi = ended_world(3, 3)  # the page's objective is zero at psi*
    psi = TableTwist(Target(world, log_phi).optimal_log_psi().detach())
    batch = draw_batch(Sigma(world, log_phi), psi, 50, torch.Generator().manual_seed(0))
    assert names["SoftValues"].twist_loss(None, psi, batch).item() < 1e-20


def test_every_cell_prints_what_stands_below_it(tmp_path, monkeypatch, request):
    """Numbers up to rounding, in a copy of docs/, where Jupyter would start the notebook."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for name in ("tour.ipynb", "tiny.py"):
        (docs / name).symlink_to(TOUR.with_name(name))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(docs)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    namespace = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec("".join(cell["source"]), namespace)
            found = printed.getvalue()
            parts = [one.get("text") or one["data"]["text/plain"] for one in cell["outputs"]]
            expected = "\n".join("".join(part) for part in parts)
            assert DECIMAL.sub("#", found).split() == DECIMAL.sub("#", expected).split()
            pairs = zip(DECIMAL.findall(found), DECIMAL.findall(expected), strict=True)
            for a, b in pairs:
                unit = 10.0 ** -len(b.partition(".")[2])
                assert float(a) == pytest.approx(float(b), rel=0.02, abs=1.01 * unit), (a, b)


POTENTIALS = (ROOT / "docs" / "potentials.md").read_text(encoding="utf-8")
EXAMPLE: dict = {}
for block in re.findall(r"```python\n(.*?)```", POTENTIALS, re.DOTALL):
    exec(block, EXAMPLE)
CHARACTERS, END = "1-", 2


def test_a_question_is_worth_more_than_its_word_alone():
    texts = ["Who was it?", "A girl who ran", "A whole cat."]
    assert docs.question.log_phi(texts) == [0.0, -9.0, -12.0]


def decode(rows):
    """Texts of rows of tokens, the characters 1 and -; the first token of each is the prompt."""
    return ["".join(CHARACTERS[token] for token in row[1:]) for row in rows]


def test_sampler_and_prefix_part_of_json_documents_are_exact():
    model = random_model(3, END)
    potential = TextPotential([EXAMPLE["document"]], decode, model.prompt, END)
    log_phi = lambda tokens, log_p: potential(tokens)  # noqa: E731
    assert bias(model, None, log_phi, log_prefix=potential.log_prefix) < 1e-12


@pytest.mark.parametrize("end", [NO_END, 1])
def test_a_power_of_p_is_sampled_at_a_temperature(end):
    """Sigma is the normalised power."""
    model = random_model(3, end)
    log_phi, twist = EXAMPLE["power"](model, 3.0, 1.0)
    target = Target(model, log_phi)
    log_power = 3.0 * target.log_p[-1]  # of all 27 texts
    assert target.log_z == pytest.approx(log_power.logsumexp(0).item(), abs=1e-12)
    torch.testing.assert_close(target.log_sigma[-1], log_power.log_softmax(0))
    assert bias(model, twist, log_phi, target, ess_threshold=0.0) < 1e-12


ORDER = ["tinystories", "tsmc", "twist", "distill", "eval", "main"]


@pytest.mark.parametrize("package", ORDER[:5])
def test_packages_import_only_those_before_them(package):
    """And the wheel has all but `eval`."""
    later = "|".join(ORDER[ORDER.index(package) + 1 :])
    for path in (ROOT / package).rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        assert not re.search(rf"^ *(from|import) ({later})\b", code, re.MULTILINE), path
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["packages"] == ORDER[:4]


def test_every_link_leads_to_a_function_of_that_name():
    page = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    links = re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)\)", page)
    assert len(links) >= 20
    for name, path in links:
        code = (ROOT / "docs" / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), (name, path)


@pytest.mark.learned
@pytest.mark.parametrize("generation", [0, 1])
def test_the_page_agrees_with_enumeration(generation):
    """For a random p^(0), p^(1), twist psi and potential: log Z_sigma, log sigma, KL(sigma || q)
    and the CTL loss exactly; E[Z-hat], E[Z-hat f(words)], f = 1 on a third of the words, and the
    CTL gradient by their means."""
    tiny = mutant(docs.tiny, ("V, T, BETA = 4, 8, 5.0", "V, T, BETA = 3, 4, 5.0"))
    source = generator(0)
    base, change, log_psi = torch.randn(3, tiny.N, tiny.V, dtype=torch.float64, generator=source)
    logits = base + generation * change / 2
    log_phi = -torch.randn(tiny.V**tiny.T, dtype=torch.float64, generator=source).abs()
    log_p_base, log_p = tiny.language_model(base), tiny.language_model(logits)
    given = (log_p, tiny.by_prefix(log_psi), tiny.effective_potential(log_p_base, log_phi, log_p))
    first, model = (TableModel(rows, tiny.T) for rows in (base, logits))
    potential = effective_potential(ListedPotential(log_phi, tiny.V), first)
    target = Target(model, potential)  # sigma as p^(m) sees it
    twist = TableTwist(log_psi)
    log_sigma, log_z_sigma = tiny.enumerate_target(log_p_base, log_phi)
    log_q = tiny.joint(tiny.proposal(*given[:2])[0])
    kl = (log_sigma[tiny.N :].exp() * (log_sigma - log_q)[tiny.N :]).sum()
    loss = tiny.ctl_loss(log_sigma, *given[:2])
    exact_log_q = target.tree.prefix_log_q(twist)
    wanted = [torch.cat(levels) for levels in (target.log_sigma, exact_log_q)]
    torch.testing.assert_close([log_sigma, log_q], wanted, rtol=0, atol=1e-9)
    exact = [target.log_z, target.kl_to(exact_log_q[-1]), target.ctl_loss(twist).item()]
    assert [log_z_sigma, kl.item(), loss.item()] == pytest.approx(exact, rel=0, abs=1e-9)
    words, log_z = tiny.tsmc(*given, 20000, 5, generator(1))
    sigma = target.log_sigma[-1].exp()
    third = (torch.arange(len(sigma)) % 3 == 0).double()
    for function in (torch.ones_like(sigma), third):
        found = log_z.exp() * function[words - tiny.N].mean(1)  # [R]
        wanted = math.exp(target.log_z) * (sigma * function).sum()
        assert (found.mean() - wanted).abs() < 5 * found.std() / math.sqrt(len(found))
    target.ctl_loss(twist).backward()
    wanted = tiny.by_prefix(-twist.log_psi.grad)
    source = generator(2)
    gradients = torch.stack([tiny.ctl_gradient(*given, 4000, source)[0] for _ in range(100)])
    error = gradients.std(0) / 100**0.5
    assert ((gradients.mean(0) - wanted).abs() <= 5 * error + 1e-12).all()


def test_a_solution_passes_its_check():
    command = [sys.executable, "docs/assignments.py", "2", "--solved"]
    assert "the variances add up to 1.28" in subprocess.check_output(command, text=True)
