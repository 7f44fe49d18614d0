"""GPT-2 at Hugging Face."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import QKV


def gpt2_names() -> dict[str, Name]:
    """Return the names of GPT-2, which stores matrices as [in, out], and q, k and v side by side in one tensor."""

    def linear(path: str, tensor: str, inner: str, outer: str, part: int = 0, fused=()) -> dict[str, Name]:
        return {
            f"blocks.{path}.w": Name(
                f"transformer.h.{{}}.{tensor}.weight", f"{inner},{outer}", part, fused, fused_dim=1
            ),
            f"blocks.{path}.bias.b": Name(f"transformer.h.{{}}.{tensor}.bias", outer, part, fused),
        }

    def norm(path: str, tensor: str) -> dict[str, Name]:
        return {
            f"{path}.scale": Name(f"transformer.{tensor}.weight", "D"),
            f"{path}.bias.b": Name(f"transformer.{tensor}.bias", "D"),
        }

    return {
        "embedding.table": Name("transformer.wte.weight", "V,D"),
        "positions.table": Name("transformer.wpe.weight", "P,D"),
        **norm("blocks.pre_attention", "h.{}.ln_1"),
        **linear("attention.q", "attn.c_attn", "D", "NH", 0, QKV),
        **linear("attention.k", "attn.c_attn", "D", "KH", 1, QKV),
        **linear("attention.v", "attn.c_attn", "D", "KH", 2, QKV),
        **linear("attention.o", "attn.c_proj", "NH", "D"),
        **norm("blocks.pre_mlp", "h.{}.ln_2"),
        **linear("mlp.up", "mlp.c_fc", "D", "F"),
        **linear("mlp.down", "mlp.c_proj", "F", "D"),
        **norm("final_norm", "ln_f"),
        "head.table": Name("lm_head.weight", "V,D"),
    }


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names=gpt2_names(),
    keys={
        "vocab_size": "vocab_size", "embed_dim": "n_embd", "mlp_dim": "n_inner", "num_layers": "n_layer",
        "num_heads": "n_head", "context_length": "n_positions", "norm_eps": "layer_norm_epsilon",
        "tied_head": "tie_word_embeddings",
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False, True),
        "add_cross_attention": (False,),
    },
    absent={
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
    renamed=(("wte.", "transformer.wte."), ("wpe.", "transformer.wpe."), ("h.", "transformer.h."),
             ("ln_f.", "transformer.ln_f.")),
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)$",),  # causal masks
)  # fmt: skip
