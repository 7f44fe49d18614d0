"""Learning from rewards: completions of the model in training, their rewards, and batches made of them.

    prompts      `data.prompts`         in the order of all samples, with the columns of their rows
    completions  `inference.rollout`    drawn from the model in training, several for each prompt: a rollout
    rewards      `scoring`, `table`     how good each completion is, in processes of their own
                 `engine_rewards`       those that the run computes: of a model, or of a `judge` on a server
    advantages   `rollouts`             each completion compared with those of its group
    batch        `rollouts`             rows of tokens with advantages, which `training.grpo` learns from

In several turns, the model talks with an environment: `environments` has the protocol and the rows, `environment_pool`
their processes with their deadlines, `episodes` the turns, and `tool_parsers` what reads the calls of tools out of a
text.

Rollouts are drawn in turn with steps, or `ahead` of them. `evaluation` measures completions of held-out prompts,
`reference` has log-probabilities under the model of step 0. `samples_file` keeps the completions of a run;
`samples_index` and `samples_page` make a page of them, without jax.
"""
