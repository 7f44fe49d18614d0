"""Three small tasks of EleutherAI's harness, of data on this disk: choices, texts and answers."""

import json
from pathlib import Path

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["few words", "to be", "merged together"]
doc_to_target: "{{label}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean, higher_is_better: true}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def write_tasks(folder: Path) -> None:
    """Write the tasks and their data; `texts` has one that is longer than a context of 64 tokens."""
    rows = [
        {"question": f"a few words number {n}", "label": n % 3, "text": f"words to be merged {n} " * (1 + 3 * n)}
        for n in range(5)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
