"""Learning from rewards: answers of the model in training, their scores, and batches made of them.

    questions   `data.prompts`           prompts in the order of all samples, with the columns of their rows
    answers     `inference.sampling`     drawn from the model in training, several to each prompt: a rollout
    scores      `scoring`, `tunix.rewards`   how good each answer is
    advantages  `advantages`             each answer compared with those of its group
    batch       `rollouts`               rows of tokens with advantages, which `training.policy` learns from

The loop of `tunix.trainer` is that of every task. It asks `rollouts` for batches in place of a corpus.
"""
