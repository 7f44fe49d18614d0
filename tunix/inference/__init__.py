"""Inference: a trained model that is ready to use.

Read `pretrained` first: it loads the model of a run or of Hugging Face. `sampling` gives the answers to a request
(`requests`): with weights that `gathered` has gathered once, in compiled `stretches` of tokens, with a `cache` of keys
and values of the tokens so far, and each token by `drawing`.
"""
