"""Do the tests of learned and drawn quantities hold for other seeds and another rounding?

    python -m pytest -p tests.margins -m learned --tb=line

runs each of them twenty times, with other seeds of all generators and with logits that differ in
their last bit, as on another processor.
"""

import pytest


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("learned"):
        metafunc.fixturenames.insert(0, "shift")
        metafunc.parametrize("shift", range(1, 21), indirect=True)


@pytest.fixture
def shift(request, monkeypatch):
    import torch  # only now: conftest.py sets the number of threads first

    from tinystories.gpt_neo import GPTNeo

    class Shifted(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed((seed + 10**9 * request.param) % 2**63)

    def head(self: GPTNeo, hidden: torch.Tensor) -> torch.Tensor:
        logits = exact(self, hidden)
        return logits * (1 + torch.finfo(logits.dtype).eps)

    exact = GPTNeo.head
    monkeypatch.setattr(torch, "Generator", Shifted)
    monkeypatch.setattr(GPTNeo, "head", head)
