"""Programs and costs with the entries of `OF_PROGRAMS`: run in a copy of the package that has them. Prints JSON.

The arguments are the words of a config. Nothing is compiled.
"""

import json
import sys

import jax

from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.costs.step import derive
from tunix.models.matmul import product_of_few_rows
from tunix.plan.derived_time import resolve_exchange
from tunix.rl.environments import open_environment
from tunix.rl.table import find_environment, find_reward
from tunix.rl.tool_parsers import find_text_before_calls
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble

words = sys.argv[1:]
cfg = compose(words).config
mesh = build_mesh(cfg)
with jax.set_mesh(mesh):
    program = assemble(cfg, mesh)
    jaxpr = jax.jit(program.step([(100, 1000)])).trace(program.abstract, program.abstract_batch).jaxpr
    few_rows = product_of_few_rows()
costs = derive(cfg, dict(mesh.shape), "cpu", with_activations=False)
rests_over = {
    axis
    for leaf in jax.tree.leaves(program.abstract["params"])
    for axes in leaf.sharding.spec
    for axis in ([axes] if isinstance(axes, str) else axes or ())
}

# Attention of a mesh that splits sequences, for a plan with the new device and its network.
split = compose(["model.mesh_shape=[[8],[cp]]", "model.num_heads=8", "training.seq_len=1024"]).config
sizes = dict.fromkeys(mesh.shape, 1) | {"cp": 8}
cluster = read_topology("mine:8")

rewarded = compose(["task=grpo", "task.rewards=[polite]", "sampling.max_new_tokens=64"]).config
(term,) = rewarded.task.rewards
pairs = ["task=dpo", "task.objective=far_apart", "task.label_smoothing=0.1", "data=pairs", "data.paths=[none]"]
print(
    json.dumps(
        {
            "products": str(jaxpr).count("float8_e4m3fn"),
            "few_rows": few_rows,
            "gathered for experts": [
                each.num_bytes for each in costs.transfers if each.kind == "all-gather" and each.axes == ("ep",)
            ],
            "matmul_share": costs.matmul_share,
            "rests over": sorted(rests_over),
            "exchange": resolve_exchange(split, sizes, cluster)[1],
            "network": cluster.kind.network.nic_gb_per_s,
            "scores": find_reward(term.function)(["Hi"] * 2, ["please", "no"]),
            "compared": compose(pairs).config.task.has_reference,
            "said": open_environment(find_environment("echo"), {}, "arrow")
            .step('->["echo", {"text": "Hi"}]')
            .observations,
            "before": find_text_before_calls("arrow", 'I say it. ->["echo"]'),
        }
    )
)
