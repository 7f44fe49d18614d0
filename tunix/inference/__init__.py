"""Inference: a trained model that is ready to use.

Read `pretrained` first: it loads the model of a run or of Hugging Face. `sampling` draws answers to a batch of prompts,
and `cache` keeps keys and values of the tokens so far.
"""
