"""Inference: a trained model that is ready to use.

Read `pretrained` first: it loads the model of a run or of Hugging Face. `sampling` gives the answers to a request, in
compiled programs, with weights that `gathered` has gathered once and keys and values in a `kv_cache`. `lm_eval` lets
EleutherAI's harness ask the model.
"""
