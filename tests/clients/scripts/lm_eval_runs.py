"""The same tasks by lm-eval's own model and by a server: python lm_eval_runs.py URL MODEL FOLDER TASKS.

FOLDER holds the model and TASKS the files of the tasks. Prints scores, log-likelihoods and texts as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def main(url: str, model: str, folder: str, tasks: str) -> dict[str, Any]:
    manager = TaskManager(include_path=tasks, include_defaults=False)
    server = f"model={model},base_url={url}/v1/completions,num_concurrent=2,max_retries=1"
    local = f"{server},tokenizer={folder},tokenizer_backend=huggingface"
    runs: dict[str, tuple[str, str, list[str]]] = {
        "hf": ("hf", f"pretrained={folder},dtype=float32,device=cpu", ["facts_choice", "facts_text"]),
        "server": ("local-completions", local, ["facts_choice", "facts_text"]),
        "remote tokenizer": ("local-completions", server, ["facts_choice"]),
    }
    return {name: _run(manager, *run) for name, run in runs.items()}


def _run(manager: TaskManager, kind: str, arguments: str, tasks: list[str]) -> dict[str, Any]:
    evaluation = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=tasks, task_manager=manager, batch_size=2, bootstrap_iters=0
    )
    scores = {
        f"{task} {name}": value
        for task, results in evaluation["results"].items()
        for name, value in results.items()
        if isinstance(value, float) and "stderr" not in name
    }
    answers = {
        task: [sample["resps"] for sample in sorted(samples, key=lambda item: item["doc_id"])]
        for task, samples in evaluation["samples"].items()
    }
    return {"scores": scores, "answers": answers}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
