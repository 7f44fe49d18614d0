"""Make the adapters of this folder by PEFT, with what transformers and PEFT say of models that have them.

    python tests/huggingface/adapters/make.py        (a Python that has torch, transformers and peft; the tests need none of them)

A folder is an adapter as PEFT keeps one, for a model in tests/models/parity, beside `expected.safetensors`: float32
logits of the tokens there. Those of `TRAINED` are adapters as they start (of PiSSA, as it ends); expected are also the
losses of `STEPS` steps of AdamW, and the logits behind them.
"""

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PARITY = HERE.parents[1] / "models" / "parity"
THREE = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
ADAPTERS = {
    "llama": LoraConfig(**THREE, use_rslora=True),
    "deepseek_v3": LoraConfig(  # kv_a_proj_with_mqa holds two of our matrices
        r=3, lora_alpha=12, lora_dropout=0.1,
        target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    ),
}  # fmt: skip
STEPS, RATE = 4, 1e-2
# Name -> (model, config, rate of the second factors as a multiple of RATE)
TRAINED = {
    "llama_dora": ("llama", LoraConfig(**THREE, use_rslora=True, use_dora=True), 4.0),
    "llama_pissa": ("llama", LoraConfig(**THREE, init_lora_weights="pissa"), 1.0),
}
EXPERTS = {"olmoe": ["gate_proj", "up_proj", "down_proj"], "mixtral": ["w1", "w3", "w2"]}


def load_base(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(PARITY / name, dtype=torch.float32)


def read_tokens(name: str) -> torch.Tensor:
    return load_file(PARITY / name / "expected.safetensors")["tokens"].long()


def save(model: torch.nn.Module, folder: Path, base: str, **keys) -> None:
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder, **keys)
    (folder / "README.md").unlink()


def make_random(name: str, config: LoraConfig) -> None:
    model = get_peft_model(load_base(name), config).eval()
    for path, parameter in model.named_parameters():
        if "lora_B" in path:  # zero at first
            torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        logits = model(read_tokens(name)).logits
    save(model, HERE / name, name)
    save_file({"logits": logits}, HERE / name / "expected.safetensors")


def make_trained(folder: Path, base: str, config: LoraConfig, ratio: float) -> None:
    model, tokens = get_peft_model(load_base(base), config), read_tokens(base)
    targets = tokens.roll(-1, 1)
    start = folder / "start"
    model.peft_config["default"].init_lora_weights = True  # of the files: to load them starts nothing anew
    save(model, start, base)
    settings = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, loraplus_lr_ratio=ratio, **settings)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    if config.use_dora:  # as it starts: our run begins with it
        for path in start.iterdir():
            path.rename(folder / path.name)
    else:  # as it ends
        model.peft_config["default"].init_lora_weights = "pissa"
        save(model, folder, base, path_initial_model_for_weight_conversion=str(start))
        for path in start.iterdir():
            path.unlink()
    start.rmdir()
    save_file({"losses": torch.tensor(losses), "logits": logits}, folder / "expected.safetensors")


def make_expert(name: str, modules: list[str]) -> None:
    """Random updates of each expert and of the queries, under the names of linear layers, which PEFT brings to its own."""
    model, prefix, rank, rng = load_base(name), "base_model.model.model.layers", 2, torch.Generator().manual_seed(0)
    tensors, weights = {}, load_file(PARITY / name / "model.safetensors")
    for path, weight in weights.items():
        module = path.removesuffix(".weight")
        if module.rpartition(".")[2] not in [*modules, "q_proj"]:
            continue
        out, into = weight.shape
        tensors[f"{prefix}{module.removeprefix('model.layers')}.lora_A.weight"] = (
            torch.randn(rank, into, generator=rng) * into**-0.5
        )
        tensors[f"{prefix}{module.removeprefix('model.layers')}.lora_B.weight"] = (
            torch.randn(out, rank, generator=rng) * 0.2
        )
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name, "r": rank, "lora_alpha": 5,
        "target_modules": sorted([*modules, "q_proj"]), "bias": "none", "lora_dropout": 0.0,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        logits = model(read_tokens(name)).logits
    save_file({"logits": logits}, folder / "expected.safetensors")
    if name == "mixtral":  # the same updates in PEFT's own form
        save(model, folder / "packed", name)


def main() -> None:
    for name, config in ADAPTERS.items():
        make_random(name, config)
    for name, case in TRAINED.items():
        make_trained(HERE / name, *case)
    for name, modules in EXPERTS.items():
        make_expert(name, modules)


if __name__ == "__main__":
    main()
