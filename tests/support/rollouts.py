"""Words of a tiny run of task=grpo, which compiles few programs."""

import string

from support.harness import ONE_LAYER, SMALL

TASK = [
    *SMALL, *ONE_LAYER, "task=grpo", "data=arithmetic", "data.below=10", "tokenizer=bytes",
    "scheduler=constant",
    "task.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'",
    "task.rewards=[support.own_reward:letters]", "task.reward_processes=1", "task.group_size=4",
    "sampling.max_new_tokens=6", "sampling.stop=[a,b,c,d,e,f,g,h]", "training.seq_len=16",
    "training.global_batch_size=16", "evaluation.num_prompts=4", "evaluation.every_steps=2",
    "evaluation.sample_tokens=0", "checkpoint.save_every_steps=2", "optimizer.learning_rate=0.01",
]  # fmt: skip
WIDE = "model.mesh_shape=[[4,2],[fsdp,tp]]"
ONE = "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "training.micro_batch_size=4"
# With an environment: most turns end, because each letter ends one.
AGENT = [
    *TASK, "task.environment=support.own_environment:Chatty", "task.environment_processes=2",
    f"sampling.stop=[{','.join(string.ascii_letters)}]", "task.max_turns=3", "sampling.max_new_tokens=24",
    "training.seq_len=32", "sampling.max_turn_tokens=6", "evaluation.sampling.max_turn_tokens=6",
    "optimizer.learning_rate=0.003", "sampling.cache=pages",
]  # fmt: skip
