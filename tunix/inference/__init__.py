"""Inference: a trained model that is ready to use.

Read `pretrained` first: it loads the model of a run or of Hugging Face. A `rollout` gives the answers to a request,
with weights that `gathered` has gathered once. Its `engine` has rows that draw tokens side by side, with keys and
values in a `kv_cache`, by slots or by pages (`page_pool`); `sampling` says what ends an answer, chooses each token, and
has the compiled programs of the engine. `lm_eval` lets EleutherAI's harness ask the model, and `teacher` loads the
second model of a run.

A server has an engine of its own (`serving`); `openai_requests` makes its jobs of requests of the `openai_api`.
"""
