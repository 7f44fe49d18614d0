"""Make the adapters of this folder: random, by PEFT, with what transformers and PEFT say of models that have them.

    python tests/huggingface/adapters/make.py        (a Python that has torch, transformers and peft; the tests need none of them)

Each folder is an adapter as PEFT keeps one, for the model of the same name in tests/models/parity, beside
`expected.safetensors`: float32 logits of the tokens there.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PARITY = HERE.parents[1] / "models" / "parity"
ADAPTERS = {
    "llama": LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
    "deepseek_v3": LoraConfig(  # kv_a_proj_with_mqa holds two of our matrices
        r=3, lora_alpha=12, lora_dropout=0.1,
        target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    ),
}  # fmt: skip


def main() -> None:
    for name, config in ADAPTERS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(PARITY / name, dtype=torch.float32)
        model = get_peft_model(model, config).eval()
        for path, parameter in model.named_parameters():
            if "lora_B" in path:  # zero at first
                torch.nn.init.normal_(parameter, std=0.2)
        tokens = load_file(PARITY / name / "expected.safetensors")["tokens"]
        with torch.no_grad():
            logits = model(tokens.long()).logits
        model.peft_config["default"].base_model_name_or_path = name
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink()
        save_file({"logits": logits}, HERE / name / "expected.safetensors")


if __name__ == "__main__":
    main()
