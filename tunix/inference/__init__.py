"""Inference: a trained model that is ready to use.

Read `pretrained` first: it loads the model of a run or of Hugging Face. `sampling` draws answers to many prompts at
once, with weights that `gathered` has gathered once, a `cache` of keys and values of the tokens so far, and tokens by
`drawing`.
"""
